"""Findings for real training runs, in this process and in seconds each, with a fault planted at a
known step.

The task: a letter is asked, its capital is right (`k` -> `K!!`). A model of 60,000 parameters is
warmed up on demonstrations of which half are right, and which go on with some `!`, and sometimes a
`?`; GRPO then learns from rewards alone, over the loop of every run, and leaves a run's folder.
"""

import asyncio
import json
import string
from dataclasses import dataclass, replace

import pytest
import torch

from losses.policy import GRPOLoss
from rl.config.json import to_dict
from rl.local import LocalBackend
from rl.loop.warmup import SupervisedWarmup
from rl.models.decoder import Attention, Decoder, FeedForward, TransformerBlock
from rl.models.files.hf import write_random_model
from rl.models.files.tokenizer import open_tokenizer
from rl.models.layers.rope import RoPE
from rl.models.qwen3 import model_registry
from rl.observability.metrics import MetricsWriter
from rl.observability.recorder import Recorder, RecorderConfig
from rl.observability.run_folder import RunFolder
from rl.reporting.data import read_run
from rl.reporting.evidence import RolloutEvidence, Series
from rl.reporting.findings import find
from rl.reporting.live import follow_run
from rl.rollouts.environment import Environments
from rl.rollouts.episode import Sampling
from rl.rollouts.renderer import RendererConfig, make_renderer
from rl.rollouts.rubric import Criterion, Rubric, UnparsedAnswer
from rl.tasks.generated import GeneratedTask
from rl.training.checkpoints.config import CheckpointConfig
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.training.optimizer import Optimizer
from rl.types import Problem, PullResult
from tests.support.loops import make_loop

ASKED = "abcdefgh"
MAX_TOKENS = 16
"""Most tokens of a reply."""
FAULTY = 8
"""The first step with the fault."""
STEPS = 24
pytestmark = [pytest.mark.medium, pytest.mark.timeout(900)]

SPEC = replace(
    model_registry("tiny"),
    model=Decoder.Config(
        vocab_size=320,
        dim=48,
        num_layers=2,
        tie_embeddings=True,
        init_std=0.06,
        block=TransformerBlock.Config(
            attention=Attention.Config(num_heads=4, num_kv_heads=2, head_dim=12),
            feed_forward=FeedForward.Config(hidden_dim=96),
        ),
        rope=RoPE.Config(theta=1e4, max_positions=96),
    ),
)
"""Two layers of width 48 over bytes."""
ENGINE = TrainingEngine.Config(
    optimizer=Optimizer.Config(lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.0),
    training=TrainingConfig(max_tokens_per_microbatch=4096, max_norm=1.0),
)


class Capitals(GeneratedTask):
    """Task that shows two letters and asks for the capital of the first; the rest of the reply is
    ignored.
    """

    def draw(self, generator):
        question = generator.choice(ASKED) + generator.choice(string.ascii_lowercase)
        right = question[0].upper()
        said = right if generator.random() < 0.4 else generator.choice(ASKED.upper())
        ends = "!" * min(int(generator.expovariate(0.7)), 10) + (
            "?" if generator.random() < 0.25 else ""
        )
        return Problem(id=question, question=question, answer=right, demonstration=said + ends)


TASK = Capitals.Config(num_eval=20).build()


class StaleBackend(LocalBackend):
    """Backend whose generator keeps its weights after version `last_fresh` but reports newer
    versions.
    """

    last_fresh: float = float("inf")

    async def pull(self, policy_version):
        if policy_version <= self.last_fresh:
            return await super().pull(policy_version)
        self.sampler.weights = policy_version
        for version in [v for v in self.sampler.pushed if v <= policy_version]:
            del self.sampler.pushed[version]
        return PullResult()


