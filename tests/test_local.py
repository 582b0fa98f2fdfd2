import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from losses.cross_entropy import CrossEntropyLoss
from losses.types import LossInputs, LossOutput
from rl.local import LocalBackend, LocalScorer
from rl.loop import Loop, Seams
from rl.models.converters.lora import LoRA
from rl.models.generate import generate
from rl.models.spec import ModelSpec
from rl.observability.spans import read_spans
from rl.rollouts.renderer import RendererConfig, make_renderer
from rl.rollouts.rubric import Criterion, GroupCriterion, Rubric
from rl.rollouts.samples import policy_sample
from rl.rollouts.settings import Sampling
from rl.rollouts.tokenizer import open_tokenizer
from rl.step_checkpoints import StepCheckpoints
from rl.tasks.generated import GeneratedTask
from rl.training.checkpoint_config import CheckpointConfig
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.training.optimizer import Optimizer
from rl.types import Completion, OptimParams, Problem, Prompt, Rollout, SamplingParams, TrainingSample, Turn
from tests.support import policies
from tests.support.fakes import ListSink
from tests.support.kept_spans import kept_spans
from tests.support.scored import replied
from tests.training.parts import make_samples, small_spec, write_assets

PROMPTS = [np.array(ids, dtype=np.int32) for ids in ([3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9])]
SAMPLING = SamplingParams(max_tokens=12, num_samples=4, seed=5)
STEP = OptimParams(lr=0.05)
ResultT = TypeVar("ResultT")


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return write_assets(tmp_path_factory.mktemp("assets") / "hf")


def with_backend(
    use: Callable[[LocalBackend], Awaitable[ResultT]],
    *,
    assets: str | None = None,
    spec: ModelSpec | None = None,
    **settings: Any,
) -> ResultT:
    async def run() -> ResultT:
        config = TrainingEngine.Config(**settings)
        async with LocalBackend(
            config, spec=spec or small_spec(), hf_assets_path=assets, device="cpu"
        ) as local:
            return await use(local)

    return asyncio.run(run())


def sample_of(prompt: np.ndarray, completion: Completion, *, temperature: float = 1.0) -> TrainingSample:
    turn = Turn(messages=(), prompt_ids=prompt, completion=completion, text="")
    problem = Problem(id="p", question="", answer="")
    rollout = Rollout(prompt=Prompt(problem=problem, token_ids=prompt), sample=0, turns=(turn,))
    advantages = np.linspace(-1, 1, len(completion.token_ids)).astype(np.float32)
    return policy_sample(rollout, advantages_C=advantages, temperature=temperature)


async def sampled(local: LocalBackend, sampling: SamplingParams = SAMPLING) -> list[TrainingSample]:
    """Of the weights as they are."""
    await local.serve(await local.push())
    groups = await local.generate(PROMPTS, sampling=sampling)
    return [
        sample_of(prompt, completion, temperature=sampling.temperature)
        for prompt, group in zip(PROMPTS, groups, strict=True)
        for completion in group
    ]


async def train(local: LocalBackend, num_steps: int = 3) -> None:
    for _ in range(num_steps):
        await local.forward_backward(make_samples(), loss=CrossEntropyLoss())
        await local.optim_step(STEP)


def ids_of(groups: list[list[Completion]]) -> list[list[int]]:
    return [completion.token_ids.tolist() for group in groups for completion in group]


def test_every_call_is_an_activity_in_the_order_of_the_calls(assets, tmp_path):
    async def use(local):
        await local.forward_backward(await sampled(local))
        await local.optim_step(STEP)
        await local.export_hf(str(tmp_path / "hf"))

    with kept_spans(tmp_path):
        with_backend(use, assets=assets)
    spans = read_spans(tmp_path)
    names = ["push", "pull", "generate", "forward_backward", "pack", "optim_step", "export"]
    assert [span.name for span in spans] == names
    outer, inner = spans[3:5]
    assert outer.start_s <= inner.start_s <= inner.end_s <= outer.end_s


# What is sampled is the learner's


