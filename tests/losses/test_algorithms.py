"""Each algorithm's surrogate on hand-computed numbers.

Two sequences, of three tokens and of one, all sampled with probability 1/4 (q). The ratios of the
policy (p) to q are 2, 1/2, 4 (product 4, geometric mean 4^(1/3)) and 1/2.
"""

import math
from dataclasses import replace

import pytest
import torch

from losses.cross_entropy import CrossEntropyLoss
from losses.policy import (
    CISPOLoss,
    DAPOLoss,
    DrGRPOLoss,
    DROLoss,
    GSPOLoss,
    ImportanceSamplingLoss,
    PPOLoss,
    RLOOLoss,
)
from losses.types import LossInputs
from tests.losses.parts import loss_and_gradient

RATIOS = [2.0, 0.5, 4.0, 0.5]
S = 4 ** (1 / 3)
LOG2, LOG4 = math.log(2), math.log(4)


def inputs(advantages):
    ratios = torch.tensor(RATIOS, dtype=torch.float64)
    generator = torch.full_like(ratios, -LOG4)
    return LossInputs(
        logprobs=(generator + ratios.log()).requires_grad_(),
        generator_logprobs=generator,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        mask=torch.ones(4, dtype=torch.bool),
        sequence_ids=torch.tensor([0, 0, 0, 1]),
        num_sequences=2,
    )