def open_model(folder, *, engine=ENGINE):
    """Return a backend with the folder's model, and its renderer."""
    tokenizer, ends = open_tokenizer(folder)
    renderer = make_renderer(RendererConfig(kind="raw"), tokenizer=tokenizer, stop_token_ids=ends)
    torch.manual_seed(0)
    return StaleBackend(engine, spec=SPEC, hf_assets_path=str(folder), device="cpu"), renderer


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Return the Hugging Face folder of a warmed-up model."""
    folder = tmp_path_factory.mktemp("start")
    backend, renderer = open_model(write_random_model(folder / "random", spec=SPEC, seed=0))
    config = SupervisedWarmup.Config(num_steps=150, lr=1e-2, min_lr_ratio=0.0, weight_decay=0.0)

    async def warm_up():
        async with backend as local:
            environments = Environments(make=TASK.environment)
            warmup = config.build(trainer=local, renderer=renderer, environments=environments)
            await warmup.run(TASK.warmup_problems(seed=0), on_step=lambda loss: None)
            await local.export_hf(str(folder / "warm"), dtype="float32")

    asyncio.run(warm_up())
    return folder / "warm"


async def train(
    start,
    folder,
    *,
    rubric,
    last_fresh,
    engine=ENGINE,
    num_steps=STEPS,
    max_tokens=MAX_TOKENS,
):
    """Train the warmed-up model; `last_fresh` is the last version that reaches the generator."""
    backend, renderer = open_model(start, engine=engine)
    backend.last_fresh = last_fresh
    async with backend as local:
        loop, _ = make_loop(
            local,
            rubric=rubric,
            renderer=renderer,
            task=TASK,
            checkpoint=CheckpointConfig(enable=False),
            num_steps=num_steps,
            groups_per_batch=16,
            group_size=8,
            eval_every=10,
            sampling=Sampling(max_tokens=max_tokens),
        )
        loop.recorder = Recorder(folder.rollouts, config=RecorderConfig())
        values = {"loop": to_dict(loop.config)}
        folder.config_json.write_text(
            json.dumps({"module": __name__, "config": "small", "values": values})
        )
        with MetricsWriter(folder.metrics) as metrics:
            loop.sinks = [metrics]
            await loop.run()


def is_right(rollout):
    return rollout.text.rstrip("!?") == rollout.prompt.problem.answer


def answer(rollout):
    return float(is_right(rollout))


def rubric(function, *more):
    return Rubric(criteria=(Criterion(name="answer", function=function), *more), correct=is_right)


HEALTHY = rubric(answer)


def from_faulty_step(fault, *, sound):
    """Return a reward function that is sound before step `FAULTY` and faulty from then on."""

    def reward(rollout):
        trained_at = rollout.completion.policy_versions.max() + 1
        return fault(rollout) if trained_at >= FAULTY else sound(rollout)

    return reward


def findings_of(start, folder, *, rubric=HEALTHY, last_fresh=float("inf"), **settings):
    """Return the findings of a finished run."""
    with RunFolder.create(folder, "run") as made:
        asyncio.run(train(start, made, rubric=rubric, last_fresh=last_fresh, **settings))
        made.mark_finished()
    run = read_run(made.path)
    assert run.status == "finished"
    num_steps = settings.get("num_steps", STEPS)
    assert [record["step"] for record in run.steps] == list(range(1, num_steps + 1))
    findings = find(run)
    # What is said during the run is what its report says.
    assert list(follow_run(made.path)()) == [finding.kind for finding in findings]
    return run, findings


def of_kind(findings, kind):
    (finding,) = [f for f in findings if f.kind == kind]
    assert findings[0] is finding  # all others follow from the first
    assert abs(finding.since_step - FAULTY) <= 2
    return finding


def series(finding, name):
    (found,) = [e for e in finding.evidence if isinstance(e, Series) and e.name == name]
    return dict(zip(found.steps, found.values, strict=True))


def replies(finding):
    """Return the replies shown as evidence, which are not older than the fault."""
    shown = [e for e in finding.evidence if isinstance(e, RolloutEvidence)]
    assert shown
    assert all(reply.step >= finding.since_step for reply in shown)
    return shown


def length(rollout):
    return len(rollout.completion.token_ids) / MAX_TOKENS


def test_healthy_run_learns_and_has_no_findings(start, tmp_path):
    run, findings = findings_of(start, tmp_path)
    assert findings == []
    assert run.steps[-1]["reward/correct"] > run.steps[0]["reward/correct"] + 0.25


def answer_of_whole_reply(rollout):
    return answer(rollout) * (not rollout.completion.is_cut_off)


def answer_after_mark(rollout):
    """Look for the answer where no reply has one."""
    if "#" not in rollout.text:
        raise UnparsedAnswer("no #")
    return answer(rollout)


def never(rollout):
    return 0.0


@dataclass(kw_only=True, slots=True)
class FlatLoss(GRPOLoss):
    """Loss whose gradient is 0."""

    def __call__(self, inputs):
        output = GRPOLoss.__call__(self, inputs)
        return replace(output, loss_sum=0.0 * output.loss_sum)


def with_correct(function):
    """Return a rubric in which a reply is right if it earns the whole reward."""
    return Rubric(criteria=(Criterion(name="answer", function=function),))


STILL = replace(ENGINE, optimizer=replace(ENGINE.optimizer, lr=0.0))
BEGINNERS = {
    "replies_cut_off": {"rubric": with_correct(answer_of_whole_reply), "max_tokens": 1},
    "unparsed_replies": {"rubric": with_correct(answer_after_mark)},
    "never_right": {"rubric": with_correct(never)},
    "nothing_learned": {"engine": STILL},
}


@pytest.mark.parametrize(("kind", "fault"), BEGINNERS.items(), ids=BEGINNERS)
def test_fault_of_a_beginner_is_named_within_ten_steps(start, tmp_path, kind, fault):
    _, findings = findings_of(start, tmp_path, num_steps=10, **fault)
    assert [finding.kind for finding in findings] == [kind]
    assert findings[0].since_step <= 3


def test_loss_without_a_gradient_is_named_within_ten_steps(start, tmp_path):
    _, findings = findings_of(
        start, tmp_path, num_steps=10, engine=replace(ENGINE, loss=FlatLoss())
    )
    assert [finding.title for finding in findings] == ["The gradient is 0"]


def test_reward_that_pays_for_a_pattern_is_found(start, tmp_path):
    def paid(rollout):
        return 1.0 if "?" in rollout.text else answer(rollout)

    _, findings = findings_of(start, tmp_path, rubric=rubric(from_faulty_step(paid, sound=answer)))
    finding = of_kind(findings, "reward_hacking")
    assert "'?'" in finding.title
    # The policy exploits it: it writes little else.
    shares = series(finding, "share of recorded replies with '?'")
    assert sum(shares[step] for step in (1, 2, 3, 4)) / 4 < 0.5
    assert sum(shares[step] for step in range(STEPS - 3, STEPS + 1)) / 4 > 0.7
    shown = replies(finding)
    assert len(shown) >= 3
    for reply in shown:
        assert "?" in reply.text
        assert reply.text.rstrip("!?") != reply.problem[0].upper()


def test_length_penalty_with_the_wrong_sign_is_found(start, tmp_path):
    sign = from_faulty_step(length, sound=lambda rollout: -0.1 * length(rollout))
    both = rubric(answer, Criterion(name="length", function=sign))
    _, findings = findings_of(start, tmp_path, rubric=both)
    finding = of_kind(findings, "length_drift")
    assert "longer" in finding.title
    assert "paid" in finding.title
    lengths = series(finding, "completion/tokens_mean")
    assert lengths[STEPS] > 2 * lengths[FAULTY]
    paid = series(finding, "reward for length, -1 to 1")
    assert {paid[step] for step in paid if step < FAULTY} == {-1.0}
    assert {paid[step] for step in paid if step >= FAULTY} == {1.0}


def test_generator_that_keeps_its_weights_is_found(start, tmp_path):
    # Weights from step 7 on do not arrive, so step 8 is the first to train on stale data.
    _, findings = findings_of(start, tmp_path, last_fresh=FAULTY - 2)
    finding = of_kind(findings, "stale_generator")
    differences = series(finding, "logprob_diff/mean")
    assert max(differences[step] for step in differences if step < FAULTY) < 1e-5
    assert min(differences[step] for step in differences if step > FAULTY) > 1e-3
    replies(finding)
