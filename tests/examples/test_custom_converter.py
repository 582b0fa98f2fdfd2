import pytest
import torch

from examples.custom_converter import TopBlocks, tiny_top_blocks
from losses.cross_entropy import CrossEntropyLoss
from rl.config.cli import parse_cli
from rl.config.json import read_json, to_dict, write_json
from tests.training.parts import engine_config, make_samples, small_spec

ARGV = ["--module", "examples.custom_converter", "--config", "tiny_top_blocks"]
FIRST = "--trainer.converters.0"
SAMPLES = make_samples()


def make(**settings):
    config = engine_config()
    config.converters = (TopBlocks.Config(**settings),)
    return config.build(model_spec=small_spec(), hf_assets_path=None, device="cpu")


def test_fields_are_options_and_survive_the_config_file(tmp_path):
    run = parse_cli([*ARGV, f"{FIRST}.max_abs", "0.5"], default_module="sum_digits")
    assert run.config.trainer.converters == (TopBlocks.Config(num_trained_blocks=2, max_abs=0.5),)
    assert tiny_top_blocks().trainer.converters == (TopBlocks.Config(num_trained_blocks=2, max_abs=2.0),)
    assert to_dict(run.config)["trainer"]["converters"] == [
        {"class": "examples.custom_converter.TopBlocks.Config", "num_trained_blocks": 2, "max_abs": 0.5}
    ]
    write_json(run, tmp_path / "config.json")
    assert read_json(tmp_path / "config.json") == run


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("num_trained_blocks", "0", "num_trained_blocks=0: must be at least 1"),
        ("max_abs", "-1", "max_abs=-1.0: must be above 0"),
    ],
)
def test_invalid_settings_are_refused(option, value, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_cli([*ARGV, f"{FIRST}.{option}", value], default_module="sum_digits")
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"error: trainer.converters.0: {message}\n"


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
