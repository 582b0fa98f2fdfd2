"""Values and gradients of TRL's own losses, on random data with gaps in the masks.

`_compute_loss` of TRL's trainers runs unchanged on logprobs and entropies that this test supplies.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from losses.policy import (
    CISPOLoss,
    DAPOLoss,
    DrGRPOLoss,
    GRPOLoss,
    GSPOLoss,
    PolicyLoss,
    PPOLoss,
    RLOOLoss,
)
from tests.losses.parts import packed, random_batch, value_and_gradients

pytestmark = [pytest.mark.medium, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def trainers():
    """Return TRL's trainers; the import takes 10 s."""
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

    return GRPOTrainer, RLOOTrainer


def theirs(cls, batch, *, old, more=None, **settings):
    """Return TRL's loss, its gradients for logprobs and entropy at valid tokens, and its metrics.

    The trainer is bare, with the settings that its loss reads, in evaluation mode, in which TRL
    does not divide by a number of accumulation steps. Advantages are by sequence, gaps in the masks
    the "tool_mask".
    """
    logprobs, entropy = (
        batch.logprobs.clone().requires_grad_(),
        batch.entropy.clone().requires_grad_(),
    )
    trainer = cls.__new__(cls)
    vars(trainer).update({
        "loss_type": "grpo", "importance_sampling_level": "token", "beta": 0.0,
        "epsilon_low": 0.2, "epsilon_high": 0.2, "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None, "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "aux_loss_enabled": False, "use_adaptive_entropy": False, "entropy_coef": 0.0,
        "max_completion_length": batch.mask.size(1),
        "args": SimpleNamespace(delta=None,
            use_bias_correction_kl=settings.pop("bias_correction_kl", False)),
        "_entropy_bonus_enabled": "entropy_coef" in settings,
        "model": SimpleNamespace(training=False),
        "_metrics": {"eval": defaultdict(list)},
        "accelerator": SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, entropy, None),
    } | settings)  # fmt: skip
    ends = torch.tensor(batch.lengths).unsqueeze(1)
    inputs = {
        "prompt_ids": torch.zeros(len(batch.mask), 1).long(),
        "prompt_mask": torch.ones(len(batch.mask), 1).long(),
        "completion_ids": torch.zeros(batch.mask.shape).long(),
        "completion_mask": (torch.arange(batch.mask.size(1)) < ends).long(),
        "tool_mask": batch.mask.long(),
        "advantages": batch.advantages[:, 0],
        "old_per_token_logps": old,
        "ref_per_token_logps": batch.reference,
        "num_items_in_batch": batch.mask.sum(),
    }
    loss = trainer._compute_loss(trainer.model, inputs | (more or {}))
    of_logprobs, of_entropy = torch.autograd.grad(
        loss, (logprobs, entropy), allow_unused=True, materialize_grads=True
    )
    assert not of_logprobs[~batch.mask].any()
    return loss.detach(), of_logprobs[batch.mask], of_entropy[batch.mask], trainer._metrics["eval"]


def ours(loss, batch):
    """Return the same of our loss, divided as the optimizer step divides it."""
    inputs = packed(batch)
    output = loss(inputs)
    _, of_logprobs, of_entropy = value_and_gradients(loss, inputs)
    assert not of_logprobs[~inputs.mask].any()
    mask, denominator = inputs.mask, output.denominator
    metrics = {
        name: (value / output.num_tokens).item() for name, value in output.metric_sums.items()
    }
    return (
        (output.loss_sum / denominator).detach(),
        of_logprobs[mask] / denominator,
        of_entropy[mask] / denominator,
        metrics,
    )


def assert_same(actual, expected):
    for a, b in zip(actual[:3], expected[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
    assert actual[1].any()  # there is something to compare


KL: dict[str, Any] = {"kl_coef": 0.1}
LOSSES: dict[str, tuple[PolicyLoss, dict[str, Any]]] = {
    "grpo": (GRPOLoss(normalization="sequence_mean"), {"loss_type": "grpo"}),
    "grpo with KL": (GRPOLoss(normalization="sequence_mean", **KL),
        {"loss_type": "grpo", "beta": 0.1}),
    "ppo over the tokens of a batch": (PPOLoss(), {"loss_type": "bnpo"}),
    "dapo": (DAPOLoss(), {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dapo with KL times the ratio": (
        DAPOLoss(kl_importance_weighted=True, **KL),
        {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.1, "bias_correction_kl": True},
    ),
    "dapo with an entropy bonus": (
        DAPOLoss(entropy_coef=0.05),
        {"loss_type": "dapo", "epsilon_high": 0.28, "entropy_coef": 0.05}
    ),
    "dr_grpo": (DrGRPOLoss(tokens_per_sequence=9), {"loss_type": "dr_grpo"}),
    "gspo": (
        GSPOLoss(clip_low=0.1, clip_high=0.15),
        {"importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15},
    ),
    "gspo by token": (
        GSPOLoss(level="token", clip_low=0.1, clip_high=0.15),
        {"importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15},
    ),
    "cispo": (CISPOLoss(clip_high=0.2), {"loss_type": "cispo", "epsilon_high": 1.2}),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_equal_trl(trainers, name):
    loss, settings = LOSSES[name]
    for seed in range(5):
        batch = random_batch(seed)
        expected = theirs(trainers[0], batch, old=batch.generator, **settings)
        actual = ours(loss, batch)
        assert_same(actual, expected)
        if "beta" in settings:
            assert actual[3]["kl"] == pytest.approx(expected[3]["kl"][0], rel=1e-6)
        if settings.get("loss_type") in ("bnpo", "dapo"):
            (share,) = expected[3]["clip_ratio/region_mean"]
            assert actual[3]["clipped_fraction"] == pytest.approx(share)


def test_rloo_equals_trl(trainers):
    for seed in range(5):
        batch = random_batch(seed)
        old = (batch.generator * batch.mask).sum(1)
        more = {"completion_mask": batch.mask.long(), "old_logps": old}
        settings = {"epsilon_low": 0.9, "epsilon_high": 2.0}
        expected = theirs(trainers[1], batch, old=None, more=more, **settings)
        assert_same(ours(RLOOLoss(clip_low=0.9, clip_high=2.0), batch), expected)
