"""However an episode is split into rows, its gradient is the same: from scored groups to the
gradient of every token's logprob, for every named algorithm.

The expected gradient is computed without rows and without packing: each episode is one sequence of
its trained tokens.

Shape legend: V token ids, T packed tokens, N trained tokens of a step.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from configs import algorithms, sum_digits
from losses.correction import ImportanceCorrection
from losses.policy import DROLoss, GSPOLoss, PolicyLoss
from losses.types import LossInputs, LossOutput, get_sequence_setting
from rl.loop.batch import TrainingBatch, collect_trained_rollouts, make_training_batch
from rl.loop.loop import Loop
from rl.rollouts.advantage import Advantage, KLReward
from rl.rollouts.group import Group
from rl.rollouts.packing import pack
from rl.rollouts.producer import Batch
from rl.trainer_types import TrainedTokens
from rl.types import Branch, Rollout, Score, TrainingSample
from rl.utils.errors import RunError
from tests.support.branching import NUM_IDS, EpisodeMaker
from tests.support.conversations import conversation, drawn
from tests.support.fakes import FakePolicy

ALGORITHMS = {
    "grpo": algorithms.grpo,
    "dr_grpo": algorithms.dr_grpo,
    "dapo": algorithms.dapo,
    "gspo": algorithms.gspo,
    "cispo": algorithms.cispo,
    "rloo": algorithms.rloo,
    "reinforce_plus_plus": algorithms.reinforce_plus_plus,
    "reinforce_plus_plus_baseline": algorithms.reinforce_plus_plus_baseline,
    "ppo": algorithms.ppo,
    "importance_sampling": algorithms.importance_sampling,
    "dro": algorithms.dro,
}
NUM_GROUPS, GROUP_SIZE = 3, 3
KINDS = ("whole", "split", "forest")


@dataclass(kw_only=True)
class TablePolicy(FakePolicy):
    """Trainer whose logprobs of a token depend on its id alone."""

    reply: Any = field(default=lambda prompt, i: "")
    logprobs_V: np.ndarray
    reference_V: np.ndarray = field(init=False)
    proximal_V: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng(5)
        self.reference_V = self.logprobs_V + random.normal(0.0, 0.1, len(self.logprobs_V))
        self.proximal_V = self.logprobs_V + random.normal(0.0, 0.05, len(self.logprobs_V))

    async def compute_reference_logprobs(
        self, samples: Sequence[TrainingSample]
    ) -> list[np.ndarray]:
        return [self.reference_V[s.token_ids].astype(np.float32) for s in samples]

    async def compute_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        return [self.proximal_V[s.token_ids].astype(np.float32) for s in samples]


def make_groups(maker: EpisodeMaker, *, kind: str) -> list[Group]:
    groups = []
    for number in range(NUM_GROUPS):
        prompt = maker.make_prompt()
        rollouts = []
        for g in range(GROUP_SIZE):
            num_turns = int(maker.random.integers(1, 6))
            if kind == "forest":
                rollout = maker.make_forest(num_turns=num_turns, sample=g, prompt=prompt)
            else:
                rollout = maker.make_linear(num_turns=num_turns, sample=g, prompt=prompt)
            rollouts.append(maker.split(rollout) if kind == "split" else rollout)
        scores = [Score(reward=float(maker.random.normal()), correct=False) for _ in rollouts]
        groups.append(Group(number=number, rollouts=rollouts, scores=scores))
    return groups


def make(groups: Sequence[Group], policy: FakePolicy, **settings: Any) -> TrainingBatch:
    config = Loop.Config(
        groups_per_batch=len(groups),
        group_size=max(2, len(groups[0].rollouts)),
        **settings,
    )
    batch = Batch(groups=list(groups), dropped=[])
    return asyncio.run(
        make_training_batch(batch, config=config, trainer=policy, adds_proximal_logprobs=True)
    )


def list_samples(made: TrainingBatch) -> list[TrainingSample]:
    return [*chain(*(part.values() for part in made.minibatches))]


def read_table(values_V: np.ndarray, ids_T: Tensor) -> Tensor:
    return torch.from_numpy(values_V.astype(np.float32))[ids_T]


def compute_expected(
    loss: PolicyLoss, rollouts: Sequence[Rollout], advantages: Sequence[np.ndarray],
    policy: TablePolicy,
) -> Tensor:  # fmt: skip
    """Return the gradient [V] of the mean loss if each episode is one sequence."""
    logprobs_V = torch.from_numpy(policy.logprobs_V).requires_grad_()
    turns = [rollout.trained_turns for rollout in rollouts]
    completions = [turn.completion for turn in chain(*turns)]
    ids_N = torch.from_numpy(np.concatenate([c.token_ids for c in completions]).astype(np.int64))
    lengths = torch.tensor([rollout.num_completion_tokens for rollout in rollouts])
    output = loss(
        LossInputs(
            logprobs=logprobs_V[ids_N],
            generator_logprobs=torch.from_numpy(np.concatenate([c.logprobs for c in completions])),
            advantages=torch.from_numpy(np.concatenate(advantages)),
            mask=torch.ones(len(ids_N), dtype=torch.bool),
            sequence_ids=torch.arange(len(rollouts)).repeat_interleave(lengths),
            num_sequences=len(rollouts),
            reference_logprobs=read_table(policy.reference_V, ids_N),
            proximal_logprobs=read_table(policy.proximal_V, ids_N),
            entropy=logprobs_V[ids_N].square(),
        )
    )
    return compute_mean_gradient([output], logprobs_V)


def compute_packed(
    loss: PolicyLoss, samples: Sequence[TrainingSample], policy: TablePolicy, *, num_ranks: int = 1,
    **settings: Any,
) -> Tensor:  # fmt: skip
    """Return the gradient [V] of the mean loss over the micro-batches of all ranks."""
    logprobs_V = torch.from_numpy(policy.logprobs_V).requires_grad_()
    outputs = []
    for rank in range(num_ranks):
        for batch in pack(
            samples,
            undivided_for=get_sequence_setting(loss),
            rank=rank,
            num_ranks=num_ranks,
            **settings,
        ):
            logprobs_T = torch.where(batch.mask, logprobs_V[batch.targets], torch.nan)
            inputs = LossInputs(
                logprobs=logprobs_T,
                generator_logprobs=batch.generator_logprobs,
                advantages=batch.advantages,
                mask=batch.mask,
                sequence_ids=batch.sequence_ids,
                num_sequences=batch.num_sequences,
                reference_logprobs=read_table(policy.reference_V, batch.targets),
                proximal_logprobs=batch.proximal_logprobs,
                entropy=logprobs_T.square(),
            )
            outputs.append(loss(inputs))
    return compute_mean_gradient(outputs, logprobs_V)


def compute_mean_gradient(outputs: Sequence[LossOutput], logprobs_V: Tensor) -> Tensor:
    total = torch.stack([output.loss_sum for output in outputs]).sum()
    if outputs[0].denominator is not None:
        total = total / sum(float(o.denominator) for o in outputs if o.denominator is not None)
    (gradient,) = torch.autograd.grad(total, logprobs_V)
    assert gradient.norm() > 0
    return gradient


def compare(actual_V: Tensor, expected_V: Tensor) -> float:
    """Return the norm of the difference over that of the expected gradient."""
    return float((actual_V - expected_V).norm() / expected_V.norm())


def list_losses(name: str) -> list[PolicyLoss]:
    """Return the algorithm's loss with each normalization, correction, KL and entropy term."""
    loss = ALGORITHMS[name](sum_digits.tiny()).trainer.loss
    assert isinstance(loss, PolicyLoss)
    if isinstance(loss, GSPOLoss):  # Its bounds would clip nearly all of these ratios.
        loss = replace(loss, clip_low=0.03, clip_high=0.03)
    losses = [loss, replace(loss, kl_coef=0.2, kl_importance_weighted=True, entropy_coef=0.1)]
    for normalization in ("token_mean", "sequence_mean", "constant", "none"):
        length = 7.0 if normalization == "constant" else None
        changed: Any = {"normalization": normalization, "tokens_per_sequence": length}
        losses.append(replace(loss, **changed))
    if not isinstance(loss, DROLoss):
        # Bounds that some ratios of each level exceed.
        for level, distance in (("token", 0.05), ("sequence", 0.3), ("sequence_mean", 0.02)):
            cut = ImportanceCorrection(level=level, high=1.0 + distance)  # type: ignore[arg-type]
            masked = replace(cut, mode="mask", low=1.0 - distance)
            losses += [replace(loss, correction=cut), replace(loss, correction=masked)]
    return losses


