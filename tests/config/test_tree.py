import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest

from rl.config.configurable import Configurable
from rl.config.tree import (
    ConfigError,
    check_fields,
    convert,
    find_input_paths,
    read_field_docs,
    rebuild,
    replace_values,
    walk,
)
from tests.config import example_configs
from tests.config.example_configs import Run, SgdOptimizer


def test_walk_lists_every_field_once_with_its_kind():
    kinds = {entry.path: entry.kind for entry in walk(example_configs.large())}
    assert kinds["trainer"] == "node"
    assert kinds["trainer.loss.clip_low"] == "leaf"
    assert kinds["trainer.reference"] == "absent"
    assert kinds["schedule.0.num_steps"] == "leaf"
    assert kinds["spec"] == "hidden"
    assert not any(path.startswith("spec.") for path in kinds)
    assert [path for path in kinds if "." not in path] == [
        f.name for f in dataclasses.fields(Run.Config)
    ]


def test_input_paths_are_the_fields_that_name_existing_paths(tmp_path):
    @dataclass(kw_only=True, slots=True)
    class Reference:
        folder: str | None

    @dataclass(kw_only=True, slots=True)
    class Root:
        reference: Reference
        file: Path
        missing: str
        words: str = "w" * 5000
        empty: str = ""

    (tmp_path / "file").write_text("")
    root = Root(
        reference=Reference(folder=str(tmp_path)),
        file=tmp_path / "file",
        missing=str(tmp_path / "no"),
    )
    assert find_input_paths(root) == {"reference.folder": tmp_path, "file": tmp_path / "file"}


def test_rebuild_copies_every_node_and_keeps_the_original():
    config = example_configs.large()
    copy = rebuild(config, {"trainer.optimizer.lr": 0.5})
    assert (copy.trainer.optimizer.lr, config.trainer.optimizer.lr) == (0.5, 3e-4)
    assert copy.trainer is not config.trainer
    assert rebuild(config) == config


def test_replaced_values_leave_other_components_alone():
    config = example_configs.large()
    copy = replace_values(config, {"trainer.optimizer.lr": 0.5, "name": "other"})
    assert (copy.trainer.optimizer.lr, copy.name) == (0.5, "other")
    assert config == example_configs.large()
    assert copy.warmup is config.warmup
    with pytest.raises(ValueError, match="lr must be at least 0"):
        replace_values(config, {"trainer.optimizer.lr": -1.0})


@pytest.mark.parametrize("again", [check_fields, lambda config: config.build()])
@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("trainer.optimizer.kind", "fussed", r"kind='fussed': must be 'fused' \| 'foreach'"),
        ("trainer.optimizer.lr", "1e-3", "lr='1e-3': must be float"),
        ("trainer.optimizer.lr", None, "lr=None: must be float"),
        ("trainer.optimizer.betas", (0.9,), r"betas=\(0\.9,\): must be tuple\[float, float\]"),
        ("trainer.optimizer.weight_decay", False, r"weight_decay=False: must be float \| None"),
        ("trainer.optimizer.lr", -2.0, r"lr must be at least 0, got -2\.0"),
        ("trainer.sequence_length", 12.5, r"sequence_length=12\.5: must be int"),
        ("trainer.optimizer", None, r"optimizer=None: must be Optimizer\.Config"),
        (
            "trainer.optimizer",
            example_configs.Warmup.Config(),
            r"optimizer=Warmup\.Config: must be Optimizer\.Config",
        ),
        (
            "trainer.optimizer",
            example_configs.Optimizer,
            r"optimizer=Optimizer \(the class; Optimizer\(\) is an",
        ),
        ("trainer.loss", "clip", "loss='clip': must be"),
        (
            "trainer.loss",
            example_configs.ClipLoss,
            r"loss=ClipLoss \(the class; ClipLoss\(\) is an instance\): must",
        ),
        ("trainer.loss", example_configs.Warmup.Config(), r"loss=Warmup\.Config: must be"),
        ("schedule.0.num_steps", "5", "num_steps='5': must be int"),
        ("trainer.loss", example_configs.ClipLoss(clip_low="0.1"), "clip_low='0.1': must be float"),  # type: ignore[arg-type]
    ],
)
def test_edited_fields_are_validated_again(again, path, value, says):
    config = example_configs.large()
    node, name = path.replace("schedule.0", "schedule").rpartition(".")[::2]
    owner = functools.reduce(getattr, node.split("."), config)
    setattr(owner[0] if isinstance(owner, tuple) else owner, name, value)
    inside = f"{path}." if says.startswith("clip_low") else f"{path.rpartition('.')[0]}."
    with pytest.raises(ConfigError, match=f"^{re.escape(inside)}{says}"):
        again(config)


def test_message_names_the_whole_path_of_its_node():
    with pytest.raises(ConfigError, match=r"^trainer\.optimizer\.max_norm=-2\.0 is below 0$"):
        rebuild(example_configs.tiny(), {"trainer.optimizer.max_norm": -2.0})
    with pytest.raises(ConfigError, match=r"^trainer\.optimizer: weights would grow$"):
        rebuild(example_configs.tiny(), {"trainer.optimizer.weight_decay": -1.0})


def test_post_init_that_rewrites_a_field_is_a_programming_error():
    class Rewriter(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            low: float = 0.2
            high: float = 0.3

            def __post_init__(self) -> None:
                self.high = self.low

    with pytest.raises(TypeError, match=r"Config\.__post_init__ rewrites 'high'"):
        rebuild(Rewriter.Config(), {"high": 0.5})


def test_field_docs_come_from_the_class_and_its_parents():
    docs = read_field_docs(SgdOptimizer.Config)
    assert docs == {"lr": "Peak learning rate.", "momentum": "Momentum of the running mean."}
    assert read_field_docs(Run.Config)["warmup"] == "Supervised start."


class Named(Protocol):
    name: str


UNNAMED = object()
PATH = Path("x")
REFUSED = object()


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (1, int, 1), (True, int, REFUSED), (1.0, int, REFUSED), (1, float, 1.0),
        (True, float, REFUSED),
        (Path("x"), str, REFUSED), ("x", Path, REFUSED), (None, int | None, None),
        (None, int, REFUSED),
        ("a", Literal["a", "b"], "a"), ("c", Literal["a", "b"], REFUSED),
        (1, Literal[True], REFUSED),
        ([1.0, 2], tuple[float, float], (1.0, 2.0)), ((1.0,), tuple[float, float], REFUSED),
        ((1, 2, 3), tuple[int, ...], (1, 2, 3)), ((1, "2"), tuple[int, ...], REFUSED),
        ("ab", tuple[str, ...], REFUSED),
        (["a"], Sequence[Literal["a"]], ["a"]), (["b"], Sequence[Literal["a"]], REFUSED),
        (1, list[int], REFUSED),
        ({"a": 1}, dict[str, int], {"a": 1}), ({"a": "1"}, Mapping[str, int], REFUSED),
        ([1], dict[str, int], REFUSED),
        (UNNAMED, Any, UNNAMED), (UNNAMED, Named, REFUSED), (PATH, Named, PATH),
        (Path, Named, REFUSED),
        ("inf", float, REFUSED),
    ],
)  # fmt: skip
def test_value_is_converted_to_its_type_or_refused(value, annotation, expected):
    if expected is REFUSED:
        with pytest.raises(ValueError, match="is not of type"):
            convert(value, annotation)
    else:
        converted = convert(value, annotation)
        assert (converted, type(converted)) == (expected, type(expected))
