import json
import math
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from rl.config.configurable import Configurable
from rl.config.registry import ResolvedRun
from rl.config.serialize import decode, encode, load_values, read_json, to_dict, write_json
from rl.config.tree import ConfigError
from tests.config import example_configs
from tests.config.example_configs import Precision, SgdOptimizer

MODULE = "tests.config.example_configs"


def through_json(config):
    return json.loads(json.dumps(to_dict(config), allow_nan=False))


def test_dict_holds_every_field_and_names_code():
    values = through_json(example_configs.large())
    assert values["trainer"]["optimizer"] == {
        "lr": 3e-4,
        "betas": [0.9, 0.95],
        "weight_decay": None,
        "kind": "fused",
        "max_norm": "inf",
    }
    assert values["trainer"]["loss"] == {"clip_low": 0.2, "clip_high": 0.28}
    assert values["trainer"]["precision"] == "FULL"
    assert values["dump_folder"] == "outputs"
    assert values["schedule"] == [{"num_steps": 1}, {"num_steps": 2}]
    assert values["stages"][0] == {"class": f"{MODULE}.Warmup.Config", "num_steps": 7}
    assert values["stages"][1]["class"] == f"{MODULE}.Optimizer.Config"
    assert values["spec"] == "qwen3/tiny"
    assert values["transform"] == f"{MODULE}.plus_one"
    assert values["converters"] == [f"{MODULE}.Warmup.Config"]


@pytest.mark.parametrize("function", ["tiny", "large", "with_momentum", "without_warmup"])
def test_values_survive_json(function):
    config = getattr(example_configs, function)()
    config.trainer.optimizer.betas = (0.1, math.inf)
    config.trainer.precision = Precision.HALF
    config.stop_token_ids = (1, 2)
    loaded = load_values(getattr(example_configs, function)(), through_json(config))
    assert loaded == config
    assert type(loaded.trainer.optimizer) is type(config.trainer.optimizer)
    assert type(loaded.stop_token_ids) is tuple


def test_nan_survives_json():
    config = example_configs.tiny()
    config.trainer.optimizer.max_norm = math.nan
    assert math.isnan(load_values(example_configs.tiny(), through_json(config)).trainer.optimizer.max_norm)


def test_field_of_a_subclass_survives_json():
    config = example_configs.with_momentum()
    config.trainer.optimizer = SgdOptimizer.Config(lr=1e-2, momentum=0.25)
    loaded = load_values(example_configs.with_momentum(), through_json(config))
    assert loaded.trainer.optimizer == SgdOptimizer.Config(lr=1e-2, momentum=0.25)


def test_unknown_and_missing_keys_are_all_named():
    values = through_json(example_configs.tiny())
    values["trainer"]["optimizer"]["learning_rate"] = 1.0
    del values["trainer"]["optimizer"]["lr"]
    del values["name"]
    with pytest.raises(ConfigError) as error:
        load_values(example_configs.tiny(), values)
    assert str(error.value) == (
        "missing key name; unknown key trainer.optimizer.learning_rate; missing key trainer.optimizer.lr"
    )


def test_wrong_types_are_all_named():
    values = through_json(example_configs.tiny())
    values["trainer"]["sequence_length"] = 1.5
    values["overwrite"] = 1
    values["warmup"] = 3
    with pytest.raises(ConfigError) as error:
        load_values(example_configs.tiny(), values)
    assert "trainer.sequence_length: 1.5 is not of type int" in str(error.value)
    assert "overwrite: 1 is not of type bool" in str(error.value)
    assert "warmup is 3, not an object of fields" in str(error.value)


def test_other_length_of_a_sequence_of_configs_is_named():
    values = through_json(example_configs.large())
    values["schedule"].append({"num_steps": 3})
    with pytest.raises(ConfigError, match=r"unknown key schedule\.2"):
        load_values(example_configs.large(), values)


