import json
import math
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from rl.config.cli import parse_cli
from rl.config.configurable import Configurable
from rl.config.json import encode, list_changed_fields, load_values, read_json, to_dict, write_json
from rl.config.registry import RunRequest
from rl.config.tree import ConfigError, convert
from tests.config import example_configs

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
    assert values["dump_folder"] == "outputs"
    assert values["schedule"] == [{"num_steps": 1}, {"num_steps": 2}]
    assert values["stages"][0] == {"class": f"{MODULE}.Warmup.Config", "num_steps": 7}
    assert values["stages"][1]["class"] == f"{MODULE}.Optimizer.Config"
    assert values["spec"] == "qwen3/tiny"
    assert values["transform"] == f"{MODULE}.plus_one"
    assert values["converters"] == [f"{MODULE}.Warmup.Config"]


@pytest.mark.parametrize(
    ("saved", "edits", "loading", "problems"),
    [
        ("tiny", {"trainer.optimizer.rate": 1.0, "trainer.optimizer.lr": ..., "name": ...}, "tiny",
         "missing key name; unknown key trainer.optimizer.rate; missing key trainer.optimizer.lr"),
        ("tiny", {"trainer.sequence_length": 1.5, "overwrite": 1, "warmup": 3}, "tiny",
         "overwrite: 1 is not of type bool; trainer.sequence_length: 1.5 is not of type int; "
         "warmup is 3, not an object of fields"),
        ("large", {"schedule.2": {"num_steps": 3}}, "large", "unknown key schedule.2"),
        ("large", {"stages.0.class": "other"}, "large",
         f"stages.0 was 'other' and is '{MODULE}.Warmup.Config' in the registry function"),
        ("large", {}, "tiny", "stages has fields, but is empty in the registry function"),
        ("tiny", {}, "without_warmup", "warmup has fields, but is None in the registry function"),
        ("tiny", {"spec": "qwen3/8B"}, "tiny",
         "spec was 'qwen3/8B' and is 'qwen3/tiny' in the registry function"),
        ("tiny", {"trainer.optimizer.lr": -1}, "tiny", "trainer.optimizer.lr must be at least 0, "
                                                       "got -1.0"),
    ],
)  # fmt: skip
def test_values_that_do_not_fit_are_all_named(saved, edits, loading, problems):
    values = through_json(getattr(example_configs, saved)())
    for path, value in edits.items():
        *parents, name = path.split(".")
        node = values
        for parent in parents:
            node = node[int(parent)] if isinstance(node, list) else node[parent]
        if value is ...:
            del node[name]
        elif isinstance(node, list):
            node.append(value)
        else:
            node[name] = value
    with pytest.raises(ConfigError) as error:
        load_values(getattr(example_configs, loading)(), values)
    assert problems in str(error.value)


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
def test_invalid_file_is_refused(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_json(path)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (math.sqrt, "holds code"),
        (HTTPStatus.OK, "is an enum"),
        (1j, "a complex is not plain data"),
    ],
)
def test_visible_field_that_is_not_plain_data_is_a_programming_error(value, says):
    class Opaque(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            value: Any

    with pytest.raises(TypeError, match=rf"Opaque\.Config\.value:? {says}"):
        to_dict(Opaque.Config(value=value))


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (3, int), (3, int | str), ("3", int | str), (2.0, float), (True, bool | None),
        (None, bool | None),
        (-math.inf, float | None), (Path("x"), Path), ((1, "a"), tuple[int, str]),
        (((1, 2.0),), tuple[tuple[int, float], ...]), ([1, 2], list[int]),
        ({"a": 0.5}, dict[str, float]),
        ([{"x": None}], Any),
    ],
)  # fmt: skip
def test_encoded_value_is_read_as_itself(value, annotation):
    saved = json.loads(json.dumps(encode(value), allow_nan=False))
    found = convert(saved, annotation, from_json=True)
    assert (found, type(found)) == (value, type(value))


def parse(*argv: str) -> RunRequest:
    return parse_cli(argv, default_module=MODULE, default_config="large")


def test_changed_fields_have_both_values_and_leave_out_the_location(tmp_path):
    write_json(parse("--name", "first", "--dump_folder", "x"), tmp_path / "config.json")
    same = parse("--name", "other", "--dump_folder", "y")
    assert list_changed_fields(tmp_path / "config.json", same.config) == []
    changed = parse("--trainer.optimizer.lr", "0.25", "--trainer.optimizer.betas", "0.5", "0.9")
    off = list_changed_fields(tmp_path / "config.json", parse("--warmup", "None").config)
    assert off == ["warmup.num_steps: 150 -> null"]
    assert list_changed_fields(tmp_path / "config.json", changed.config) == [
        "trainer.optimizer.lr: 0.0003 -> 0.25",
        "trainer.optimizer.betas: [0.9, 0.95] -> [0.5, 0.9]",
    ]