TABLE = {
    # min(2*1, 1.2) + min(.5*1, .8) + min(4*-1, -1.2) + min(.5*-2, -1.6) = 1.2 + .5 - 4 - 1.6, over
    # 4 tokens.
    "ppo": (PPOLoss(), [1.0, 1.0, -1.0, -2.0], 3.9, [0.0, -0.5, 4.0, 0.0], 4.0),
    # The same with 1.28 in the place of 1.2.
    "dapo": (DAPOLoss(), [1.0, 1.0, -1.0, -2.0], 3.82, [0.0, -0.5, 4.0, 0.0], 4.0),
    # The sum of ppo over two sequences of a budget of ten tokens.
    "dr_grpo": (
        DrGRPOLoss(tokens_per_sequence=10), [1.0, 1.0, -1.0, -2.0], 3.9, [0.0, -0.5, 4.0, 0.0], 20.0
    ),
    # min(4 * -1, -1.2) is the first sequence's; min(.5 * -2, -1.6) the second's: 4 + 1.6 over two
    # sequences. d/dp of 4 is 4, for every token of it.
    "rloo": (RLOOLoss(), [-1.0, -1.0, -1.0, -2.0], 5.6, [4.0, 4.0, 4.0, 0.0], 2.0),
    # S is 1.587: min(S * -1, -1.2) and min(.5 * 1, .8); each token has a third of S.
    "gspo": (
        GSPOLoss(clip_low=0.2, clip_high=0.2), [-1.0, -1.0, -1.0, 1.0], S - 0.5,
        [S / 3] * 3 + [-0.5], 2.0
    ),
    # A third of each token: min(S A, 1.2 A) of 2, -1, -3, less min(.5 * 1, .8); -1 and -3 move the
    # sequence.
    "gspo of tokens' advantages": (
        GSPOLoss(clip_low=0.2, clip_high=0.2),
        [2.0, -1.0, -3.0, 1.0], (-2.4 + S + 3 * S) / 3 - 0.5, [4 * S / 9] * 3 + [-0.5], 2.0,
    ),
    # By token the first is clipped, and each of the others moves itself.
    "gspo token": (
        GSPOLoss(level="token", clip_low=0.2, clip_high=0.2),
        [2.0, -1.0, -3.0, 1.0], (-2.4 + S + 3 * S) / 3 - 0.5, [0.0, S / 3, S, -0.5], 2.0,
    ),
    # Weights 2, .5, 3 (cut) and .5; p is log 1/2, log 1/8, 0 and log 1/8.
    "cispo": (
        CISPOLoss(clip_high=2.0), [1.0, 2.0, -1.0, -2.0],
        2 * LOG2 + 0.5 * 2 * 3 * LOG2 - 0.5 * 2 * 3 * LOG2, [-2.0, -1.0, 3.0, 1.0], 4.0,
    ),
    # With a lower bound the second and the last weigh .75.
    "cispo from below": (
        CISPOLoss(clip_low=0.25, clip_high=2.0), [1.0, 2.0, -1.0, -2.0],
        2 * LOG2 + 0.75 * 2 * 3 * LOG2 - 0.75 * 2 * 3 * LOG2, [-2.0, -1.5, 3.0, 1.5], 4.0,
    ),
    "importance_sampling": (
        ImportanceSamplingLoss(), [1.0, 2.0, -1.0, -2.0], -2 - 1 + 4 + 1, [-2.0, -1.0, 4.0, 1.0],
        4.0
    ),
    # -A p + .2 / 2 (log r)^2, whose slope is -A + .2 log r.
    "dro": (
        DROLoss(beta=0.2), [1.0, 2.0, -1.0, -2.0],
        LOG2 + 6 * LOG2 - 6 * LOG2 + 0.1 * (3 * LOG2**2 + LOG4**2),
        [-1 + 0.2 * LOG2, -2 - 0.2 * LOG2, 1 + 0.2 * LOG4, 2 - 0.2 * LOG2], 4.0,
    ),
    "undivided": (PPOLoss(normalization="none"), [1.0, 1.0, -1.0, -2.0], 3.9,
        [0.0, -0.5, 4.0, 0.0], None),
    # A third of the first three terms: -(1.2 + .5 - 4) / 3 + 1.6 over two sequences.
    "every sequence alike": (
        PPOLoss(normalization="sequence_mean"), [1.0, 1.0, -1.0, -2.0],
        2.3 / 3 + 1.6, [0.0, -0.5 / 3, 4 / 3, 0.0], 2.0,
    ),
    "cross_entropy, every sequence alike": (
        CrossEntropyLoss(normalization="sequence_mean"), [1.0, 2.0, -1.0, -2.0],
        4 * LOG2 / 3 + 3 * LOG2, [-1 / 3, -1 / 3, -1 / 3, -1.0], 2.0,
    ),
    "weighted cross_entropy": (
        CrossEntropyLoss(weights="advantages"), [1.0, 2.0, -1.0, -2.0],
        LOG2 + 6 * LOG2 - 6 * LOG2, [-1.0, -2.0, 1.0, 2.0], 4.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_value_gradient_and_denominator_by_hand(name):
    loss, advantages, value, gradient, denominator = TABLE[name]
    output, actual = loss_and_gradient(loss, inputs(advantages))
    assert output.loss_sum.item() == pytest.approx(value, rel=1e-6)
    assert actual == pytest.approx(gradient, rel=1e-6)
    assert (None if output.denominator is None else output.denominator.item()) == denominator
    assert output.num_tokens.item() == 4


@pytest.mark.parametrize(
    ("loss", "ratio", "num_clipped"),
    [
        (PPOLoss(), sum(RATIOS), 3),  # 2 upwards, 1/2 twice downwards; not 4, which is to fall
        (RLOOLoss(), 3 * 4 + 0.5, 2),  # the first token alone of its sequence is to rise
        (GSPOLoss(clip_low=0.2, clip_high=0.2), 3 * S + 0.5, 2),
        (CISPOLoss(clip_high=2.0), sum(RATIOS), 1),  # 4, whatever its advantage
        (ImportanceSamplingLoss(), sum(RATIOS), 0),
        (DROLoss(), sum(RATIOS), 0),
    ],
)
def test_metrics_are_the_ratios_and_the_clipped_tokens(loss, ratio, num_clipped):
    sums = loss(inputs([1.0, -1.0, -1.0, -2.0])).metric_sums
    assert sums["ratio"].item() == pytest.approx(ratio)
    assert sums["clipped_fraction"].item() == num_clipped


@pytest.mark.parametrize(
    ("level", "gradient"),
    [
        # A token's advantage moves the tokens of the mean ...
        ("sequence", [8**0.5 / 2, 0.0, 8**0.5 / 2, 0.0]),
        # ... or only the token itself.
        ("token", [0.0, 8**0.5 / 2, 8**0.5 / 2, -1.0]),
    ],
)
def test_gspo_averages_over_the_ratio_mask(level, gradient):
    given = inputs([math.nan, -1.0, -1.0, 1.0])
    given = replace(
        given,
        mask=torch.tensor([False, True, True, True]),
        # Ratios 2 and 4 of the first sequence, mean 8^(1/2); none of the second, whose ratio is 1.
        ratio_mask=torch.tensor([True, False, True, False]),
    )
    output, actual = loss_and_gradient(GSPOLoss(level=level, clip_low=0.2, clip_high=0.2), given)
    assert output.loss_sum.item() == pytest.approx(8**0.5 - 1.0)
    assert actual == pytest.approx(gradient)
    assert output.metric_sums["ratio"].item() == pytest.approx(2 * 8**0.5 + 1.0)
    assert output.num_tokens.item() == 3
