"""A recorded step trained again from its checkpoint: the same logprobs, loss, gradient, weights?

The rollouts are made anew from the ledger, and go the way of every step from there: samples,
minibatches, `forward_backward`, `optim_step` (`rl.loop.batch`). Weights and optimizer are compared
with the checkpoint of the step; the generator's logprobs with those of the weights that it names.

Shape legend: C tokens that the model produced in the trained turns of a rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from rl.branches import Branch
from rl.ledger.files import LedgerError, list_files, read
from rl.ledger.step import LedgerStep
from rl.loop.batch import TrainingBatch, collect_trained_rollouts, make_training_batch
from rl.loop.config import LoopConfig
from rl.rollouts.group import Group, SampleId
from rl.rollouts.producer import Batch
from rl.trainer_types import TrainedTokens
from rl.training.checkpoints.files import list_steps, read_state, step_folder
from rl.training.engine import TrainingEngine
from rl.types import (
    Completion,
    Observation,
    Problem,
    Prompt,
    Rollout,
    Score,
    TrainingSample,
    Turn,
)
from rl.utils.threads import run_now

MOST_LOGPROB_DIFF = 0.1
"""Largest mean difference, in nats a token, of a generator's logprobs from those of its weights in
a run without `loop.max_logprob_diff`: a few times the rounding of bfloat16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """What became of a step that was trained again."""

    num_tokens: int
    num_minibatches: int
    num_tensors: int
    """Tensors of weights and optimizer that were compared with the step's checkpoint, if any."""
    num_drawn: int
    """Sampled tokens whose logprobs were compared with those of the weights that drew them."""
    differences: tuple[str, ...]
    """The first token that differs, then sums that do; empty if everything is bit-identical."""


def find_step(ledger: Path, checkpoints: Path, *, step: int) -> LedgerStep:
    """Return a step of a ledger that a checkpoint allows to train again; raise LedgerError."""
    files = {file.step: file for file in list_files(ledger)}
    saved = sorted(set(list_steps(checkpoints)) & {number - 1 for number in files})
    there = ", ".join(str(number + 1) for number in saved) or "none"
    if step not in files:
        raise LedgerError(f"--replay {step}: the ledger has no such step; can be replayed: {there}")
    if step - 1 not in saved:
        raise LedgerError(
            f"--replay {step}: {checkpoints} has no checkpoint of step {step - 1}, from which it "
            f"began; can be replayed: {there}"
        )
    record = LedgerStep(read(files[step]))
    if not record.is_whole:
        raise LedgerError(f"--replay {step}: the ledger has the tokens of some groups only")
    return record


def replay(
    step: LedgerStep,
    groups: list[Group],
    *,
    checkpoints: Path,
    engine: TrainingEngine,
    config: LoopConfig,
) -> Replayed:
    """Train a recorded step again.

    Args:
        groups: of `make_groups`.
        engine: the run's trainer.
        config: of the run.
    """
    # With the optimizer's states: a step of several minibatches goes on from one to the next.
    engine.load_checkpoint(str(step_folder(str(checkpoints), step.number - 1)))
    batch = Batch(groups=groups, dropped=[])
    training = run_now(
        make_training_batch(
            batch,
            config=config,
            trainer=_EngineTrainer(engine),
            adds_proximal_logprobs="proximal_logprobs" in step.tokens,
        )
    )
    tokens: dict[SampleId, TrainedTokens] = {}
    sums: list[str] = []
    for number, (samples, told) in enumerate(
        zip(training.minibatches, step.facts["minibatches"], strict=True)
    ):
        result = engine.forward_backward([*samples.values()], return_trained=True)
        tokens |= zip(samples, result.trained or (), strict=True)
        update = engine.optim_step(allow_empty=not any(s.mask.any() for s in samples.values()))
        found = {"loss_sum": result.loss_sum, "denominator": result.denominator}
        # The rate is of the schedule, at the version that the checkpoint has.
        for name, value in (found | {"grad_norm": update.grad_norm, "lr": update.lr}).items():
            if value != told[name]:
                sums.append(f"minibatch {number}: {name}: {told[name]:.9g} and now {value:.9g}")
    recorded = {(p, g) for p, group in enumerate(batch.groups) for g in range(len(group.scored))}
    trained_PG = collect_trained_rollouts(batch, training, recorded=recorded, tokens=tokens)
    logprobs = [
        trained.trainer_logprobs if trained.trainer_logprobs is not None else np.zeros(0)
        for trained_G in trained_PG
        for trained in trained_G
    ]
    first = _find_first(step, np.concatenate([np.zeros(0, np.float32), *logprobs]))
    # Last, because both load other checkpoints.
    num_tensors, weights = _compare_weights(engine, step_folder(str(checkpoints), step.number))
    num_drawn, drawn = _compare_drawn(step, training, checkpoints, engine=engine, config=config)
    return Replayed(
        num_tokens=int(step.is_trained.sum()),
        num_minibatches=len(training.minibatches),
        num_tensors=num_tensors,
        num_drawn=num_drawn,
        differences=(*first, *sums, *weights, *drawn),
    )


