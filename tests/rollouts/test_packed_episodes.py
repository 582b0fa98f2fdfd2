"""Rows of an episode in micro-batches: one sequence for the loss, shared prefixes for attention."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from losses.correction import ImportanceCorrection
from losses.cross_entropy import CrossEntropyLoss
from losses.policy import DAPOLoss, DrGRPOLoss, GRPOLoss, GSPOLoss, RLOOLoss
from losses.types import get_sequence_setting
from rl.models.decoder import linear_head
from rl.rollouts.bundles import count_episodes
from rl.rollouts.packing import pack
from rl.rollouts.samples import policy_samples
from rl.types import TrainingSample
from tests.support.branching import EpisodeMaker
from tests.support.policies import full_logits, small_spec


def row(token_ids, trained, *, episode=None, temperature=1.0):
    """Return a row that trains the tokens in `trained`; all values are multiples of the ids."""
    ids = np.asarray(token_ids, dtype=np.int32)
    return TrainingSample(
        token_ids=ids,
        mask=np.isin(ids, trained),
        generator_logprobs=(-ids / 10).astype(np.float32),
        advantages=(ids * 10).astype(np.float32),
        policy_versions=np.zeros(len(ids), dtype=np.int32),
        temperature=temperature,
        episode=episode,
    )


A = row([1, 2, 10, 3, 11], [10, 11], episode=7)
B = row([1, 2, 10, 4, 12], [12], episode=7)
C = row([1, 2, 10, 4, 12, 5, 13], [13], episode=7)
OTHER = row([1, 2, 14], [14])


def test_rows_of_an_episode_have_one_sequence_id_and_layouts_of_their_own():
    (batch,) = pack([A, OTHER, B], max_tokens=30, pad_multiple=4)
    # The episode has 8 inputs, and its rows stay in their order.
    assert batch.sample_indices == (0, 2, 1)
    assert batch.sequence_ids.tolist() == [0] * 8 + [1, 1] + [2, 2]
    assert (batch.num_sequences, batch.lengths) == (2, (4, 4, 2))
    assert batch.sequences.num_queries == (4, 4, 2, 2)
    assert batch.positions.tolist()[:8] == [0, 1, 2, 3] * 2
    assert count_episodes([A, OTHER, B]) == 2


def test_temperatures_are_those_of_samples():
    (batch,) = pack(
        [
            row([1, 2], [2], episode=1),
            row([3, 4], [4], episode=1),
            row([5, 6], [6], temperature=0.5),
        ],
        max_tokens=9,
    )
    assert batch.temperatures.tolist() == [1.0, 1.0, 0.5]


def test_rows_share_the_turns_that_another_row_trains():
    (batch,) = pack([C, A, B, OTHER], max_tokens=30, share_prompts=True)
    # A and OTHER share token 1. B follows A's tokens up to 10, C those and B's 4.
    assert batch.sample_indices == (0, 1, 2, 3)
    assert batch.input_ids.tolist() == [1, 2, 10, 3, 2, 10, 4, 12, 5]
    assert batch.positions.tolist() == [0, 1, 2, 3, 1, 2, 3, 4, 5]
    assert batch.targets.tolist() == [2, 10, 3, 11, 14, 4, 12, 5, 13]
    assert batch.mask.tolist() == [False, True, False, True, True, False, True, False, True]
    assert batch.sequence_ids.tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert batch.sequences.num_queries == (1, 3, 1, 2, 2)
    assert batch.sequences.num_keys == (1, 4, 2, 4, 6)
    parts = batch.scatter(batch.targets.numpy())
    for index, sample in enumerate((C, A, B, OTHER)):
        assert parts[index].tolist()[1:] == sample.token_ids[1:].tolist()


@pytest.mark.parametrize(
    "other",
    [replace(B, episode=8), replace(B, temperature=0.5)],
    ids=["another episode", "another temperature"],
)
def test_trained_tokens_are_shared_within_an_episode_only(other):
    (batch,) = pack([A, other], max_tokens=30, share_prompts=True)
    assert batch.input_ids.numel() == 8


def test_a_row_never_shares_a_token_that_it_trains():
    (batch,) = pack([A, replace(B, mask=B.mask | A.mask)], max_tokens=30, share_prompts=True)
    # Only the prompt before the first trained token.
    assert batch.input_ids.numel() == 1 + 3 + 3
    assert int(batch.mask.sum()) == 4
    # 11 is trained in both, so only the inputs before it are shared.
    longer = row([1, 2, 10, 3, 11, 9], [11, 9], episode=7)
    (batch,) = pack([A, longer], max_tokens=30, share_prompts=True)
    assert batch.input_ids.tolist() == [1, 2, 10, 3, 3, 11]
    assert batch.mask.tolist() == [False, True, False, True, True, True]


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("seed", range(4))
def test_packed_rows_have_the_logprobs_and_gradients_of_whole_sequences(seed, window):
    maker = EpisodeMaker(seed=seed)
    prompt = maker.make_prompt()
    rollouts = [maker.make_forest(num_turns=6, sample=g, prompt=prompt) for g in range(3)]
    advantages = [maker.random.normal(size=r.num_completion_tokens) for r in rollouts]
    samples = policy_samples(rollouts, advantages, temperature=1.0)
    samples = [replace(s, token_ids=s.token_ids % 64) for s in samples]
    switches = {"window": window, "global_layers": (1,)} if window else {}
    spec = small_spec(family="gemma3_text" if window else "qwen3", switches=switches)
    model = spec.model.build()
    model.init_weights(seed=1, std=0.2)
    model.double()
    parameters = [*model.parameters()]

    def read_logprobs(logits, targets):
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

    whole: list[torch.Tensor] = []
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        targets = torch.from_numpy(sample.token_ids[1:].astype(np.int64))
        logprobs = read_logprobs(full_logits(model, sample.token_ids[:-1]), targets)
        whole.append(logprobs.detach())
        weights = torch.from_numpy(np.where(sample.mask, sample.advantages, 0.0)[1:])
        total = total + (logprobs * weights).sum()
    expected = torch.autograd.grad(total, parameters)

    num_tokens = sum(len(sample.token_ids) - 1 for sample in samples)
    longest = num_tokens - min(len(sample.token_ids) for sample in samples)
    for max_tokens in (num_tokens, longest):
        batches = pack(samples, max_tokens=max_tokens, share_prompts=True)
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            logits = model(
                batch.input_ids,
                positions=batch.positions,
                sequences=batch.sequences,
                head=linear_head,
            )
            logprobs = read_logprobs(logits, batch.targets)
            total = total + (logprobs * batch.advantages)[batch.mask].sum()
            for index, values in batch.scatter(logprobs.detach().numpy()).items():
                np.testing.assert_allclose(values[1:], whole[index], rtol=0, atol=1e-9)
        # The windowed model normalizes in float32.
        tolerance = 1e-5 if window else 1e-10
        for actual, wanted in zip(torch.autograd.grad(total, parameters), expected, strict=True):
            assert (actual - wanted).norm() <= tolerance * wanted.norm()
        assert sum(batch.input_ids.numel() for batch in batches) < 0.95 * num_tokens


# What does not fit


def test_rows_go_to_one_micro_batch_of_one_rank():
    maker = EpisodeMaker(seed=3)
    rollouts = [maker.make_forest(num_turns=7, sample=0, prompt=(1, 2)) for _ in range(9)]
    advantages = [np.zeros(r.num_completion_tokens) for r in rollouts]
    samples = policy_samples(rollouts, advantages, temperature=1.0)
    largest = max(
        sum(len(s.token_ids) - 1 for s in samples if s.episode == number) for number in range(9)
    )
    for num_ranks in (1, 2, 3):
        for share in (False, True):
            places: dict[int, set[tuple[int, int]]] = {}
            found: list[int] = []
            for rank in range(num_ranks):
                batches = pack(
                    samples,
                    max_tokens=largest,
                    num_ranks=num_ranks,
                    rank=rank,
                    share_prompts=share,
                    undivided_for="x",
                )
                for number, batch in enumerate(batches):
                    assert sum(batch.lengths) <= largest
                    for index in batch.sample_indices:
                        found.append(index)
                        episode = samples[index].episode
                        if episode is not None:
                            places.setdefault(episode, set()).add((rank, number))
            assert sorted(found) == [*range(len(samples))]
            assert {len(where) for where in places.values()} == {1}


def test_a_pipelines_micro_batches_keep_episodes_whole():
    samples = [A, B, C, OTHER, OTHER]
    batches = pack(samples, max_tokens=99, num_allowed=lambda n: max(n, 3), undivided_for="x")
    # A share of a third would be 6 inputs; the episode has 14.
    assert [batch.sample_indices for batch in batches] == [(0, 1, 2), (3, 4), ()]
    assert [batch.num_sequences for batch in batches] == [1, 2, 0]


@pytest.mark.parametrize(
    ("settings", "limits"),
    [
        ({"max_tokens": 13}, "max_tokens_per_microbatch=13 and max_sequences_per_microbatch=None"),
        ({"max_tokens": 50, "max_sequences": 2}, "=50 and max_sequences_per_microbatch=2"),
    ],
)
def test_episode_that_does_not_fit_is_divided_or_refused(settings, limits):
    samples = [OTHER, A, B, C]
    batches = pack(samples, **settings)
    assert sorted(chain(*(batch.sample_indices for batch in batches))) == [0, 1, 2, 3]
    assert sum(int(batch.mask.sum()) for batch in batches) == 5
    says = rf"episode 7 has 3 rows of 14 tokens together, .*{limits}.* loss with level='x' needs"
    with pytest.raises(ValueError, match=says):
        pack(samples, **settings, undivided_for="level='x'")


@pytest.mark.parametrize(
    ("loss", "setting"),
    [
        (GRPOLoss(), None),
        (DAPOLoss(normalization="none"), None),
        (CrossEntropyLoss(), None),
        (GRPOLoss(correction=ImportanceCorrection()), None),
        (GRPOLoss(normalization="sequence_mean"), "normalization='sequence_mean'"),
        (CrossEntropyLoss(normalization="sequence_mean"), "normalization='sequence_mean'"),
        (DrGRPOLoss(tokens_per_sequence=7), "normalization='constant'"),
        (
            GRPOLoss(correction=ImportanceCorrection(level="sequence")),
            "correction.level='sequence'",
        ),
        (
            GRPOLoss(correction=ImportanceCorrection(level="sequence_mean")),
            "correction.level='sequence_mean'",
        ),
        (GSPOLoss(normalization="token_mean"), "GSPOLoss, whose ratio is that of a sequence"),
        (RLOOLoss(normalization="none"), "RLOOLoss, whose ratio is that of a sequence"),
        (lambda inputs: None, "function (it has no sequence_setting)"),
    ],
)
def test_losses_name_the_setting_by_which_they_read_sequences(loss, setting):
    assert get_sequence_setting(loss) == setting
