"""Trainers with parts of one's own: a converter, and an engine whose clip norm is annealed."""

import math
from contextlib import nullcontext

import pytest
import torch

from examples.custom_converter import TopBlocks
from examples.custom_trainer import AnnealedClipEngine, AnnealedClipTrainer
from losses.cross_entropy import CrossEntropyLoss
from rl.models.lora import LoRA
from rl.trainer_types import OptimParams
from rl.training.config import TrainingConfig
from rl.training.optimizer import Optimizer
from tests.training.parts import engine_config, make_samples, small_spec

SAMPLES = make_samples()


def converted(**settings):
    config = engine_config()
    config.converters = (TopBlocks.Config(**settings),)
    return config.build(model_spec=small_spec(), hf_assets_path=None, device="cpu")


def test_more_blocks_than_the_model_has_are_refused():
    with pytest.raises(ValueError, match=r"converters\.0: num_trained_blocks=3: the model has 2"):
        converted(num_trained_blocks=3)


def test_weights_that_generators_would_not_get_are_refused():
    """LoRA freezes what is there, and a converter after it trains some of it again."""
    config = engine_config()
    for merge in (True, False):
        config.converters = (LoRA.Config(merge=merge), TopBlocks.Config())
        says = r"converters\.0\.merge=False: .* but layers\.1\.\S+ is trained too: must be True"
        with nullcontext() if merge else pytest.raises(ValueError, match=says):
            config.build(model_spec=small_spec(), hf_assets_path=None, device="cpu")


def test_last_block_alone_moves_and_stays_within_its_bound():
    engine = converted(num_trained_blocks=1, max_abs=0.03)
    before = {name: p.detach().clone() for name, p in engine.policy.parameters.items()}
    for _ in range(3):
        engine.forward_backward(SAMPLES, loss=CrossEntropyLoss())
        engine.optim_step()
    after = engine.model_state_dict()
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert moved == {name for name in before if name.startswith("layers.1.")}
    assert max(before[name].abs().max() for name in moved) > 0.05
    assert max(after[name].abs().max() for name in moved) == pytest.approx(0.03)


LR = 1e4
"""Adam whose step is the clipped gradient itself: a huge eps and no running means."""


@pytest.fixture
def engine():
    """The clip norm falls from 0.4 to 0.1 in four steps."""
    config = AnnealedClipTrainer.Config(
        optimizer=Optimizer.Config(lr=LR, betas=(0.0, 0.0), eps=LR, weight_decay=0.0),
        training=TrainingConfig(max_norm=0.4),
        final_max_norm=0.1,
        anneal_steps=4,
    )
    return AnnealedClipEngine(
        config=config, model_spec=small_spec(), hf_assets_path=None, device="cpu"
    )


def step_norm(engine, params=None):
    """Return how far one step moves the weights; its gradient exceeds every clip norm here."""
    before = {name: p.detach().clone() for name, p in engine.policy.parameters.items()}
    engine.forward_backward(SAMPLES, loss=CrossEntropyLoss())
    assert engine.optim_step(params).grad_norm > 0.5
    moved = [(p.detach() - before[name]).double() for name, p in engine.policy.parameters.items()]
    return math.sqrt(sum(float(difference.square().sum()) for difference in moved))


def test_clip_norm_falls_to_its_final_value_and_stays_there(engine):
    norms = [step_norm(engine) for _ in range(6)]
    assert norms == pytest.approx([0.4, 0.325, 0.25, 0.175, 0.1, 0.1], rel=1e-3)


def test_clip_norm_of_the_call_goes_before_the_annealed_one(engine):
    assert step_norm(engine, OptimParams(max_norm=0.3)) == pytest.approx(0.3, rel=1e-3)
    # Other settings of the call leave the annealing as it is.
    assert step_norm(engine, OptimParams(lr=LR / 2)) == pytest.approx(0.325 / 2, rel=1e-3)
