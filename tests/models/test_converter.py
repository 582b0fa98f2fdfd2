from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from rl.models.converter import ModelConverter
from rl.training.checkpoints.files import read_state
from tests.training.parts import make_engine, make_samples

SAMPLES = make_samples()


class Recorder(ModelConverter):
    """A converter that records its calls and undoes a weight w as w * factor + amount."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConverter.Config):
        name: str = ""
        factor: float = 1.0
        amount: float = 0.0
        multiple: int = 1

    config: Config
    calls: ClassVar[list] = []

    def __init__(self, **runtime):
        super().__init__(**runtime)
        self.token_multiple = self.config.multiple

    def convert(self, model):
        assert all(parameter.is_meta for parameter in model.parameters())
        self.calls.append(("convert", self.config.name))

    def weights_loaded(self, model, *, fresh):
        self.calls.append(("weights_loaded", self.config.name, fresh))

    def post_optimizer_hook(self, model):
        self.calls.append(
            ("post_optimizer_hook", self.config.name, float(model.norm.weight.detach().sum()))
        )

    def plain_tensor(self, name, tensor):
        return tensor * self.config.factor + self.config.amount

    def saved_settings(self):
        return {} if self.config.factor == 1.0 else {"factor": self.config.factor}


class Dropper(ModelConverter):
    def convert(self, model: nn.Module) -> None:
        model.norm = nn.Identity()


def make(*converters):
    Recorder.calls = []
    return make_engine(None, converters=converters)


def test_converters_are_called_in_order_and_after_each_step(tmp_path):
    engine = make(Recorder.Config(name="a"), Recorder.Config(name="b"))
    calls = Recorder.calls
    assert calls[:2] == [("convert", "a"), ("convert", "b")]
    assert calls[2:] == [("weights_loaded", "a", True), ("weights_loaded", "b", True)]
    calls.clear()
    engine.forward_backward(SAMPLES)
    engine.compute_logprobs(SAMPLES)
    assert calls == []
    engine.optim_step()
    after = float(engine.policy.parameters["norm.weight"].detach().sum())
    assert after != 36.0
    assert calls == [("post_optimizer_hook", "a", after), ("post_optimizer_hook", "b", after)]
    calls.clear()
    engine.save_checkpoint(str(tmp_path / "checkpoint"))
    engine.load_checkpoint(str(tmp_path / "checkpoint"))
    assert calls == [("weights_loaded", "a", False), ("weights_loaded", "b", False)]


def test_converters_are_undone_in_reverse_order():
    engine = make(Recorder.Config(factor=2.0), Recorder.Config(amount=1.0))
    assert torch.equal(
        engine.model_state_dict()["norm.weight"], torch.full((36,), (1.0 + 1.0) * 2.0)
    )


def test_checkpoint_refuses_other_saved_settings_and_ignores_the_rest(tmp_path):
    def engine(*factors, amount=0.0):
        return make(Recorder.Config(amount=amount), *(Recorder.Config(factor=f) for f in factors))

    engine(2.0, 3.0).save_checkpoint(str(tmp_path / "checkpoint"))
    assert read_state(tmp_path / "checkpoint").converters == {
        "Recorder": {"factor": 2.0},
        "Recorder.1": {"factor": 3.0},
    }
    engine(2.0, 3.0, amount=1.0).load_checkpoint(str(tmp_path / "checkpoint"))
    with pytest.raises(
        ValueError, match=r"Recorder\.1 \(factor=3\.0\), this run has .* \(factor=5\.0\)"
    ):
        engine(2.0, 5.0).load_checkpoint(str(tmp_path / "checkpoint"))
    with pytest.raises(
        ValueError, match=r"made with Recorder .* and Recorder\.1 .*, this run has Recorder"
    ):
        engine(2.0).load_checkpoint(str(tmp_path / "checkpoint"))


def test_converter_that_drops_a_parameter_is_rejected():
    with pytest.raises(
        ValueError, match=r"converters\.1: Dropper changed or lost parameter norm.weight of"
    ):
        make(Recorder.Config(), Dropper.Config())