def _find_first(step: LedgerStep, logprobs_T: np.ndarray) -> list[str]:
    """Return a line on the first token whose logprob differs; none if all are identical."""
    # The ledger has the turns of no trained branch too.
    places = np.flatnonzero(step.turns["trained"][step.turn_of_token])
    recorded_T = step.tokens["trainer_logprobs"][places]
    is_read_T = ~np.isnan(recorded_T)
    differs_T = is_read_T & (recorded_T != logprobs_T.astype(np.float32))
    if not differs_T.any():
        return []
    first = int(np.flatnonzero(differs_T)[0])
    where = step.describe(step.place_token(int(places[first])))
    most = np.abs(recorded_T - logprobs_T)[is_read_T].max()
    return [
        f"{where}: logprob of the trainer: {recorded_T[first]:.9g} and now "
        f"{logprobs_T[first]:.9g}; {differs_T.sum()} tokens differ, by at most {most:.3g}"
    ]


def _compare_weights(engine: TrainingEngine, checkpoint: Path) -> tuple[int, list[str]]:
    """Return how many tensors were compared with the step's checkpoint, and the first that differs.

    Nothing is compared where there is no such checkpoint.
    """
    if not checkpoint.is_dir():
        return 0, []
    # The last checkpoint of a run may lack the optimizer.
    model_only = read_state(checkpoint).model_only
    tensors = engine.checkpointer.tensors(model_only=model_only)
    after = {name: tensor.clone() for name, tensor in tensors.items()}
    engine.load_checkpoint(str(checkpoint), model_only=model_only)
    saved = engine.checkpointer.tensors(model_only=model_only)
    differing = [name for name in sorted(after) if not after[name].equal(saved[name])]
    if not differing:
        return len(after), []
    name = differing[0]
    most = (after[name].double() - saved[name].double()).abs().max().item()
    return len(after), [
        f"{name} after the step: the checkpoint's and now differ by at most {most:.3g}; "
        f"{len(differing)} of {len(after)} tensors differ"
    ]


def _compare_drawn(
    step: LedgerStep,
    training: TrainingBatch,
    checkpoints: Path,
    *,
    engine: TrainingEngine,
    config: LoopConfig,
) -> tuple[int, list[str]]:
    """Return how many sampled tokens were computed again with the weights that they name, and the
    first version whose logprobs differ.

    A run ahead of training compares no logprobs while it trains, since its weights are newer.
    """
    steps = {int(version): at for version, at in step.facts["steps_of_versions"].items()}
    samples_of: dict[int, list[TrainingSample]] = {}
    for sample in chain.from_iterable(m.values() for m in training.minibatches):
        versions = np.unique(sample.policy_versions[sample.mask])
        # A reply that went on over an update has keys and values of both.
        if len(versions) == 1:
            samples_of.setdefault(int(versions[0]), []).append(sample)
    most = min(config.max_logprob_diff, MOST_LOGPROB_DIFF)
    num_drawn = 0
    for version, samples in samples_of.items():
        checkpoint = step_folder(str(checkpoints), steps.get(version, -1))
        if not checkpoint.is_dir():
            continue
        engine.load_checkpoint(str(checkpoint), model_only=read_state(checkpoint).model_only)
        differences = [np.zeros(0)]
        for sample, logprobs_T in zip(samples, engine.compute_logprobs(samples), strict=True):
            differences.append(np.abs(logprobs_T - sample.generator_logprobs)[sample.mask])
        diff_T = np.concatenate(differences)
        num_drawn += len(diff_T)
        # Not ">", so that NaN is a difference.
        if not diff_T.mean() <= most:
            return num_drawn, [
                f"logprobs of the generator: {len(diff_T)} tokens name policy version {version}, "
                f"but differ from its logprobs by {diff_T.mean():.3g} nats a token (at most "
                f"{diff_T.max():.3g}), more than {most:g}"
            ]
    return num_drawn, []


