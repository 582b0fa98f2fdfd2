"""Batches that are made up, and the ledger of a run that has trained on them.

    write_ledger(Path("outputs/x"), REPLIES, num_tokens=1_000_000)

Everything but the sampling and the trainer's model is the run's own code: receipts, samples,
advantages, the loss, and the writer of the ledger.

Shape legend: C sampled tokens of a reply, T tokens of a sample.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from losses.policy import GRPOLoss
from losses.types import LossInputs
from rl.branches import Branch
from rl.config.json import name_code, to_dict
from rl.ledger.config import LedgerConfig
from rl.ledger.sealing import seal
from rl.ledger.writer import Ledger
from rl.loop.batch import TrainingBatch, collect_trained_rollouts, make_training_batch
from rl.loop.config import LoopConfig
from rl.loop.ledger import StepLedger
from rl.loop.metrics import TrainedMinibatch
from rl.observability.run_folder import LEDGER, METRICS
from rl.rollouts.group import Group, get_rollout_id
from rl.rollouts.producer import Batch
from rl.trainer_types import ForwardBackwardResult, OptimStepResult, TrainedTokens
from rl.types import Completion, Message, Problem, Prompt, Rollout, Score, TrainingSample, Turn

GROUPS_PER_STEP, GROUP_SIZE = 16, 8
VOCABULARY = 150_000
LOSS = GRPOLoss()


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What the episodes of a ledger are like."""

    name: str
    reply_tokens: tuple[int, int]
    """Least and most sampled tokens of a turn."""
    prompt_tokens: tuple[int, int]
    """Tokens of the first prompt."""
    message_tokens: tuple[int, int]
    """Tokens between two turns."""
    turns: tuple[int, ...]
    """Numbers of turns, which the groups take in turn."""
    branches: tuple[Branch, ...] | None = None
    """Branches of each episode; None: linear."""


REPLIES = Shape(
    name="replies",
    reply_tokens=(200, 2_000),
    prompt_tokens=(80, 400),
    message_tokens=(20, 300),
    turns=(1, 1, 1, 3),
)
AGENTS = Shape(
    name="agents",
    reply_tokens=(50, 600),
    prompt_tokens=(4_000, 4_000),
    message_tokens=(100, 2_000),
    turns=(12,),
    branches=(
        Branch(turns=(0, 1, 2, 3, 4, 5, 6, 7)),
        Branch(turns=(0, 1, 2, 8), role="superseded", cause="again", is_trained=False),
        Branch(turns=(9, 10), role="sub-agent", cause="system", is_trained=False),
        Branch(turns=(0, 1, 11), cause="fork"),
    ),
)


def write_ledger(run: Path, shape: Shape, *, num_tokens: int) -> int:
    """Write the ledger of steps until so many tokens are trained; return how many there are."""
    config = LoopConfig(
        groups_per_batch=GROUPS_PER_STEP, group_size=GROUP_SIZE, max_off_policy_steps=1
    )
    ledger = StepLedger(
        ledger=Ledger(run / LEDGER, config=LedgerConfig(enable=True)),
        config=config,
        loss={"class": name_code(type(LOSS)), **to_dict(LOSS)},
    )
    policy = Policy(shape)
    num_trained = 0
    for step in count(1):
        batch = policy.make_batch(step)
        num_trained += _write_step(ledger, step, batch, policy)
        with (run / METRICS).open("a") as metrics:
            metrics.write(json.dumps({"step": step, "policy_version": step}) + "\n")
        if num_trained >= num_tokens:
            break
    return num_trained


def _write_step(ledger: StepLedger, step: int, batch: Batch, policy: Policy) -> int:
    trainer: Any = None  # Neither reference nor proximal logprobs are needed.
    training = asyncio.run(
        make_training_batch(
            batch, config=ledger.config, trainer=trainer, adds_proximal_logprobs=False
        )
    )
    (samples,) = training.minibatches
    read = {sample_id: policy.train(sample) for sample_id, sample in samples.items()}
    episodes = [get_rollout_id(sample_id) for sample_id in samples]
    gradient = _sum_up(training, [*read.values()], episodes)
    rollouts = collect_trained_rollouts(
        batch, training, recorded=set(ledger.choose_ids(batch.groups)), tokens=read
    )
    update = OptimStepResult(grad_norm=1.0, lr=1e-6, policy_version=step)
    ledger.step(
        step,
        batch,
        rollouts,
        trained=[TrainedMinibatch(gradient=gradient, update=update)],
        steps_of_versions={version: version for version in (step - 2, step - 1) if version >= 0},
        outstanding=(),
    )
    return gradient.num_trained_tokens


