"""docs/metrics.md has each metric that a run writes, as it is joined, and no other."""

import re
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from losses.correction import ImportanceCorrection
from losses.grpo import GRPOLoss
from rl.observability.metrics import Metric
from rl.observability.sinks.config import SinksConfig
from rl.rollouts.evaluation import EvaluatedSet, EvaluationResult
from rl.rollouts.grading import scored
from rl.rollouts.group import Group
from rl.rollouts.kl_reward import KLReward
from rl.rollouts.producer import Batch
from rl.rollouts.rubric import Criterion, Rubric
from rl.rollouts.settings import Evaluation
from rl.step_metrics import TrainedMinibatch, batch_metrics, training_metrics
from rl.tasks.sum_digits import make_problem
from rl.types import ExpertLoad, Observation, Packing, Score
from tests.support.fakes import FakePolicy, ListSink, completion, prompt_of, rollout_of
from tests.support.loops import half_right, make_loop
from tests.support.virtual_time import run_in_virtual_time
from tests.test_docs_of_options import fields_of
from tests.training.parts import make_engine, make_samples

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
LONG = make_problem([12, 34])


def rows():
    """{metric: how it is joined} of all tables of metrics."""
    found = re.findall(r"^\| `([^`]+)` \| [^|]+ \| ([a-z-]+) \|", PAGE.read_text(), flags=re.MULTILINE)
    assert len(found) == len(dict(found)), "a metric has two rows"
    return dict(found)


def joined(value):
    return type(value).__name__.lower() if isinstance(value, Metric) else "-"


def row_of(name, documented):
    """The row of a metric: its own, else that of its kind."""
    if name in documented:
        return name
    patterns = [row for row in documented if "<" in row]
    fitting = [row for row in patterns if re.fullmatch(re.sub(r"<\w+>", ".+", row), name)]
    return min(fitting, key=lambda row: row.count("/") * -100 + len(row), default=None)


class KeptRecords(ListSink):
    """Keeps how each number is joined."""

    def __init__(self):
        super().__init__()
        self.metrics = {}

    def write(self, record):
        for name, value in record.items():
            if value is not None:
                self.metrics[name] = joined(value)


class CheckedPolicy(FakePolicy):
    """Whose generators are compared with it."""

    async def serve(self, policy_version):
        return replace(await super().serve(policy_version), canary_diff=1e-7, canary_s=0.1)


def length(rollout):
    return float(len(rollout.text))


def of_loops():
    """What loops over fakes write: synchronous and ahead, with what has metrics of its own switched on."""
    sink = KeptRecords()
    rubric = Rubric(criteria=(Criterion(name="length", function=length),))
    settings: list[dict[str, Any]] = [
        {"eval_every": 1, "evaluation": Evaluation(num_samples=2), "kl_reward": KLReward(coef=0.1)},
        {"max_policy_age": 1, "num_steps": 2, "max_sample_tokens": 20, "long_samples": "drop"},
        {"max_sample_tokens": 20, "long_samples": "truncate"},
    ]
    for changed in settings:
        policy = CheckedPolicy(reply=half_right)
        loop, _ = make_loop(policy, sink=sink, problems=repeat(LONG), rubric=rubric, **changed)
        run_in_virtual_time(loop.run())
    return sink.metrics


def of_environments():
    """Of a rollout whose environment counts, and gives a reward."""
    rollout = rollout_of(prompt_of(LONG), completion("abc"))
    (turn,) = rollout.turns
    rollout = replace(rollout, turns=(replace(turn, observation=Observation(metrics={"tools/calls": 1.0})),))
    score = Score(reward=1.0, correct=True, parts={"environment": 0.5})
    group = Group(
        number=0, rollouts=[rollout], scores=[score], scored=scored([rollout], [score]), generated_at=0.0
    )
    return batch_metrics(Batch(groups=[group], dropped=[("failed", group)]))


def of_evaluations():
    """Of two sets, of which the second has conversations."""
    rollout = rollout_of(prompt_of(LONG), completion("abc"))
    score = Score(reward=1.0, correct=True, parts={"length": 3.0})
    sets = [
        EvaluatedSet(name=name, greedy=[(replace(rollout, turns=rollout.turns * turns), score)], sampled=[])
        for name, turns in (("easy", 2), ("hard", 2))
    ]
    return EvaluationResult(sets=sets).metrics()


def of_engines():
    """What real losses report, with a correction in both modes and a reference; experts and packing."""
    merged: dict[str, Metric] = {}
    for mode in ("truncate", "mask"):
        engine = make_engine(None)
        samples = make_samples()
        reference = [
            replace(s, reference_logprobs=np.full(len(s.token_ids), -5.7, np.float32)) for s in samples
        ]
        loss = GRPOLoss(correction=ImportanceCorrection(high=1.5, mode=mode), kl_coef=0.1)
        gradient = engine.forward_backward(reference, loss=loss)
        gradient = replace(
            gradient,
            expert_load=ExpertLoad(busiest_mean=1.0, busiest_max=1.0),
            loss_metrics={**gradient.loss_metrics, "surprise": 1.0},
        )
        assert isinstance(gradient.packing, Packing)
        merged |= training_metrics([TrainedMinibatch(gradient=gradient, update=engine.optim_step())])
    return merged


@pytest.fixture(scope="module")
def written():
    """{metric: how it is joined} of all that is ever written."""
    made = {**of_environments(), **of_evaluations(), **of_engines()}
    return of_loops() | {name: joined(value) for name, value in made.items()}


def test_every_metric_has_a_row_that_says_how_it_is_joined(written):
    documented = rows()
    assert len(written) > 60
    for name, how in written.items():
        row = row_of(name, documented)
        assert row is not None, name
        assert documented[row] == how or row == "eval/<set>/<metric>", name


def test_every_row_is_of_a_metric(written):
    documented = rows()
    used = {row_of(name, documented) for name in written}
    assert sorted(set(documented) - used) == []


def test_names_that_depend_on_the_run_are_found_by_their_kind():
    documented = rows()
    assert row_of("eval/hard/correct", documented) == "eval/<set>/<metric>"
    assert row_of("eval/pass@4", documented) == "eval/pass@<k>"
    assert row_of("eval/length", documented) == "eval/<function>"
    assert row_of("environment/tools/calls", documented) == "environment/<name>"
    assert row_of("unknown/thing", documented) is None


def test_every_field_of_the_sinks_has_a_row_and_no_other():
    section = PAGE.read_text().partition("## Where they go: `sinks`\n")[2]
    named = re.findall(r"^\| ((?:`[a-z_.]+`(?:, )?)+) \|", section, flags=re.MULTILINE)
    fields = {f"sinks.{name}" for row in named for name in re.findall(r"`([^`]+)`", row)}
    assert sorted(fields) == sorted(fields_of(SinksConfig, prefix="sinks."))
