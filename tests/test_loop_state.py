import pickle
from pathlib import Path

import pytest

from rl.loop_state import ATTACHMENT, LoopState, packed, read_loop_state
from rl.rollouts.group import Group
from rl.rollouts.producer import Held
from rl.training.checkpoint_files import DamagedCheckpointError, SavedState, write_description
from rl.types import LoopPosition

POSITION = LoopPosition(step=3, num_problems=12, outstanding=(7, 9, 11), evaluated=True, num_records=5)


def group(number: int) -> Group:
    return Group(number=number, rollouts=[], scores=[], scored=[], generated_at=0.0)


def state() -> LoopState:
    return LoopState(
        position=POSITION,
        held=Held(
            finished=((group(9), 5), (group(7), 4)),
            dropped=(("equal", group(8)),),
            dropped_in_row={"equal": 1},
            num_scored=12,
            failures=("raised",),
        ),
        num_empty_steps=2,
        step_of_version={4: 2, 6: 3},
        drawn_with="settings",
        random_states={"controller": b"state"},
    )


def checkpoint(folder: Path, *, attachment: bytes | None, position: LoopPosition | None = POSITION) -> Path:
    saved = SavedState(policy_version=6, model_only=False, position=position)
    write_description(folder, saved, {}, None if attachment is None else {ATTACHMENT: attachment})
    return folder


def test_it_is_read_from_a_checkpoint_as_it_was_packed(tmp_path):
    found = read_loop_state(checkpoint(tmp_path, attachment=packed(state())))
    assert found is not None
    assert found.position == POSITION
    assert [(g.number, last) for g, last in found.held.finished] == [(9, 5), (7, 4)]
    assert [(why, g.number) for why, g in found.held.dropped] == [("equal", 8)]
    assert (found.held.dropped_in_row, found.held.num_scored) == ({"equal": 1}, 12)
    assert found.held.failures == ("raised",)
    assert (found.num_empty_steps, found.step_of_version) == (2, {4: 2, 6: 3})
    assert found.random_states == {"controller": b"state"}
    # 7 and 9 are held, so 11 alone is drawn again.
    assert found.to_draw == LoopPosition(
        step=3, num_problems=12, outstanding=(11,), evaluated=True, num_records=5
    )


def test_a_checkpoint_without_it_is_gone_on_from_by_its_position_alone(tmp_path):
    found = read_loop_state(checkpoint(tmp_path, attachment=None))
    assert found is not None
    assert found.to_draw == found.position == POSITION
    assert found.held.finished == ()


def test_a_checkpoint_that_no_loop_saved_has_none(tmp_path):
    assert read_loop_state(checkpoint(tmp_path, attachment=None, position=None)) is None


def test_a_file_that_is_no_pickle_is_named(tmp_path):
    with pytest.raises(DamagedCheckpointError, match=rf"{tmp_path}/loop.pickle is corrupted: "):
        read_loop_state(checkpoint(tmp_path, attachment=packed(state())[:-20]))


def test_another_versions_file_is_passed_over_with_a_warning(tmp_path, caplog):
    other = pickle.dumps({"format": 99, "state": None})
    found = read_loop_state(checkpoint(tmp_path, attachment=other))
    assert found is not None
    assert found.to_draw == POSITION
    assert "format 99, this version reads 1): finished groups are drawn again" in caplog.text


def test_groups_of_other_settings_are_left_out_and_drawn_again(caplog):
    assert len(state().fit("settings").held.finished) == 2
    fitted = state().fit("others")
    assert fitted.to_draw == POSITION
    assert fitted.held.dropped == ()
    assert fitted.num_empty_steps == 2
    assert "2 finished groups of the checkpoint were drawn with other settings" in caplog.text