def _sum_up(
    training: TrainingBatch, read: Sequence[TrainedTokens], episodes: Sequence[tuple[int, int]]
) -> ForwardBackwardResult:
    """Return what a trainer says of the samples, all of them in one micro-batch."""
    samples = [*training.minibatches[0].values()]
    numbers = {episode: n for n, episode in enumerate(dict.fromkeys(episodes))}
    of_sample = torch.tensor([numbers[episode] for episode in episodes])
    lengths = torch.tensor([len(sample.token_ids) for sample in samples])
    mask_T = torch.from_numpy(np.concatenate([sample.mask for sample in samples]))
    advantages_T = torch.from_numpy(np.concatenate([sample.advantages for sample in samples]))
    output = LOSS(
        LossInputs(
            logprobs=torch.from_numpy(np.concatenate([tokens.logprobs for tokens in read])),
            generator_logprobs=torch.from_numpy(
                np.concatenate([sample.generator_logprobs for sample in samples])
            ),
            advantages=advantages_T,
            mask=mask_T,
            sequence_ids=of_sample.repeat_interleave(lengths),
            num_sequences=len(numbers),
        )
    )
    assert output.denominator is not None
    return ForwardBackwardResult(
        loss_sum=float(output.loss_sum),
        denominator=float(output.denominator),
        num_samples=len(numbers),
        num_tokens=int(lengths.sum()),
        num_valid_tokens=int(mask_T.sum()),
        ratio_mean=1.0,
        clipped_fraction=0.0,
        entropy_mean=0.5,
        logprob_diff_mean=0.0,
        logprob_diff_max=0.0,
        logprobs_identical=False,
        num_trained_tokens=int(mask_T.sum()),
        advantage_sum=float(advantages_T[mask_T].double().sum()),
    )


class Policy:
    """Generator and trainer whose numbers are random, as incompressible as those of a model."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._random = np.random.default_rng(0)
        self._calls = count()

    def make_batch(self, step: int) -> Batch:
        """Return the groups of a step, whose tokens are of the last two versions."""
        first = (step - 1) * GROUPS_PER_STEP
        numbers = range(first, first + GROUPS_PER_STEP)
        return Batch(groups=[self._make_group(n, step=step) for n in numbers], dropped=[])

    def train(self, sample: TrainingSample) -> TrainedTokens:
        """Return what the loss reads of a sample: logprobs that were rounded in another way."""
        noise_T = self._random.normal(0.0, 1e-2, len(sample.token_ids)).astype(np.float32)
        logprobs_T = np.minimum(sample.generator_logprobs + noise_T, 0.0)
        return TrainedTokens(
            logprobs=np.where(sample.mask, logprobs_T, np.nan).astype(np.float32),
            advantages=np.where(sample.mask, sample.advantages, np.nan).astype(np.float32),
        )

    def _make_group(self, number: int, *, step: int) -> Group:
        problem = Problem(id=f"math/train/{number}", question="?", answer="7")
        prompt = Prompt(problem=problem, token_ids=self._draw_tokens(self._shape.prompt_tokens))
        rollouts = [
            self._make_rollout(prompt, sample, number=number, step=step)
            for sample in range(GROUP_SIZE)
        ]
        scores = []
        for is_right in self._random.random(GROUP_SIZE) < 0.4:
            right = bool(is_right)
            scores.append(Score(reward=float(right), correct=right, parts={"answer": float(right)}))
        return Group(number=number, rollouts=rollouts, scores=scores)

    def _make_rollout(self, prompt: Prompt, sample: int, *, number: int, step: int) -> Rollout:
        shape = self._shape
        num_turns = shape.turns[number % len(shape.turns)]
        turns: list[Turn] = []
        before = {}
        for branch in shape.branches or (Branch(turns=tuple(range(num_turns))),):
            for parent, turn in zip((None, *branch.turns), branch.turns, strict=False):
                before[turn] = parent
        contexts: dict[int | None, np.ndarray] = {None: np.zeros(0, dtype=np.int32)}
        for turn in range(num_turns):
            is_first = before[turn] is None and turn == 0
            given = prompt.token_ids if is_first else self._draw_tokens(shape.message_tokens)
            context = np.concatenate([contexts[before[turn]], given])
            completion = self._sample(context, step=step)
            contexts[turn] = np.concatenate([context, completion.token_ids])
            message = Message(role="user", content="?")
            turns.append(
                Turn(messages=(message,), prompt_ids=given, completion=completion, text="7")
            )
        return Rollout(
            prompt=prompt, sample=sample, turns=tuple(turns), branches=shape.branches or ()
        )

    def _sample(self, context: np.ndarray, *, step: int) -> Completion:
        ids_C = self._draw_tokens(self._shape.reply_tokens)
        # Most tokens of a trained model are nearly certain, some are not.
        logprobs_C = -np.exp(self._random.normal(-3.0, 2.5, len(ids_C))).astype(np.float32)
        versions_C = np.full(len(ids_C), step - 1, dtype=np.int32)
        # Weights arrive in the middle of one reply in four.
        if step > 1 and self._random.random() < 0.25:
            versions_C[: len(ids_C) // 2] -= 1
        completion = Completion(
            token_ids=ids_C,
            logprobs=logprobs_C,
            policy_versions=versions_C,
            finish_reason="stop",
        )
        call = f"{next(self._calls):016x}"
        ((sealed,),) = seal([[completion]], [context], generator="generator-0", call=call)
        return sealed

    def _draw_tokens(self, bounds: tuple[int, int]) -> np.ndarray:
        """Return tokens of which the n-th most frequent is n times as rare as the first."""
        num = int(self._random.integers(bounds[0], bounds[1] + 1))
        ranks = np.exp(self._random.random(num) * np.log(VOCABULARY))
        return ranks.astype(np.int32)