class _EngineTrainer:
    """The calls of a trainer that the samples of a step need, on an engine of this process."""

    def __init__(self, engine: TrainingEngine) -> None:
        self._engine = engine

    async def compute_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        return self._engine.compute_logprobs(samples)

    async def compute_reference_logprobs(
        self, samples: Sequence[TrainingSample]
    ) -> list[np.ndarray]:
        return self._engine.compute_reference_logprobs(samples)


def make_groups(step: LedgerStep) -> list[Group]:
    """Return the scored rollouts of a step, by groups."""
    turns_of: dict[tuple[int, int], list[int]] = {}
    for n in range(step.num_turns):
        key = int(step.turns["group"][n]), int(step.turns["member"][n])
        turns_of.setdefault(key, []).append(n)
    groups = []
    for p, described in enumerate(step.groups):
        problem = Problem(id=described["problem"], question="", answer="")
        rollouts, scores = [], []
        for g, member in enumerate(described["members"]):
            turns = turns_of[p, g]
            rollouts.append(
                Rollout(
                    prompt=Prompt(problem=problem, token_ids=step.read_prompt(turns[0])),
                    sample=member["sample"],
                    turns=tuple(_make_turn(step, n) for n in turns),
                    end=member["end"],
                    branches=_make_branches(step, turns),
                )
            )
            scores.append(
                Score(
                    reward=member["reward"],
                    correct=member["correct"],
                    overlong=member["overlong"],
                )
            )
        groups.append(Group(number=described["number"], rollouts=rollouts, scores=scores))
    return groups


def _make_turn(step: LedgerStep, n: int) -> Turn:
    completion = Completion(
        token_ids=step.of_turn(n, "token_ids"),
        logprobs=step.of_turn(n, "logprobs"),
        policy_versions=step.of_turn(n, "versions"),
        finish_reason="length" if step.turns["cut_off"][n] else "stop",
    )
    return Turn(
        messages=(),
        prompt_ids=step.read_prompt(n),
        completion=completion,
        text="",
        observation=Observation(reward=float(step.turns["reward"][n])),
    )


def _make_branches(step: LedgerStep, turns: Sequence[int]) -> tuple[Branch, ...]:
    """Return a branch for each row of a rollout, and for each last turn of no row."""
    parents = {int(step.turns["turn"][n]): int(step.turns["parent"][n]) for n in turns}
    rows = {int(step.turns["turn"][n]): int(step.turns["row"][n]) for n in turns}

    def list_path(turn: int) -> tuple[int, ...]:
        path = []
        while turn >= 0:
            path.append(turn)
            turn = parents[turn]
        return tuple(path[::-1])

    # The last turn of a row is new in it: a path whose end is known is known as a whole.
    last_of_row = {row: turn for turn, row in rows.items() if row >= 0}
    branches = [Branch(turns=list_path(last_of_row[row])) for row in sorted(last_of_row)]
    continued = set(parents.values())
    for turn, row in rows.items():
        if row < 0 and turn not in continued:
            branches.append(Branch(turns=list_path(turn), role="superseded", is_trained=False))
    return tuple(branches)
