import logging
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from rl.config.cli import parse_cli
from rl.config.serialize import read_json, to_dict, write_json
from rl.distributed.mesh import Degrees
from rl.models.converters.converter import ModelConverter, ModelConverters
from rl.models.converters.lora import LoRA
from rl.training.checkpoint_files import read_state
from tests.training.parts import engine_config, make_samples, small_spec

SAMPLES = make_samples()
RUNS = "tests.models.converters.example_runs"
FIRST = "--trainer.converters.0"


class Recorder(ModelConverter):
    """Notes what is called, in a list that its config shares with the test; adds `amount` to each weight
    of the plain model, so that the order in which several are undone shows."""

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
        self.calls.append(("post_optimizer_hook", self.config.name, float(model.norm.weight.detach().sum())))

    def plain_tensor(self, name, tensor):
        return tensor * self.config.factor + self.config.amount


class Loser(ModelConverter):
    """Takes a parameter away."""

    def convert(self, model: nn.Module) -> None:
        model.norm = nn.Identity()


def make(*converters, **settings):
    config = engine_config()
    config.converters = converters
    for name, value in settings.items():
        setattr(config, name, value)
    Recorder.calls = []
    return config.build(model_spec=small_spec(), hf_assets_path=None, device="cpu")


def test_converters_are_called_in_order_and_after_each_step(tmp_path):
    engine = make(Recorder.Config(name="a"), Recorder.Config(name="b"))
    calls = Recorder.calls
    assert calls == [
        ("convert", "a"),
        ("convert", "b"),
        ("weights_loaded", "a", True),
        ("weights_loaded", "b", True),
    ]
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


def test_converters_are_undone_in_the_opposite_order():
    engine = make(Recorder.Config(factor=2.0), Recorder.Config(amount=1.0))
    assert torch.equal(engine.model_state_dict()["norm.weight"], torch.full((36,), (1.0 + 1.0) * 2.0))


class Noted(Recorder):
    @dataclass(kw_only=True, slots=True)
    class Config(Recorder.Config):
        pass

    def saved_settings(self):
        return {"factor": self.config.factor}


def test_a_checkpoint_opens_with_the_settings_that_each_converter_notes_and_any_others(tmp_path):
    def engine(*factors, amount=0.0):
        return make(Recorder.Config(amount=amount), *(Noted.Config(factor=f) for f in factors))

    engine(2.0, 3.0).save_checkpoint(str(tmp_path / "checkpoint"))
    assert read_state(tmp_path / "checkpoint").converters == {
        "Noted": {"factor": 2.0},
        "Noted.1": {"factor": 3.0},
    }
    engine(2.0, 3.0, amount=1.0).load_checkpoint(str(tmp_path / "checkpoint"))
    with pytest.raises(
        ValueError, match=r"was made with Noted\.1\.factor=3\.0, this run has 5\.0; give the run"
    ):
        engine(2.0, 5.0).load_checkpoint(str(tmp_path / "checkpoint"))
    with pytest.raises(
        ValueError, match=r"made with Noted .* and Noted\.1 .*, this run has Noted \(factor=2"
    ):
        engine(2.0).load_checkpoint(str(tmp_path / "checkpoint"))


def test_tokens_of_a_micro_batch_are_a_multiple_of_what_all_converters_ask_for():
    engine = make(Recorder.Config(multiple=4), Recorder.Config(multiple=6))
    batches = engine.policy.pack(SAMPLES)
    assert all(len(batch.input_ids) % 12 == 0 for batch in batches)
    assert len(batches) > 1


def test_a_converter_that_loses_a_parameter_is_refused():
    with pytest.raises(ValueError, match=r"converters\.1: Loser changed or lost parameter norm.weight of"):
        make(Recorder.Config(), Loser.Config())


def test_a_converter_without_convert_is_a_programming_error():
    class Nothing(ModelConverter):
        pass

    with pytest.raises(NotImplementedError, match=r"Nothing has no convert\(\)"):
        make(Nothing.Config())


def test_the_converted_model_is_logged_when_asked_for(caplog):
    with caplog.at_level(logging.INFO, logger="rl.training.place"):
        make(LoRA.Config(rank=5, alpha=10.0))
        assert caplog.text == ""
        make(LoRA.Config(rank=5, alpha=10.0), print_after_conversion=True)
    assert "(o_proj_lora): LowRank(rank=5, scale=2, adapted=1)" in caplog.text
    assert "(qkv_proj_lora): LowRank(rank=5, scale=2, adapted=3)" in caplog.text


def test_no_converters_are_no_work():
    none = ModelConverters(
        (),
        spec=small_spec(),
        degrees=Degrees(dp_replicate=1, dp_shard=1, tp=1),
        device=torch.device("cpu"),
    )
    model = small_spec().model.build()
    none.convert(model)
    assert none.token_multiple == 1
    for name, tensor in none.plain_tensors(dict(model.named_parameters())):
        assert tensor.data_ptr() == model.get_parameter(name).data_ptr()


def test_settings_of_a_converter_are_options_and_its_class_is_named_in_json(tmp_path):
    argv = ["--module", RUNS, "--config", "tiny_lora"]
    run = parse_cli([*argv, "--trainer.converters.0.rank", "4"], default_module="sum_digits")
    assert run.config.trainer.converters == (LoRA.Config(rank=4, alpha=8.0),)
    (dumped,) = to_dict(run.config)["trainer"]["converters"]
    assert dumped["class"] == "rl.models.converters.lora.LoRA.Config"
    assert dumped["rank"] == 4
    write_json(run, tmp_path / "config.json")
    assert read_json(tmp_path / "config.json") == run


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--config", "tiny_lora", "--trainer.converters.0.rank", "0"],
            "trainer.converters.0: rank=0: must be at least 1",
        ),
        (
            ["--config", "tiny_lora", "--trainer.converters", "LoRA"],
            "has fields of its own: --trainer.converters.0",
        ),
        (
            ["--config", "tiny", f"{FIRST}.rank", "4"],
            "trainer.converters is empty in this config; a registry function can turn it on",
        ),
    ],
)
def test_options_that_no_converter_has_are_refused(options, message, capsys):
    with pytest.raises(SystemExit):
        parse_cli(["--module", RUNS, *options], default_module="sum_digits")
    assert message in capsys.readouterr().err
