"""What a run loads before its first step, and what is refused; no tensor is read here."""

from dataclasses import replace

import pytest

from rl.training.checkpoint_config import CheckpointConfig, LoadSource, excluded, find_load_source
from rl.training.checkpoint_files import SavedState, sum_of_file, write_description
from rl.types import LoopPosition


def make_checkpoint(folder, *, step, model_only=False, position=True):
    path = folder / f"step-{step}"
    path.mkdir(parents=True)
    (path / "tensors.distcp").write_bytes(b"tensors")
    state = SavedState(
        policy_version=step,
        model_only=model_only,
        position=LoopPosition(step=step, num_problems=8 * step) if position else None,
    )
    write_description(path, state, {"tensors.distcp": sum_of_file(path / "tensors.distcp")})
    return path


def continuing(path, step):
    position = LoopPosition(step=step, num_problems=8 * step)
    return LoadSource(path=path, model_only=False, in_hf=False, position=position)


def starting(path, *, in_hf=False):
    return LoadSource(path=path, model_only=True, in_hf=in_hf, position=None)


@pytest.fixture
def saved(tmp_path):
    """Steps 2, 4 and 10."""
    return {step: make_checkpoint(tmp_path / "saved", step=step) for step in (2, 4, 10)}


def test_checkpoints_are_due_at_the_interval_the_end_and_where_asked():
    def steps(**fields):
        config = CheckpointConfig(**fields)
        return [step for step in range(11) if config.due(step, last=step == 10)]

    assert steps(interval=4) == [4, 8, 10]
    assert steps(interval=4, enable_first_step_checkpoint=True) == [1, 4, 8, 10]
    assert steps(interval=4, create_seed_checkpoint=True) == [0, 4, 8, 10]
    assert steps() == [10]
    assert steps(interval=1, enable=False) == steps(interval=1, load_only=True) == []


def test_a_hugging_face_folder_ends_a_run_that_saves():
    assert CheckpointConfig().exports
    for off in (
        CheckpointConfig(enable=False),
        CheckpointConfig(load_only=True),
        CheckpointConfig(last_save_in_hf=False),
    ):
        assert not off.exports


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"interval": 0}, "interval=0: must be at least 1"),
        ({"keep_latest_k": 1}, "keep_latest_k=1: .* none to fall back to; must be 0 .all. or at least 2"),
        ({"keep_latest_k": -1}, "keep_latest_k=-1: must be 0"),
        ({"timeout_s": 0.0}, "timeout_s=0.0"),
        ({"timeout_s": float("inf")}, "timeout_s=inf"),
        ({"load_step": -2}, "load_step=-2: must be a step, or -1"),
        ({"folder": "elsewhere"}, "folder='elsewhere': must be 'checkpoints', inside .* or an absolute path"),
        ({"initial_load_in_hf_quantized": True}, "quantized weights cannot be trained on; convert"),
        ({"initial_load_in_hf": True}, "initial_load_in_hf=True: needs initial_load_path"),
        ({"initial_load_model_only": False}, "initial_load_model_only=False: needs initial_load_path"),
        (
            {"initial_load_in_hf": True, "initial_load_path": "x", "initial_load_model_only": False},
            "a Hugging Face folder holds the model alone",
        ),
        ({"exclude_from_loading": ("lr_scheduler",)}, "has no state, .*; exclude train_state"),
        ({"exclude_from_loading": ("",)}, "'' names nothing"),
        ({"load_only": True, "create_seed_checkpoint": True}, "create_seed_checkpoint=True with load_only"),
        ({"load_only": True, "async_mode": "async"}, "async_mode='async' with load_only=True"),
        ({"enable": False, "enable_first_step_checkpoint": True}, "first_step.*=True with enable=False"),
        ({"enable": False, "initial_load_path": "x"}, "path='x' with enable=False: nothing is"),
        ({"enable": False, "load_only": True}, "load_only=True with enable=False: nothing is loaded"),
    ],
)  # fmt: skip
def test_fields_that_contradict_themselves_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        CheckpointConfig(**fields)
    edited = CheckpointConfig()
    for name, value in fields.items():
        setattr(edited, name, value)
    with pytest.raises(ValueError, match=says):
        find_load_source(edited)


def test_names_are_excluded_by_whole_parts_and_patterns():
    assert excluded("model.norm.weight", ("model",))
    assert excluded("model.norm.weight", ("random", "model.norm.weight"))
    assert excluded("model.layers.3.ffn_norm.weight", ("model.layers.*.ffn_norm.weight",))
    assert not excluded("model.normal", ("model.norm",))
    assert not excluded("optimizer.norm.weight.step", ("model",))


def test_a_run_that_asks_for_nothing_loads_nothing(tmp_path):
    assert find_load_source(CheckpointConfig()) is None
    assert find_load_source(CheckpointConfig(enable=False)) is None
    assert find_load_source(CheckpointConfig(folder=str(tmp_path / "empty" / "yet"))) is None


def test_the_latest_of_a_folder_is_loaded_or_the_step_that_is_named(saved, tmp_path):
    asked = CheckpointConfig(initial_load_path=str(tmp_path / "saved"), initial_load_model_only=False)
    assert find_load_source(asked) == continuing(saved[10], 10)
    assert find_load_source(replace(asked, load_step=4)) == continuing(saved[4], 4)
    with pytest.raises(ValueError, match=r"load_step=3: .*/saved has no such step, it has 2, 4, 10"):
        find_load_source(replace(asked, load_step=3))