def test_component_of_another_class_in_a_sequence_is_named():
    values = through_json(example_configs.large())
    values["stages"][0]["class"] = f"{MODULE}.Optimizer.Config"
    with pytest.raises(ConfigError) as error:
        load_values(example_configs.large(), values)
    assert str(error.value) == (
        f"stages.0 was '{MODULE}.Optimizer.Config' and is '{MODULE}.Warmup.Config' in the registry function"
    )


def test_components_absent_from_the_registry_configs_empty_sequence_are_named():
    values = through_json(example_configs.large())
    with pytest.raises(ConfigError, match="stages has fields, but is empty in the registry function"):
        load_values(example_configs.tiny(), values)
    assert load_values(example_configs.tiny(), through_json(example_configs.tiny())).stages == ()


def test_code_that_changed_since_is_named():
    values = through_json(example_configs.tiny())
    values["spec"] = "qwen3/8B"
    with pytest.raises(ConfigError, match="spec was 'qwen3/8B' and is 'qwen3/tiny' in the registry function"):
        load_values(example_configs.tiny(), values)


def test_component_absent_from_the_registry_config_is_named():
    values = through_json(example_configs.tiny())
    with pytest.raises(ConfigError, match="warmup has fields, but is None in the registry function"):
        load_values(example_configs.without_warmup(), values)


def test_loaded_values_are_validated():
    values = through_json(example_configs.tiny())
    values["trainer"]["optimizer"]["lr"] = -1
    with pytest.raises(ConfigError, match=r"trainer\.optimizer: lr must be at least 0, got -1"):
        load_values(example_configs.tiny(), values)


def test_file_names_its_registry_function_and_rebuilds_the_run(tmp_path):
    run = ResolvedRun(module=MODULE, function="large", config=example_configs.large())
    path = tmp_path / "config.json"
    write_json(run, path)
    assert json.loads(path.read_text())["config"] == "large"
    assert read_json(path) == run


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "keys must be module, config and values"),
        ('{"module": "m"}', "keys must be module, config and values"),
        (json.dumps({"module": MODULE, "config": "tiny", "values": {}}), "missing key trainer"),
        (json.dumps({"module": MODULE, "config": "tiny", "values": 3}), "values is 3"),
        (json.dumps({"module": "no_such", "config": "tiny", "values": {}}), "no such module"),
    ],
)
def test_file_that_is_no_runs_config_is_refused(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_json(path)


def test_visible_field_that_holds_code_is_a_programming_error():
    class Leaky(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            transform: Any = math.sqrt

    with pytest.raises(TypeError, match=r"Leaky\.Config\.transform holds code"):
        to_dict(Leaky.Config())


def test_field_that_is_no_plain_data_is_a_programming_error():
    class Opaque(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            value: Any = 1j

    with pytest.raises(TypeError, match=r"Opaque\.Config\.value: a complex is not plain data"):
        to_dict(Opaque.Config())


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (3, int),
        (3, int | str),
        ("3", int | str),
        (2.0, float),
        (True, bool | None),
        (None, bool | None),
        (-math.inf, float | None),
        ("b", Literal["a", "b"]),
        ((1, "a"), tuple[int, str]),
        (((1, 2.0),), tuple[tuple[int, float], ...]),
        ([1, 2], list[int]),
        ({"a": 0.5}, dict[str, float]),
        ([{"x": None}], Any),
    ],
)
def test_encoded_value_decodes_to_itself(value, annotation):
    decoded = decode(json.loads(json.dumps(encode(value), allow_nan=False)), annotation)
    assert decoded == value
    assert type(decoded) is type(value)


@pytest.mark.parametrize(
    ("data", "annotation"),
    [
        ("1", int),
        (1.0, int),
        (True, int),
        (None, int),
        (False, float),
        ("x", float),
        (1, str),
        (1, bool),
        ("c", Literal["a"]),
        (1, Literal[True]),
        ([1], tuple[int, int]),
        (1, tuple[int, ...]),
        (1, list[int]),
        ("RED", Precision),
    ],
)
def test_data_of_another_type_is_refused(data, annotation):
    with pytest.raises(ValueError, match="is not of type"):
        decode(data, annotation)
