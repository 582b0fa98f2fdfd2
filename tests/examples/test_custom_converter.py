import pytest
import torch

from examples.custom_converter import TopBlocks
from losses.cross_entropy import CrossEntropyLoss
from tests.training.parts import engine_config, make_samples, small_spec

SAMPLES = make_samples()


def make(**settings):
    config = engine_config()
    config.converters = (TopBlocks.Config(**settings),)
    return config.build(model_spec=small_spec(), hf_assets_path=None, device="cpu")


def test_more_blocks_than_the_model_has_are_refused():
    with pytest.raises(ValueError, match=r"converters\.0: num_trained_blocks=3: the model has 2"):
        make(num_trained_blocks=3)


def test_last_block_alone_moves_and_stays_within_its_bound():
    engine = make(num_trained_blocks=1, max_abs=0.03)
    before = {name: p.detach().clone() for name, p in engine.policy.parameters.items()}
    for _ in range(3):
        engine.forward_backward(SAMPLES, loss=CrossEntropyLoss())
        engine.optim_step()
    after = engine.model_state_dict()
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert moved == {name for name in before if name.startswith("layers.1.")}
    assert max(before[name].abs().max() for name in moved) > 0.05
    assert max(after[name].abs().max() for name in moved) == pytest.approx(0.03)
