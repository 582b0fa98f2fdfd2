"""docs/metrics.md lists exactly the metrics that a run writes, each with its reduction."""

import re
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from losses.correction import ImportanceCorrection
from losses.policy import GRPOLoss
from rl.loop.metrics import TrainedMinibatch, batch_metrics, training_metrics
from rl.observability.metrics import Metric
from rl.rollouts.advantage import KLReward
from rl.rollouts.evaluation import EvaluatedSet, Evaluation, EvaluationResult
from rl.rollouts.group import Group
from rl.rollouts.producer import Batch
from rl.rollouts.rubric import Criterion, Rubric
from rl.tasks.sum_digits import make_problem
from rl.trainer_types import DeviceMemory, ExpertLoad, Packing
from rl.types import Branch, Observation, Score
from tests.support.fakes import FakePolicy, ListSink, completion, prompt_of, rollout_of
from tests.support.loops import half_right, make_loop
from tests.support.virtual_time import run_in_virtual_time
from tests.training.parts import make_engine, make_samples

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
LONG = make_problem([12, 34])


def rows():
    """Return {metric: reduction} from all tables of metrics."""
    found = re.findall(
        r"^\| `([^`]+)` \| [^|]+ \| ([a-z-]+) \|", PAGE.read_text(), flags=re.MULTILINE
    )
    assert len(found) == len(dict(found)), "a metric has two rows"
    return dict(found)


def joined(value):
    return type(value).__name__.lower() if isinstance(value, Metric) else "-"


def row_of(name, documented):
    """Return the row of a metric: its own row, or that of its pattern."""
    if name in documented:
        return name
    patterns = [row for row in documented if "<" in row]
    fitting = [row for row in patterns if re.fullmatch(re.sub(r"<\w+>", ".+", row), name)]
    return min(fitting, key=lambda row: row.count("/") * -100 + len(row), default=None)


class UnreducedSink(ListSink):
    """Sink that keeps the metrics with their reductions."""

    def write(self, record):
        self.records.append(record)


class CheckedPolicy(FakePolicy):
    """Policy with a parity check and merged adapters."""

    async def pull(self, policy_version):
        pulled = await super().pull(policy_version)
        return replace(pulled, parity_diff=1e-7, parity_s=0.1, num_bytes=1000, merge_lost=0.25)


def length(rollout):
    return float(len(rollout.text))


def of_loops():
    """Return the metrics of loops over fakes, on-policy and off-policy, with every optional metric
    on.
    """
    sink = UnreducedSink()
    rubric = Rubric(criteria=(Criterion(name="length", function=length),))
    settings: list[dict[str, Any]] = [
        {"eval_every": 1, "evaluation": Evaluation(num_samples=2), "kl_reward": KLReward(coef=0.1)},
        {
            "max_off_policy_steps": 1,
            "num_steps": 2,
            "max_sample_tokens": 20,
            "long_samples": "drop",
        },
        {"max_sample_tokens": 20, "long_samples": "truncate", "mask_truncated_completions": True},
    ]
    for changed in settings:
        policy = CheckedPolicy(reply=half_right)
        loop, _ = make_loop(policy, sink=sink, problems=repeat(LONG), rubric=rubric, **changed)
        run_in_virtual_time(loop.run())
    return {
        k: joined(value)
        for record in sink.records
        for k, value in record.items()
        if value is not None
    }


def of_batches_and_evaluations():
    """Return the metrics of an environment with counters and a reward, and of two sets of
    conversations.
    """
    rollout = rollout_of(prompt_of(LONG), completion("abc"))
    (turn,) = rollout.turns
    turn = replace(turn, observation=Observation(metrics={"tools/calls": 1.0}))
    rollout = replace(rollout, turns=(turn,))
    score = Score(reward=1.0, correct=True, parts={"environment": 0.5, "length": 3.0})
    group = Group(number=0, rollouts=[rollout], scores=[score])
    branches = (Branch(turns=(0,)), Branch(turns=(1,), role="sub-agent", cause="agent"))
    tree = replace(rollout, turns=(turn, turn), branches=branches)
    branching = Group(number=1, rollouts=[tree], scores=[score])
    greedy = [(replace(rollout, turns=(turn, turn)), score)]
    sets = [EvaluatedSet(name=name, greedy=greedy, sampled=[]) for name in ("easy", "hard")]
    return {
        **batch_metrics(Batch(groups=[group, branching], dropped=[("failed", group)])),
        **EvaluationResult(sets=sets).compute_metrics(),
    }


def of_engines():
    """Return the metrics of real losses with both corrections and a reference; experts, packing and
    rounding.
    """
    merged: dict[str, Metric] = {}
    for mode in ("truncate", "mask"):
        engine = make_engine(None, dtype="bfloat16")
        samples = make_samples()
        reference = [
            replace(s, reference_logprobs=np.full(len(s.token_ids), -5.7, np.float32))
            for s in samples
        ]
        loss = GRPOLoss(correction=ImportanceCorrection(high=1.5, mode=mode), kl_coef=0.1)
        gradient = engine.forward_backward(reference, loss=loss)
        gradient = replace(
            gradient,
            expert_load=ExpertLoad(busiest_mean=1.0, busiest_max=1.0),
            loss_metrics={**gradient.loss_metrics, "surprise": 1.0},
            memory=DeviceMemory(allocated=1e9, reserved=2e9, total=3e9),
        )
        assert isinstance(gradient.packing, Packing)
        merged |= training_metrics(
            [TrainedMinibatch(gradient=gradient, update=engine.optim_step())]
        )
    return merged


@pytest.fixture(scope="module")
def written():
    """Every metric that is written anywhere, with its reduction."""
    made = {**of_batches_and_evaluations(), **of_engines()}
    return of_loops() | {name: joined(value) for name, value in made.items()}


def test_every_metric_has_a_row_with_its_reduction(written):
    documented = rows()
    assert len(written) > 60
    for name, how in written.items():
        row = row_of(name, documented)
        assert row is not None, name
        assert documented[row] == how or row == "eval/<set>/<metric>", name


def test_every_row_names_a_written_metric(written):
    documented = rows()
    used = {row_of(name, documented) for name in written}
    assert sorted(set(documented) - used) == []