def list_settings(name: str) -> list[dict[str, Any]]:
    """Return settings of the loop: the algorithm's, with each credit, with a KL in the reward."""
    loop = ALGORITHMS[name](sum_digits.tiny()).loop
    own = {"advantage": loop.advantage, "kl_reward": loop.kl_reward}
    by_token: Advantage = replace(loop.advantage, credit="token", discount=0.97)
    return [own, {"advantage": by_token, "kl_reward": KLReward(coef=0.1)}]


def find_longest_episode(samples: Sequence[TrainingSample]) -> int:
    lengths: dict[int | None, int] = {}
    for sample in samples:
        lengths[sample.episode] = lengths.get(sample.episode, 0) + len(sample.token_ids) - 1
    return max(lengths.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradient_of_rows_is_that_of_whole_episodes(name, kind):
    num_rows = 0
    for seed, settings in enumerate(list_settings(name)):
        maker = EpisodeMaker(seed=seed)
        policy = TablePolicy(logprobs_V=maker.logprobs_V)
        groups = make_groups(maker, kind=kind)
        made = make(groups, policy, **settings)
        samples = list_samples(made)
        num_rows += len(samples)
        rollouts = [*chain(*(group.rollouts for group in groups))]
        everything = sum(len(sample.token_ids) for sample in samples)
        for loss in list_losses(name):
            expected = compute_expected(loss, rollouts, [*chain(*made.advantages_PG)], policy)
            least = find_longest_episode(samples)
            if get_sequence_setting(loss) is None:  # Then episodes may be divided.
                least = max(len(sample.token_ids) - 1 for sample in samples)
            for max_tokens, num_ranks, share in (
                (everything, 1, True), (least, 1, True), (least, 2, False), (least + 9, 3, True),
            ):  # fmt: skip
                gradient = compute_packed(
                    loss,
                    samples,
                    policy,
                    max_tokens=max_tokens,
                    num_ranks=num_ranks,
                    share_prompts=share,
                )
                assert compare(gradient, expected) < 1e-6, (loss, max_tokens, num_ranks)
    is_split = num_rows > 2 * NUM_GROUPS * GROUP_SIZE
    assert is_split == (kind != "whole")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_advantages_of_rows_are_those_of_whole_episodes(name):
    for seed, settings in enumerate(list_settings(name)):
        maker = EpisodeMaker(seed=seed)
        policy = TablePolicy(logprobs_V=maker.logprobs_V)
        whole = make_groups(maker, kind="whole")
        rows = []
        for group in whole:
            split = [maker.split(rollout) for rollout in group.rollouts]
            rows.append(replace(group, rollouts=split))
        expected = chain(*make(whole, policy, **settings).advantages_PG)
        actual = chain(*make(rows, policy, **settings).advantages_PG)
        for actual_C, expected_C in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(actual_C, expected_C)


# Mistakes that the comparison must notice


def count_rows(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """Make each row an episode of its own."""
    return [replace(sample, episode=None) for sample in samples]


def train_twice(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """Train each row on all of its sampled tokens."""
    advantages_V = np.zeros(NUM_IDS, dtype=np.float32)
    for sample in samples:
        advantages_V[sample.token_ids[sample.mask]] = sample.advantages[sample.mask]
    twice = []
    for sample in samples:
        is_sampled_T = np.isfinite(sample.generator_logprobs)
        advantages_T = np.where(is_sampled_T, advantages_V[sample.token_ids], 0.0)
        twice.append(replace(sample, mask=is_sampled_T, advantages=advantages_T.astype(np.float32)))
    return twice


@pytest.mark.parametrize("mistake", [count_rows, train_twice])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_mistake_changes_the_gradient(name, mistake):
    maker = EpisodeMaker(seed=0)
    policy = TablePolicy(logprobs_V=maker.logprobs_V)
    samples = list_samples(make(make_groups(maker, kind="split"), policy))
    for loss in list_losses(name):
        # A loss that reads no sequences does not mind how rows are counted.
        is_noticed = mistake is train_twice or get_sequence_setting(loss) is not None
        right = compute_packed(loss, samples, policy, max_tokens=5000)
        wrong = compute_packed(loss, mistake(samples), policy, max_tokens=5000)
        assert (compare(wrong, right) > 1e-4) == is_noticed, loss


# Tokens


@pytest.mark.parametrize("seed", range(5))
def test_every_token_of_a_trained_branch_is_trained_once_with_its_advantage(seed):
    maker = EpisodeMaker(seed=seed)
    groups = make_groups(maker, kind="forest")
    made = make(groups, TablePolicy(logprobs_V=maker.logprobs_V))
    trained: list[tuple[int, float, float]] = []
    for sample in list_samples(made):
        is_sampled = np.isfinite(sample.generator_logprobs)
        assert (is_sampled == (sample.policy_versions == 0)).all()
        assert not (sample.mask & ~is_sampled).any()
        assert not sample.advantages[~sample.mask].any()
        for t in np.flatnonzero(sample.mask):
            logprob = float(sample.generator_logprobs[t])
            trained.append((int(sample.token_ids[t]), float(sample.advantages[t]), logprob))

    expected: list[tuple[int, float, float]] = []
    for group, advantages_G in zip(groups, made.advantages_PG, strict=True):
        for rollout, advantages_C in zip(group.rollouts, advantages_G, strict=True):
            completions = [turn.completion for turn in rollout.trained_turns]
            ids = chain(*(c.token_ids.tolist() for c in completions))
            logprobs = chain(*(c.logprobs.tolist() for c in completions))
            expected += zip(ids, advantages_C.tolist(), logprobs, strict=True)
    assert sorted(trained) == sorted(expected)


def tree(*, sample: int = 0, finish_reason: Any = "stop") -> Rollout:
    """Return turns 0 -> 1, 0 -> 2 (superseded), 0 -> 3, and a sub-agent's turn 4."""
    rollout = conversation(
        (3, drawn(10, 11)), (1, drawn(12)), (1, drawn(13)), (2, drawn(14, 15)), (2, drawn(16)),
        rewards=(0.0, 0.25, 8.0, 0.0, 0.5), sample=sample,
    )  # fmt: skip
    branches = (
        Branch(turns=(0, 1)),
        Branch(turns=(0, 2), role="superseded", cause="again", is_trained=False),
        Branch(turns=(4,), role="sub-agent", cause="agent"),
        Branch(turns=(0, 3), cause="rewritten"),
    )
    last = rollout.turns[3]
    ended = replace(last, completion=replace(last.completion, finish_reason=finish_reason))
    turns = (*rollout.turns[:3], ended, rollout.turns[4])
    return replace(rollout, turns=turns, branches=branches)


def group_of(*rollouts: Rollout, rewards: Sequence[float] = (1.0, 0.0)) -> Group:
    scores = [Score(reward=reward, correct=False) for reward in rewards]
    return Group(number=0, rollouts=list(rollouts), scores=scores)


def make_one(*rollouts: Rollout, **settings: Any) -> TrainingBatch:
    return make([group_of(*rollouts)], FakePolicy(reply=lambda prompt, i: ""), **settings)


def test_rows_of_a_tree_by_hand():
    made = make_one(tree(), tree(sample=1), advantage=Advantage(credit="token", baseline="none"))
    (part,) = made.minibatches
    assert list(part) == [(0, 0), (0, 0, 1), (0, 0, 2), (0, 1), (0, 1, 1), (0, 1, 2)]
    first, second, third = [part[i] for i in ((0, 0), (0, 0, 1), (0, 0, 2))]
    assert first.token_ids.tolist() == [1, 1, 1, 10, 11, 1, 12]
    assert first.mask.tolist() == [False, False, False, True, True, False, True]
    assert second.token_ids.tolist() == [1, 1, 16]
    assert third.token_ids.tolist() == [1, 1, 1, 10, 11, 1, 1, 14, 15]
    assert third.mask.tolist() == [False] * 7 + [True, True]
    assert third.policy_versions.tolist() == [-1] * 3 + [0, 0, -1, -1, 0, 0]
    assert third.generator_logprobs[3:5].tolist() == [-1.0, -1.0]
    assert [sample.episode for sample in part.values()] == [0, 0, 0, 1, 1, 1]
    # The reward of 1 at the last trained token, turn 4's; the .25 of turn 1 and .5 of turn 4 are
    # parts of it. That of turn 2, which is not trained, is not moved.
    assert first.advantages.tolist() == [0, 0, 0, 1.0, 1.0, 0, 1.0]
    assert second.advantages.tolist() == [0, 0, 0.75]
    assert third.advantages[7:].tolist() == [0.75, 0.75]


def test_a_linear_episode_is_its_own():
    made = make_one(conversation((3, drawn(5))), conversation((3, drawn(6)), sample=1))
    assert [sample.episode for sample in list_samples(made)] == [None, None]


def test_a_long_row_is_left_out_alone():
    made = make_one(tree(), tree(sample=1), max_sample_tokens=8, long_samples="drop")
    (part,) = made.minibatches
    assert list(part) == [(0, 0), (0, 0, 1), (0, 1), (0, 1, 1)]
    assert made.metrics["samples/dropped"].value == 2


def test_all_rows_of_a_truncated_rollout_are_masked():
    rollouts = tree(finish_reason="length"), tree(sample=1)
    made = make_one(*rollouts, mask_truncated_completions=True)
    (part,) = made.minibatches
    assert [bool(s.mask.any()) for s in part.values()] == [False] * 3 + [True] * 3
    assert made.metrics["samples/masked"].value == 1


def test_a_step_without_a_trained_branch_is_an_error():
    rollout = conversation((3, drawn(5)))
    hidden = replace(rollout, branches=(Branch(turns=(0,), is_trained=False),))
    with pytest.raises(RunError, match=r"none of the step's 2 rollouts has a branch to train on"):
        make_one(hidden, hidden)
    # An episode without trained tokens beside others counts in no mean, and has no row.
    made = make([group_of(hidden, tree(sample=1))], FakePolicy(reply=lambda prompt, i: ""))
    assert [*made.minibatches[0]] == [(0, 1), (0, 1, 1), (0, 1, 2)]


def test_recorded_mask_and_logprobs_are_placed_across_rows():
    groups = [group_of(tree(), tree(sample=1))]
    made = make(
        groups, FakePolicy(reply=lambda prompt, i: ""), max_sample_tokens=8, long_samples="drop"
    )
    # As if the loss had needed no logprobs from before the step.
    (part,) = made.minibatches
    plain = {i: replace(sample, proximal_logprobs=None) for i, sample in part.items()}
    tokens = {
        i: TrainedTokens(
            logprobs=-sample.token_ids.astype(np.float32), advantages=sample.advantages
        )
        for i, sample in part.items()
    }
    ((record, other),) = collect_trained_rollouts(
        Batch(groups=groups, dropped=[]),
        replace(made, minibatches=[plain]),
        recorded=[(0, 0)],
        tokens=tokens,
    )
    assert record.mask is not None
    assert record.trainer_logprobs is not None
    # Turns 0, 1, 3 and 4; the row that trains turn 3 was too long.
    assert record.mask.tolist() == [True, True, True, False, False, True]
    np.testing.assert_array_equal(record.trainer_logprobs, [-10, -11, -12, np.nan, np.nan, -16])
    assert len(record.advantages) == 6
    assert other.mask is None
