import pytest

from rl.training.checkpoint_config import CheckpointConfig, LoadSource, find_load_source
from rl.training.checkpoint_files import SavedState, saved_steps, sum_of_file, write_description
from rl.training.own_checkpoint import own_checkpoint
from rl.types import LoopPosition


def save(folder, step, *, model_only=False, position=True):
    path = folder / f"step-{step}"
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"tensors of a step")
    at = LoopPosition(step=step, num_problems=8 * step) if position else None
    state = SavedState(policy_version=step, model_only=model_only, position=at, started_from="/start")
    write_description(
        path, state, {"__0_0.distcp": sum_of_file(path / "__0_0.distcp")}, {"loop.pickle": b"p"}
    )
    return path


def truncate(file):
    file.write_bytes(file.read_bytes()[:-3])


def flip(file):
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)


def test_the_latest_is_gone_on_from_whole_whatever_is_excluded(tmp_path):
    assert own_checkpoint(tmp_path / "none", num_steps=9) is None
    save(tmp_path, 2)
    path = save(tmp_path, 4)
    assert own_checkpoint(tmp_path, num_steps=9) == LoadSource(
        path=path,
        model_only=False,
        in_hf=False,
        position=LoopPosition(step=4, num_problems=32),
        started_from="/start",
        whole=True,
    )


@pytest.mark.parametrize(
    ("damage", "name", "says"),
    [
        (truncate, "__0_0.distcp", "__0_0.distcp is truncated: it has 14 bytes, 17 were written"),
        (truncate, "manifest.json", "manifest.json is corrupted"),
        (flip, "loop.pickle", "loop.pickle is corrupted: its crc32 is"),
        (flip, "state.json", "state.json is corrupted: its crc32 is"),
        (lambda file: file.unlink(), "state.json", "state.json is missing"),
    ],
)
def test_a_damaged_one_is_set_aside_with_a_word_and_the_one_before_is_taken(
    tmp_path, caplog, damage, name, says
):
    before = save(tmp_path, 2)
    damage(save(tmp_path, 4) / name)
    source = own_checkpoint(tmp_path, num_steps=9)
    assert source is not None
    assert source.path == before
    assert list(saved_steps(tmp_path)) == [2]
    assert (tmp_path / "step-4.damaged").is_dir()
    (record,) = caplog.records
    assert says in record.message
    assert record.message.endswith("set aside as step-4.damaged, and an earlier one is taken")


def test_where_all_are_damaged_there_is_none(tmp_path):
    for step in (2, 4):
        truncate(save(tmp_path, step) / "__0_0.distcp")
    assert own_checkpoint(tmp_path, num_steps=9) is None
    assert saved_steps(tmp_path) == {}


def test_a_last_one_of_the_model_alone_ends_a_run_and_continues_none(tmp_path):
    save(tmp_path, 4, model_only=True)
    source = own_checkpoint(tmp_path, num_steps=4)
    assert source is not None
    assert source.model_only
    with pytest.raises(ValueError, match=r"step-4 holds the model alone .* move it away"):
        own_checkpoint(tmp_path, num_steps=5)


def test_more_steps_than_the_run_is_to_have_are_refused(tmp_path):
    save(tmp_path, 4)
    with pytest.raises(ValueError, match=r"loop.num_steps=3: .*step-4 has done 4 steps already"):
        own_checkpoint(tmp_path, num_steps=3)


def test_one_that_no_loop_saved_is_refused(tmp_path):
    save(tmp_path, 4, position=False)
    with pytest.raises(ValueError, match="was not saved by a loop"):
        own_checkpoint(tmp_path, num_steps=9)


def test_a_start_from_a_shared_folder_takes_the_one_before_a_damaged_one_and_a_dry_run_touches_none(tmp_path):
    config = CheckpointConfig(folder=str(tmp_path), last_save_in_hf=False)
    before = save(tmp_path, 2)
    truncate(save(tmp_path, 4) / "__0_0.distcp")
    with pytest.raises(ValueError, match="is truncated"):
        find_load_source(config)
    assert list(saved_steps(tmp_path)) == [2, 4]
    source = find_load_source(config, repairs=True)
    assert source is not None
    assert (source.path, source.whole) == (before, False)
    assert list(saved_steps(tmp_path)) == [2]


def test_a_damaged_checkpoint_that_is_asked_for_by_its_step_is_refused_not_replaced(tmp_path):
    config = CheckpointConfig(folder=str(tmp_path), load_step=4, last_save_in_hf=False)
    save(tmp_path, 2)
    truncate(save(tmp_path, 4) / "__0_0.distcp")
    with pytest.raises(ValueError, match="is truncated"):
        find_load_source(config, repairs=True)
    assert list(saved_steps(tmp_path)) == [2, 4]