@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        (small_spec(), {}),
        (small_spec(tie=False), {"converters": (LoRA.Config(rank=4),)}),
        (policies.small_spec(experts=True), {}),
        (small_spec(), {"training": TrainingConfig(cpu_offload=True)}),
    ],
    ids=["plain", "LoRA", "experts", "offloaded"],
)
def test_sampled_logprobs_are_the_learners_after_some_steps(spec, settings):
    vocab = spec.model.vocab_size

    async def use(local):
        fits = [replace(s, token_ids=s.token_ids % vocab) for s in make_samples()]
        for _ in range(3):
            await local.forward_backward(fits, loss=CrossEntropyLoss())
            await local.optim_step(STEP)
        samples = await sampled(local, replace(SAMPLING, temperature=0.8))
        return samples, await local.forward_backward(samples)

    samples, result = with_backend(use, spec=spec, **settings)
    assert all((s.policy_versions[s.mask] == 3).all() for s in samples)
    assert result.ratio_mean == pytest.approx(1.0, abs=1e-5)
    assert result.logprob_diff_max < 2e-5
    assert result.num_valid_tokens == sum(s.mask.sum() for s in samples) == 12 * 12


def test_a_policy_with_adapters_is_sampled_with_them(assets):
    async def use(local):
        before = await sampled(local)
        await train(local)
        return before, await sampled(local)

    before, after = with_backend(use, assets=assets, converters=(LoRA.Config(rank=4),))
    assert [s.token_ids.tolist() for s in before] != [s.token_ids.tolist() for s in after]


@pytest.mark.medium  # the kernels are compiled at their first use
def test_in_the_batch_invariant_mode_logprobs_are_the_same_bits(assets):
    async def use(local):
        return await local.forward_backward(await sampled(local))

    spec = replace(small_spec(), batch_invariant=True)
    assert with_backend(use, assets=assets, spec=spec).logprobs_identical


def test_the_sampler_computes_in_the_dtype_of_the_learners_forward(assets):
    async def use(local):
        await local.serve(await local.push())
        groups = await local.generate(PROMPTS, sampling=SAMPLING)
        model = local.engine.policy.model
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
        return groups, generate(model, PROMPTS, sampling=SAMPLING)

    training = TrainingConfig(param_dtype="bfloat16")
    ours, theirs = with_backend(use, assets=assets, training=training)
    for mine, expected in zip(chain(*ours), chain(*theirs), strict=True):
        assert mine.logprobs.tolist() == expected.logprobs.tolist()


def test_completions_are_those_of_generate_on_the_engines_model(assets):
    async def use(local):
        await local.serve(await local.push())
        return await local.generate(PROMPTS, sampling=SAMPLING), generate(
            local.engine.policy.model, PROMPTS, sampling=SAMPLING
        )

    ours, theirs = with_backend(use, assets=assets)
    assert ids_of(ours) == ids_of(theirs)
    assert len(set(map(tuple, ids_of(ours)))) > 6


# Versions


def test_what_is_served_is_a_snapshot(assets):
    async def use(local):
        await local.serve(await local.push())
        drawn = [await local.generate(PROMPTS, sampling=SAMPLING)]
        await train(local)
        drawn.append(await local.generate(PROMPTS, sampling=SAMPLING))
        version = await local.push()
        await train(local)  # A pushed copy is not the learner's any more, either.
        drawn.append(await local.generate(PROMPTS, sampling=SAMPLING))
        await local.serve(version)
        drawn.append(await local.generate(PROMPTS, sampling=SAMPLING))
        await local.serve(await local.push())
        drawn.append(await local.generate(PROMPTS, sampling=SAMPLING))
        return drawn

    first, trained, pushed, served, last = with_backend(use, assets=assets)
    assert ids_of(first) == ids_of(trained) == ids_of(pushed)
    versions = [int(group[0][0].policy_versions[0]) for group in (first, trained, pushed, served, last)]
    assert versions == [0, 0, 0, 3, 6]
    assert len({str(ids_of(groups)) for groups in (pushed, served, last)}) == 3


def test_a_generate_that_waits_behind_a_serve_names_the_version_it_draws_from(assets):
    async def use(local):
        await local.serve(await local.push())
        await train(local)
        version = await local.push()
        _, queued = await asyncio.gather(local.serve(version), local.generate(PROMPTS, sampling=SAMPLING))
        return version, queued, await local.generate(PROMPTS, sampling=SAMPLING)

    version, queued, later = with_backend(use, assets=assets)
    assert ids_of(queued) == ids_of(later)
    assert {int(v) for group in queued for c in group for v in c.policy_versions} == {version}