def test_one_checkpoint_is_loaded_by_its_path(saved):
    asked = CheckpointConfig(initial_load_path=str(saved[4]))
    assert find_load_source(asked) == starting(saved[4])
    assert find_load_source(replace(asked, load_only=True)) == starting(saved[4])
    with pytest.raises(ValueError, match=r"load_step=4: .*step-4 is one checkpoint, not a folder of them"):
        find_load_source(replace(asked, load_step=4))


def test_without_the_data_loader_the_loop_starts_anew(saved):
    asked = CheckpointConfig(
        initial_load_path=str(saved[4]), initial_load_model_only=False, exclude_from_loading=("dataloader",)
    )
    assert find_load_source(asked) == replace(continuing(saved[4], 4), position=None)


def test_a_folder_that_holds_checkpoints_is_continued_whatever_the_initial_path(saved, tmp_path):
    shared = CheckpointConfig(folder=str(tmp_path / "saved"), initial_load_path=str(tmp_path / "nowhere"))
    assert find_load_source(shared) == continuing(saved[10], 10)
    with pytest.raises(ValueError, match="come to the same steps again"):
        find_load_source(replace(shared, exclude_from_loading=("dataloader",)))


@pytest.mark.parametrize("initial_load_path", [None, "saved"])
def test_a_step_of_the_folder_itself_is_loaded_if_it_is_the_latest_or_nothing_is_saved(
    saved, tmp_path, initial_load_path
):
    path = None if initial_load_path is None else str(tmp_path / initial_load_path)
    shared = CheckpointConfig(folder=str(tmp_path / "saved"), initial_load_path=path)
    assert find_load_source(replace(shared, load_step=10)) == continuing(saved[10], 10)
    with pytest.raises(ValueError, match=r"load_step=4: .* holds later steps too \(10\)"):
        find_load_source(replace(shared, load_step=4))
    assert find_load_source(replace(shared, load_step=4, load_only=True)) == continuing(saved[4], 4)
    with pytest.raises(ValueError, match=r"load_step=5: .* it has 2, 4, 10"):
        find_load_source(replace(shared, load_step=5))


def test_the_command_that_started_from_a_step_of_another_folder_continues_its_own(saved, tmp_path):
    asked = CheckpointConfig(
        folder=str(tmp_path / "own"), initial_load_path=str(tmp_path / "saved"), load_step=4
    )
    assert find_load_source(asked) == starting(saved[4])
    for step in (1, 4, 6):  # with such a step of its own, and with later ones
        path = make_checkpoint(tmp_path / "own", step=step)
        assert find_load_source(asked) == continuing(path, step)


def test_the_end_of_an_earlier_run_is_not_overwritten(saved, tmp_path):
    (tmp_path / "saved" / "hf").mkdir()
    shared = CheckpointConfig(folder=str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=r"last_save_in_hf=True: .*/hf is there already"):
        find_load_source(shared)
    assert find_load_source(replace(shared, last_save_in_hf=False)) == continuing(saved[10], 10)


def test_a_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="/file is not a folder that can be written to"):
        find_load_source(CheckpointConfig(folder=str(tmp_path / "file" / "checkpoints")))


def test_a_model_alone_can_be_started_from_and_not_continued(tmp_path):
    path = make_checkpoint(tmp_path, step=3, model_only=True)
    asked = CheckpointConfig(initial_load_path=str(path))
    assert find_load_source(asked) == starting(path)
    with pytest.raises(ValueError, match=r"holds the model alone .*, so it cannot be continued"):
        find_load_source(replace(asked, initial_load_model_only=False))


@pytest.mark.parametrize("fields", [{"load_step": 3}, {"load_only": True}])
def test_loading_without_anything_to_load_is_refused(fields):
    (name,) = fields
    with pytest.raises(ValueError, match=f"{name}=.*: there is no checkpoint to load"):
        find_load_source(CheckpointConfig(**fields))


def test_a_path_to_nothing_or_to_another_kind_is_refused(tmp_path):
    def refused(**fields):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            find_load_source(CheckpointConfig(**fields))
        return str(error.value)

    path = str(tmp_path / "folder")
    assert "folder: there is no such folder" in refused(initial_load_path=path)
    (tmp_path / "folder").mkdir()
    assert "neither a checkpoint nor a folder of step-<n>" in refused(initial_load_path=path)
    (tmp_path / "folder" / "config.json").write_text("{}")
    assert "set initial_load_in_hf" in refused(initial_load_path=path)
    asked = CheckpointConfig(initial_load_path=path, initial_load_in_hf=True)
    assert find_load_source(asked) == starting(tmp_path / "folder", in_hf=True)
    for name, value in (("load_step", 3), ("exclude_from_loading", ("model.norm",))):
        says = refused(initial_load_path=path, initial_load_in_hf=True, **{name: value})
        assert f"{name}=" in says
        assert "initial_load_in_hf=True" in says


def test_a_file_that_is_not_whole_is_named_before_anything_starts(saved):
    tensors = saved[4] / "tensors.distcp"
    tensors.write_bytes(b"tens")
    with pytest.raises(ValueError, match=rf"{tensors} is truncated: it has 4 bytes, 7 were written"):
        find_load_source(CheckpointConfig(initial_load_path=str(saved[4])))
