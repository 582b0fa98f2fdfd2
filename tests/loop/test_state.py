import pickle
from pathlib import Path

from rl.loop.state import ATTACHMENT, LoopState, read_loop_state
from rl.rollouts.group import Group
from rl.rollouts.producer import ProducerState
from rl.training.checkpoint_files import SavedState, write_description
from rl.types import LoopPosition

POSITION = LoopPosition(step=3, num_problems=12, outstanding=(7, 9, 11), evaluated=True, num_records=5)


def group(number: int) -> Group:
    return Group(number=number, rollouts=[], scores=[])


def state() -> LoopState:
    return LoopState(
        position=POSITION,
        held=ProducerState(
            finished=((group(9), 5), (group(7), 4)),
            dropped=(("equal", group(8)),),
        ),
        num_empty_steps=2,
        step_of_version={4: 2, 6: 3},
        drawn_with="settings",
        random_states={"controller": b"state"},
    )


def checkpoint(folder: Path, *, attachment: bytes | None, position: LoopPosition | None = POSITION) -> Path:
    saved = SavedState(policy_version=6, model_only=False, position=position)
    write_description(folder, saved, {}, {} if attachment is None else {ATTACHMENT: attachment})
    return folder


def test_a_state_survives_its_checkpoint(tmp_path):
    found = read_loop_state(checkpoint(tmp_path, attachment=pickle.dumps(state())))
    assert found is not None
    assert found.position == POSITION
    assert [(g.number, last) for g, last in found.held.finished] == [(9, 5), (7, 4)]
    assert [(why, g.number) for why, g in found.held.dropped] == [("equal", 8)]
    assert (found.num_empty_steps, found.step_of_version) == (2, {4: 2, 6: 3})
    assert found.random_states == {"controller": b"state"}
    # 7 and 9 are held, so 11 alone is drawn again.
    assert found.to_draw == LoopPosition(
        step=3, num_problems=12, outstanding=(11,), evaluated=True, num_records=5
    )


def test_a_checkpoint_without_the_loops_file_has_only_a_position(tmp_path):
    found = read_loop_state(checkpoint(tmp_path, attachment=None))
    assert found is not None
    assert found.to_draw == found.position == POSITION
    assert found.held.finished == ()


def test_a_file_of_another_version_is_ignored_with_a_warning(tmp_path, caplog):
    other = pickle.dumps({"state": None})
    found = read_loop_state(checkpoint(tmp_path, attachment=other))
    assert found is not None
    assert found.to_draw == POSITION
    assert "finished groups are generated again" in caplog.text