def test_versions_that_are_not_there_are_named(assets):
    async def use(local):
        with pytest.raises(RuntimeError, match="no weights to sample from: await serve"):
            await local.generate(PROMPTS, sampling=SAMPLING)
        with pytest.raises(ValueError, match=r"policy_version=7 was not pushed.* None, pushed since \[\]"):
            await local.serve(7)
        await local.push()
        await train(local, 2)
        await local.push()
        await local.serve(2)
        await local.serve(2)  # It is served: nothing is to do.
        with pytest.raises(ValueError, match=r"policy_version=0 .* served is 2, pushed since \[\]"):
            await local.serve(0)

    with_backend(use, assets=assets)


def test_weights_that_are_loaded_are_served_under_their_version(assets, tmp_path):
    async def use(local):
        await local.serve(await local.push())
        first = await local.generate(PROMPTS, sampling=SAMPLING)
        await local.save_checkpoint(str(tmp_path / "saved"))
        await local.push()
        await train(local)
        await local.serve(await local.push())
        await train(local)
        await local.push()
        for num_steps in (2, 0):  # Version 0 is pushed, then 2, then 0 again.
            await local.load_checkpoint(str(tmp_path / "saved"))
            version = await local.push()
            await train(local, num_steps)
            await local.push()
        await local.serve(version)
        for gone in (2, 6):
            with pytest.raises(ValueError, match=rf"={gone} .* served is 0, pushed since \[\]"):
                await local.serve(gone)
        return first, await local.generate(PROMPTS, sampling=SAMPLING)

    first, again = with_backend(use, assets=assets)
    assert ids_of(first) == ids_of(again)


# Cancelled and closed


@dataclass(frozen=True, kw_only=True)
class WaitingLoss:
    """Says when it is called, and goes on when it may."""

    called: threading.Event = field(default_factory=threading.Event)
    may_end: threading.Event = field(default_factory=threading.Event)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        self.called.set()
        assert self.may_end.wait(30)
        return CrossEntropyLoss()(inputs)


def test_a_cancelled_generate_ends_at_its_next_token_and_the_next_one_runs(assets):
    began, cancelled = threading.Event(), threading.Event()
    forwards = []

    def hold(*_):
        forwards.append(began.is_set())
        if not began.is_set():
            began.set()
            assert cancelled.wait(30)

    async def use(local):
        await local.serve(await local.push())
        expected = await local.generate(PROMPTS, sampling=SAMPLING)
        hook = local._model.register_forward_hook(hold)
        call = asyncio.create_task(local.generate(PROMPTS, sampling=SAMPLING))
        await asyncio.to_thread(began.wait, 30)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        cancelled.set()
        await local.serve(0)  # After the call that was under way.
        assert forwards == [False]
        hook.remove()
        assert ids_of(await local.generate(PROMPTS, sampling=SAMPLING)) == ids_of(expected)

    with_backend(use, assets=assets)


def test_a_forward_returns_logprobs_and_leaves_no_gradient(assets):
    async def use(local):
        samples = make_samples()
        measured = await local.forward(samples, loss=CrossEntropyLoss())
        asked = await local.compute_logprobs(samples)
        with pytest.raises(ValueError, match="without an accumulated gradient"):
            await local.optim_step(STEP)
        result = await local.forward_backward(samples, loss=CrossEntropyLoss(), return_logprobs=True)
        await local.drop_gradient()
        step = await local.optim_step(STEP, allow_empty=True)
        return measured, result, asked, step

    measured, result, asked, step = with_backend(use, assets=assets)
    assert measured.loss_sum == result.loss_sum
    for one, other, logprobs in zip(measured.logprobs, result.logprobs, asked, strict=True):
        assert np.array_equal(one, logprobs)
        assert np.array_equal(other, logprobs)
    assert (step.grad_norm, step.policy_version) == (0.0, 1)


def test_a_cancelled_call_of_the_learner_counts_if_it_had_begun_and_else_is_not_made(assets):
    first, second = WaitingLoss(), WaitingLoss()

    async def use(local):
        begun = asyncio.create_task(local.forward_backward(make_samples(), loss=first))
        await asyncio.to_thread(first.called.wait, 30)
        waiting = asyncio.create_task(local.forward_backward(make_samples(), loss=second))
        await asyncio.sleep(0)
        for call in (begun, waiting):
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        first.may_end.set()
        return await local.optim_step(STEP)

    assert with_backend(use, assets=assets).policy_version == 1
    assert not second.called.is_set()


