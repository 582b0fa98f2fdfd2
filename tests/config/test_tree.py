import dataclasses
from dataclasses import dataclass
from pathlib import Path

import pytest

from rl.config.configurable import Configurable
from rl.config.tree import (
    ConfigError,
    check_fields,
    field_docs,
    input_paths,
    rebuild,
    walk,
    with_value,
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
    assert [path for path in kinds if "." not in path] == [f.name for f in dataclasses.fields(Run.Config)]


def test_input_paths_are_the_fields_that_name_something_that_is_there(tmp_path):
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
        reference=Reference(folder=str(tmp_path)), file=tmp_path / "file", missing=str(tmp_path / "no")
    )
    assert input_paths(root) == {"reference.folder": tmp_path, "file": tmp_path / "file"}


def test_rebuild_copies_every_node_and_keeps_the_original():
    config = example_configs.large()
    copy = rebuild(config, {"trainer.optimizer.lr": 0.5})
    assert (copy.trainer.optimizer.lr, config.trainer.optimizer.lr) == (0.5, 3e-4)
    assert copy.trainer is not config.trainer
    assert rebuild(config) == config


def test_one_changed_value_is_the_same_config_as_a_rebuilt_one_and_copies_only_what_holds_it():
    config = example_configs.large()
    for path, value in (("trainer.optimizer.lr", 0.5), ("schedule.1.num_steps", 9), ("warmup", None)):
        changed = with_value(config, path, value)
        assert changed == rebuild(config, {path: value})
        assert changed.spec is config.spec
    assert with_value(config, "trainer.optimizer.lr", 0.5).trainer.loss is config.trainer.loss
    assert config == example_configs.large()


@pytest.mark.parametrize(
    ("path", "value"),
    [("trainer.optimizer.lr", -1.0), ("trainer.sequence_length", 2000), ("schedule.0.num_steps", "many")],
)
def test_one_changed_value_is_refused_in_the_words_of_a_rebuilt_config(path, value):
    with pytest.raises(ConfigError) as whole:
        rebuild(example_configs.large(), {path: value})
    with pytest.raises(ConfigError) as one:
        with_value(example_configs.large(), path, value)
    assert str(one.value) == str(whole.value)


def test_rebuild_validates_what_a_registry_function_edited():
    config = example_configs.tiny()
    config.trainer.optimizer.lr = -2.0
    with pytest.raises(ConfigError, match=r"trainer\.optimizer: lr must be at least 0, got -2\.0"):
        rebuild(config)


@pytest.mark.parametrize("again", [rebuild, check_fields, lambda config: config.build()])
@pytest.mark.parametrize(
    ("component", "field", "value", "says"),
    [
        ("optimizer", "kind", "fussed", r"optimizer: kind='fussed': must be 'fused' \| 'foreach'"),
        ("optimizer", "lr", "1e-3", r"optimizer: lr='1e-3': must be float"),
        ("optimizer", "lr", None, r"optimizer: lr=None: must be float"),
        ("optimizer", "betas", (0.9,), r"optimizer: betas=\(0\.9,\): must be tuple\[float, float\]"),
        ("optimizer", "weight_decay", False, r"optimizer: weight_decay=False: must be float \| None"),
        ("optimizer", "lr", -2.0, r"optimizer: lr must be at least 0, got -2\.0"),
        ("", "sequence_length", 12.5, r"sequence_length=12\.5: must be int"),
        ("", "compile_model", 1, r"compile_model=1: must be bool"),
        ("", "precision", "FULL", r"precision='FULL': must be Precision"),
        ("", "optimizer", None, r"optimizer=None: must be Optimizer\.Config"),
    ],
)
def test_what_a_registry_function_misspelt_is_refused_wherever_it_is_read(
    again, component, field, value, says
):
    config = example_configs.large().trainer
    setattr(getattr(config, component) if component else config, field, value)
    with pytest.raises(ConfigError, match=f"^{says}"):
        again(config)


def test_fields_are_checked_below_sequences_and_losses_too():
    config = example_configs.large()
    config.schedule[0].num_steps = "5"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"^schedule\.0: num_steps='5': must be int"):
        check_fields(config)
    config = example_configs.large()
    config.trainer.loss = example_configs.ClipLoss(clip_low="0.1")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^trainer\.loss: clip_low='0\.1': must be float"):
        check_fields(config)


def test_message_that_names_its_own_node_gets_the_rest_of_the_path():
    @dataclass(kw_only=True, slots=True)
    class Sampling:
        top_p: float = 1.0

        def __post_init__(self) -> None:
            if self.top_p > 1:
                raise ValueError(f"sampling.top_p={self.top_p} is above 1")

    @dataclass(kw_only=True, slots=True)
    class Loop:
        sampling: Sampling

    @dataclass(kw_only=True, slots=True)
    class Root:
        loop: Loop

    root = Root(loop=Loop(sampling=Sampling()))
    with pytest.raises(ConfigError, match=r"^loop\.sampling\.top_p=2\.0 is above 1$"):
        rebuild(root, {"loop.sampling.top_p": 2.0})


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
    docs = field_docs(SgdOptimizer.Config)
    assert docs == {"lr": "Peak learning rate.", "momentum": "Of the running mean of gradients."}
    assert field_docs(Run.Config)["warmup"] == "Supervised start."


def test_field_docs_of_a_class_made_at_run_time_are_empty():
    class Fresh(Configurable):
        pass

    assert field_docs(Fresh.Config) == {}
