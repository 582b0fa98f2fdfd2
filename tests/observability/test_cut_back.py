import json

import pytest

from rl.observability.run_folder import cut_back
from rl.types import LoopPosition


def at(step: int, *, evaluated: bool = True, num_records: int = 0) -> LoopPosition:
    return LoopPosition(step=step, num_problems=0, evaluated=evaluated, num_records=num_records)


def metrics_of(*records: tuple[int, str]) -> str:
    """Return the records of steps, or of evaluations as "eval"."""
    keys = {"step": "reward/mean", "eval": "eval/correct"}
    return "".join(json.dumps({"step": step, keys[kind]: 0.5}) + "\n" for step, kind in records)


def rollouts_of(*records: tuple[int, str]) -> str:
    hard = {"set": 'held "kind": "train"'}
    lines = (
        {"step": step, **(hard if "eval" in kind else {}), "kind": kind, "reply": "{}"}
        for step, kind in records
    )
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def cut(tmp_path):
    """Return a function that cuts back files with the given content and returns the rest."""

    def act(
        *, metrics: str = "", rollouts: str = "", older: str = "", position: LoopPosition | None
    ) -> list[str]:
        files = {"metrics.jsonl": metrics, "rollouts.jsonl": rollouts, "rollouts.1.jsonl": older}
        for name, text in files.items():
            if text:
                (tmp_path / name).write_text(text)
        cut_back(metrics=tmp_path / "metrics.jsonl", rollouts=tmp_path / "rollouts.jsonl", position=position)
        assert {p.name for p in tmp_path.iterdir()} <= set(files)  # no temporary file
        return [(tmp_path / name).read_text() if (tmp_path / name).exists() else "" for name in files]

    return act


WRITTEN = ((0, "eval"), (1, "step"), (2, "step"), (2, "eval"), (3, "step"))


@pytest.mark.parametrize(
    ("position", "num_left"),
    [(at(2), 4), (at(2, evaluated=False), 3), (at(1), 2), (at(3), 5), (at(0), 1), (None, 0)],
)
def test_records_after_the_checkpoint_are_removed(cut, position, num_left):
    metrics, *_ = cut(metrics=metrics_of(*WRITTEN), position=position)
    assert metrics == metrics_of(*WRITTEN[:num_left])


def test_damaged_lines_and_a_truncated_last_line_are_removed(cut, caplog):
    first, second = metrics_of((1, "step")), metrics_of((2, "step"))
    metrics, *_ = cut(metrics=f'{first}\0\0\0\n{second}{{"step": 1, "eval/cor', position=at(2))
    assert metrics == first + second
    assert r"removed a damaged line: b'\x00\x00\x00" in caplog.text


def test_rollouts_are_truncated_in_both_files(cut):
    older = rollouts_of((0, "eval"), (1, "train"), (1, "dropped"))
    kept = rollouts_of((2, "train"), (2, "dropped"))
    later = rollouts_of((2, "eval"), (2, "eval_sampled"), (3, "train"), (3, "pending"))
    _, rollouts, before = cut(rollouts=kept + later, older=older, position=at(2, evaluated=False))
    assert (rollouts, before) == (kept, older)
    _, rollouts, before = cut(rollouts=kept + later, older=older, position=at(0))
    assert (rollouts, before) == ("", rollouts_of((0, "eval")))


def test_missing_lines_are_logged(cut, caplog):
    cut(metrics=metrics_of((1, "step")), position=at(2, num_records=3))
    assert "has 1 lines up to step 2, but 3 were written: some are lost" in caplog.text
    caplog.clear()
    cut(metrics=metrics_of(*WRITTEN), position=at(2, num_records=4))
    assert caplog.text == ""


def test_files_without_kept_lines_can_be_set_aside(tmp_path):
    metrics, rollouts = tmp_path / "metrics.jsonl", tmp_path / "rollouts.jsonl"
    metrics.write_text(metrics_of(*WRITTEN))
    rollouts.write_text(rollouts_of((1, "train")))
    cut_back(metrics=metrics, rollouts=rollouts, position=None, keep_old=True)
    assert {p.name for p in tmp_path.iterdir()} == {"metrics.before.jsonl", "rollouts.before.jsonl"}
    assert (tmp_path / "metrics.before.jsonl").read_text() == metrics_of(*WRITTEN)
    metrics.write_text(metrics_of((1, "step")))
    cut_back(metrics=metrics, rollouts=rollouts, position=None)
    assert not metrics.exists()