def test_closing_ends_what_is_under_way_and_refuses_what_waits(assets):
    loss = WaitingLoss()

    async def use(local):
        training = asyncio.create_task(local.forward_backward(make_samples(), loss=loss))
        await asyncio.to_thread(loss.called.wait, 30)
        waiting = asyncio.create_task(local.optim_step(STEP))
        await asyncio.sleep(0)
        closing = asyncio.create_task(local.__aexit__(None, None, None))
        while not local._learner.is_closed:
            await asyncio.sleep(0)
        loss.may_end.set()
        await closing
        assert (await training).num_samples == len(make_samples())
        for late in (waiting, local.optim_step(STEP), local.generate(PROMPTS, sampling=SAMPLING)):
            with pytest.raises(RuntimeError, match="the local backend is closed"):
                await late

    with_backend(use, assets=assets)


def test_a_generate_that_is_closed_upon_is_an_error_and_no_half_completion(assets):
    began, closing = threading.Event(), threading.Event()

    def hold(*_):
        began.set()
        assert closing.wait(30)

    async def use(local):
        await local.serve(await local.push())
        local._model.register_forward_hook(hold)
        call = asyncio.create_task(local.generate(PROMPTS, sampling=SAMPLING))
        await asyncio.to_thread(began.wait, 30)
        ending = asyncio.create_task(asyncio.to_thread(local.close))
        while not local._sampler.is_closed:
            await asyncio.sleep(0)
        closing.set()
        with pytest.raises(RuntimeError, match="the local backend is closed"):
            await call
        await ending

    with_backend(use, assets=assets)


def test_a_process_among_several_is_refused(assets, monkeypatch):
    environment = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="WORLD_SIZE=2: a local backend is one process alone"):
        LocalBackend(TrainingEngine.Config(), spec=small_spec(), hf_assets_path=assets)


# Scores


async def half(rollout):
    await asyncio.sleep(0)
    return 0.5 * len(rollout.text)


def rank(rollouts):
    ordered = sorted(len(r.text) for r in rollouts)
    return [float(ordered.index(len(r.text))) for r in rollouts]


def test_the_scorer_calls_async_functions_and_those_of_a_group():
    criteria = (
        Criterion(name="half", function=half),
        GroupCriterion(name="rank", function=rank, weight=10),
    )
    scorer = LocalScorer(rubric=Rubric(criteria=criteria))
    groups = [[replied("aaa"), replied("a")], [replied("aa", rewards=[-1.0])]]
    scores = asyncio.run(scorer.score(groups))
    assert [[score.reward for score in group] for group in scores] == [[11.5, 0.5], [0.0]]


# The loop runs over it


class LowBytes(GeneratedTask):
    """Say bytes below 96: about a third of what a random model says."""

    def draw(self, generator):
        letter = chr(generator.randrange(ord("a"), ord("z") + 1))
        return Problem(id=letter, question=letter, answer="")

    def reward(self, rollout):
        return float((rollout.completion.token_ids < 96).mean())


@pytest.mark.medium
@pytest.mark.parametrize("max_policy_age", [0, 1])
def test_the_loop_learns_over_it(max_policy_age, tmp_path):
    sink = ListSink()

    async def use(local):
        tokenizer, ends = open_tokenizer(assets_path)
        checkpoint = CheckpointConfig(enable=False)
        task = LowBytes.Config(num_eval=2).build()
        loop = Loop.Config(
            num_steps=24,
            num_prompts=4,
            num_samples=8,
            eval_every=24,
            max_policy_age=max_policy_age,
            sampling=Sampling(max_tokens=6),
            max_logprob_diff=1e-4,
        ).build(
            seams=Seams(
                sampler=local, learner=local, publisher=local, scorer=LocalScorer(rubric=task.rubric(seed=0))
            ),
            renderer=make_renderer(RendererConfig(kind="raw"), tokenizer=tokenizer, stop_token_ids=ends),
            task=task,
            max_sequence_tokens=64,
            sinks=[sink],
            checkpoints=StepCheckpoints(learner=local, config=checkpoint, folder=str(tmp_path)),
            seed=0,
        )
        await loop.run()

    torch.manual_seed(0)
    assets_path = tmp_path / "assets"
    write_assets(assets_path)
    with_backend(
        use,
        assets=str(assets_path),
        optimizer=Optimizer.Config(lr=0.012, weight_decay=0.0),
    )
    rewards = [float(r["reward/mean"] or 0) for r in sink.records if "reward/mean" in r]
    assert len(rewards) == 24
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2
