"""Where two real runs part, of a small model in this process, is where a difference was planted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from losses.policy import GRPOLoss
from losses.types import LossInputs, LossOutput
from rl.bisect import main
from rl.config.json import name_code, to_dict
from rl.ledger.compare import Parting, compare_ledgers
from rl.ledger.config import LedgerConfig
from rl.ledger.writer import Ledger
from rl.local import LocalBackend
from rl.loop.ledger import StepLedger
from rl.models.decoder import Attention, Decoder, FeedForward, TransformerBlock
from rl.models.layers.rope import RoPE
from rl.models.qwen3 import model_registry
from rl.rollouts.rubric import Criterion, Rubric
from rl.training.checkpoints.config import CheckpointConfig
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.training.optimizer import Optimizer
from rl.types import PullResult, Rollout, TrainingSample
from tests.support.loops import make_loop, problems

SPEC = replace(
    model_registry("tiny"),
    model=Decoder.Config(
        vocab_size=128,
        dim=32,
        num_layers=1,
        tie_embeddings=True,
        block=TransformerBlock.Config(
            attention=Attention.Config(num_heads=2, num_kv_heads=1, head_dim=16),
            feed_forward=FeedForward.Config(hidden_dim=64),
        ),
        rope=RoPE.Config(theta=1e4, max_positions=128),
    ),
)


@dataclass(kw_only=True, slots=True)
class OtherConstant(GRPOLoss):
    """GRPO times a number that is nearly one."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        output = GRPOLoss.__call__(self, inputs)
        return replace(output, loss_sum=output.loss_sum * 1.00001)


class OtherOrder(LocalBackend):
    """Backend that trains on the samples of a call in another order."""

    async def forward_backward(self, samples: Sequence[TrainingSample], **options: Any) -> Any:
        options["return_trained"] = [len(samples) - 1 - i for i in options["return_trained"]]
        return await super().forward_backward(samples[::-1], **options)


class FlippedBit(LocalBackend):
    """Backend whose generator has one bit of one weight of version 2 otherwise."""

    async def pull(self, policy_version: int) -> PullResult:
        pulled = await super().pull(policy_version)
        if policy_version == 2:
            weight = next(iter(self.sampler.model.parameters())).data.view(torch.int32)
            weight[ord("1"), 0] ^= 1 << 22
        return pulled


def even(rollout: Rollout) -> float:
    return float(sum(rollout.completion.token_ids) % 2)


RUBRIC = Rubric(criteria=(Criterion(name="even", function=even),))


def train(
    folder: Path, *, loss: GRPOLoss | None = None, backend: type[LocalBackend] = LocalBackend
) -> Path:
    """Train three steps of two minibatches with random weights and rewards; return the folder."""
    loss = loss or GRPOLoss()
    config = TrainingEngine.Config(
        loss=loss,
        optimizer=Optimizer.Config(lr=1e-3),
        training=TrainingConfig(max_tokens_per_microbatch=256),
    )

    async def run() -> None:
        async with backend(config, spec=SPEC, hf_assets_path=None, device="cpu") as local:
            loop, _ = make_loop(
                local,
                rubric=RUBRIC,
                problems=problems(),
                checkpoint=CheckpointConfig(enable=False),
                num_steps=3,
                groups_per_batch=4,
                num_minibatches=2,
            )
            loop.ledger = StepLedger(
                ledger=Ledger(folder / "ledger", config=LedgerConfig(enable=True)),
                config=loop.config,
                loss={"class": name_code(type(loss)), **to_dict(loss)},
            )
            await loop.run()

    asyncio.run(run())
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train(tmp_path_factory.mktemp("plain"))


def part(plain: Path, folder: Path) -> Parting:
    parting = compare_ledgers(plain / "ledger", folder / "ledger").parting
    assert parting is not None
    return parting


def test_same_run_is_the_same(plain, tmp_path):
    assert main([str(plain), str(train(tmp_path))]) == 0


def test_other_constant_in_a_loss_shows_in_the_first_sum(plain, tmp_path):
    parting = part(plain, train(tmp_path, loss=OtherConstant()))
    assert (parting.step, parting.where, parting.what) == (1, "minibatch 0", "loss_sum")


def test_other_order_of_samples_shows_in_the_first_minibatch(plain, tmp_path):
    parting = part(plain, train(tmp_path, backend=OtherOrder))
    assert parting.step == 1
    assert parting.where.startswith("minibatch 0")


def test_flipped_bit_of_a_weight_shows_where_its_version_first_samples(plain, tmp_path):
    parting = part(plain, train(tmp_path, backend=FlippedBit))
    assert parting.step == 2
    assert "sample 0, turn 0, token 0" in parting.where
    assert parting.what == "logprob at sampling"
