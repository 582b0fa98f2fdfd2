import datetime
import errno
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from rl.observability.metrics import cut_back
from rl.observability.run_folder import SINK_FOLDERS, RunFolder, read_status
from rl.types import LoopPosition


def test_finished_folder_is_refused_and_left_unchanged(tmp_path):
    with RunFolder.create(tmp_path / "a" / "b", "run") as folder:
        assert folder.path == tmp_path / "a" / "b" / "run"
        assert folder.logs.is_dir()
        assert folder.checkpoints.is_dir()
        assert read_status(folder.path) == "running"
        folder.metrics.write_text("{}\n")
        folder.mark_finished()
    with pytest.raises(ValueError, match=r"holds a finished run.*--overwrite"):
        RunFolder.create(tmp_path / "a" / "b", "run")
    assert folder.metrics.read_text() == "{}\n"
    assert read_status(folder.path) == "finished"


def test_overwrite_clears_only_files_of_runs(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "weights").write_text("w")
    written = (
        *("metrics.jsonl", "metrics.jsonl.old", "status.json.tmp", "logs/trainer-0.log"),
        *("nan_batch_version_12.npz", "collectives_rank1.json"),
    )
    with RunFolder.create(tmp_path, "run") as folder:
        for name in (*written, "nan_notes.npz", "notes.txt"):
            (folder.path / name).write_text("mine")
        for sink in SINK_FOLDERS:
            (folder.path / sink / "earlier").mkdir(parents=True)
        folder.checkpoints.rmdir()
        folder.checkpoints.symlink_to(elsewhere)
    with RunFolder.create(tmp_path, "run", overwrite=True) as again:
        left = {path.relative_to(again.path).as_posix() for path in again.path.rglob("*")}
        assert left == {".lock", "status.json", "checkpoints", "logs", "nan_notes.npz", "notes.txt"}
        assert not again.checkpoints.is_symlink()
        assert (again.path / "notes.txt").read_text() == "mine"
        assert (elsewhere / "weights").read_text() == "w"
        assert read_status(again.path) == "running"


@pytest.mark.parametrize(
    "given", ["checkpoints/hf", "", "../link", "../run/checkpoints/hf/weights"]
)
def test_inputs_of_a_run_are_never_cleared(tmp_path, given):
    with RunFolder.create(tmp_path, "run") as folder:
        weights = folder.checkpoints / "hf" / "weights"
        weights.parent.mkdir()
        weights.write_text("w")
    (tmp_path / "link").symlink_to(weights.parent)
    inputs = {"hf_assets_path": folder.path / given}
    with pytest.raises(
        ValueError, match=r"hf_assets_path='.*' lies in the folder of the run.*/run; choose"
    ):
        RunFolder.create(tmp_path, "run", overwrite=True, inputs=inputs)
    assert weights.read_text() == "w"
    assert read_status(folder.path) == "running"
    RunFolder.create(tmp_path, "run-2", overwrite=True, inputs=inputs).close()


def test_killed_process_releases_the_folder(tmp_path):
    code = (
        "import sys; from rl.observability.run_folder import RunFolder\n"
        f"folder = RunFolder.create({str(tmp_path)!r}, 'run'); print('made', flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"made\n"
        for overwrite in (False, True):
            with pytest.raises(ValueError, match=f"in use by process {process.pid} on "):
                RunFolder.create(tmp_path, "run", overwrite=overwrite)
        process.kill()
    with pytest.raises(ValueError, match="holds an unfinished run"):
        RunFolder.create(tmp_path, "run")
    RunFolder.create(tmp_path, "run", overwrite=True).close()


OF_A_PERSON: tuple[dict[str, str], ...] = (
    {"thesis.tex": "x"},
    {".lock": "", "checkpoints/step-5/weights": "x"},
    {".lock": "", "checkpoints/hf/model.safetensors": "x"},
    {".lock": "", "metrics.jsonl": "{}"},
    {".lock": "", "rollouts.jsonl": "{}", "config.json": "{}", "logs/a.log": "x"},
    {".lock": "", "thesis.tex": "x"},
    {"status.json": '{"build": "green"}', "logs/a.log": "x"},  # of another program
    {"status.json": "green", "checkpoints/a": "x"},
)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("files", OF_A_PERSON, ids=str)
def test_folder_that_is_not_a_runs_is_refused_and_unchanged(tmp_path, files, overwrite):
    for name, text in files.items():
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text(text)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="exists and is not a run's folder"):
        RunFolder.create(tmp_path, "run", overwrite=overwrite)
    assert sorted(tmp_path.rglob("*")) == before
    assert {name: (tmp_path / "run" / name).read_text() for name in files} == files


def test_links_and_pipes_in_place_of_a_runs_files_are_no_run_and_stay(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("x")
    for name, made in (
        ("checkpoints", mine),
        (".lock", mine / "thesis.tex"),
        ("status.json", None),
    ):
        path = tmp_path / f"run-{name}"
        path.mkdir()
        (path / name).symlink_to(made) if made else os.mkfifo(path / name)
        with pytest.raises(ValueError, match="is not a run's folder"):
            RunFolder.create(tmp_path, path.name, overwrite=True)
    with RunFolder.create(tmp_path, "run") as folder:
        pass
    (folder.path / ".lock").unlink()
    (folder.path / ".lock").symlink_to(mine / "thesis.tex")
    for use in (
        lambda: RunFolder.create(tmp_path, "run", overwrite=True),
        lambda: RunFolder.resume(folder.path),
    ):
        with pytest.raises(
            ValueError, match=r"run/\.lock is not a regular file: .* cannot be locked"
        ):
            use()
    assert (mine / "thesis.tex").read_text() == "x"


def test_start_that_was_killed_at_once_blocks_no_later_one(tmp_path):
    path = tmp_path / "run"
    for name in ("logs", "checkpoints"):
        (path / name).mkdir(parents=True)
    for name in (".lock", "status.json.tmp"):
        (path / name).write_text("half")
    RunFolder.create(tmp_path, "run").close()
    with pytest.raises(
        ValueError,
        match=r"holds an unfinished run without config\.json; choose another name, or --ov",
    ):
        RunFolder.create(tmp_path, "run")
    RunFolder.create(tmp_path, "run", overwrite=True).close()


def test_run_is_never_replaced_through_a_link_of_another_run(tmp_path):
    with RunFolder.create(tmp_path, "try-3") as folder:
        folder.metrics.write_text("{}\n")
    (tmp_path / "latest").symlink_to(folder.path)
    says = (
        f"latest is a link to the folder of another run, {folder.path}, which --overwrite "
        "would replace"
    )
    with pytest.raises(ValueError, match=says):
        RunFolder.create(tmp_path, "latest", overwrite=True)
    assert folder.metrics.read_text() == "{}\n"
    (tmp_path / "big-disk").mkdir()
    (tmp_path / "new").symlink_to(tmp_path / "big-disk")
    with RunFolder.create(tmp_path, "new"):
        assert read_status(tmp_path / "big-disk") == "running"


def test_run_whose_own_folder_is_a_link_to_a_bigger_disk_is_replaced_there(tmp_path):
    for link in (tmp_path / "outputs", tmp_path / "outputs" / "run"):
        (disk := tmp_path / f"disk-{link.name}" / "any").mkdir(parents=True)
        link.symlink_to(disk)
    for is_again in (False, True):
        with RunFolder.create(tmp_path / "outputs", "run", overwrite=is_again) as folder:
            assert list(disk.glob("metrics.jsonl")) == []
            folder.metrics.write_text("{}\n")
    assert folder.path.is_symlink()


def test_refusal_is_told_on_a_file_system_that_keeps_the_names_of_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "rmdir", fail_to_remove)
    inside = {"policy.hf_path": tmp_path / "run" / "model"}
    with pytest.raises(ValueError, match="lies in the folder"):
        RunFolder.create(tmp_path, "run", inputs=inside)
    RunFolder.create(tmp_path, "run").close()


def fail_to_remove(path, **_):
    raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))


def test_folder_names_are_unique_after_the_clock_is_set_back(tmp_path):
    times = (datetime.datetime(2026, 3, 29, hour) for hour in (14, 9, 14, 9, 14))
    paths = []
    for _ in range(5):
        with RunFolder.create(
            tmp_path, "run", time_stamp=True, wall_clock=lambda: next(times)
        ) as folder:
            folder.mark_finished()
            paths.append(folder.path.name)
    late, early = "run-20260329-140000", "run-20260329-090000"
    assert paths == [late, early, f"{late}-2", f"{early}-2", f"{late}-3"]


@pytest.mark.parametrize("time_stamp", [False, True])
def test_runs_that_start_at_once_never_share_or_remove_a_folder(tmp_path, time_stamp):
    start = threading.Barrier(8)

    def create(_):
        start.wait()
        with suppress(ValueError):
            return RunFolder.create(
                tmp_path,
                "run",
                time_stamp=time_stamp,
                wall_clock=lambda: datetime.datetime(2026, 3, 29),
            )

    with ThreadPoolExecutor(8) as threads:
        made = [folder for folder in threads.map(create, range(8)) if folder is not None]
    first = "run-20260329-000000" if time_stamp else "run"
    others = [f"{first}-{number}" for number in range(2, 9)] if time_stamp else []
    assert sorted(folder.path.name for folder in made) == [first, *others]
    assert all(read_status(folder.path) == "running" for folder in made)
    for folder in made:
        folder.close()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a"])
def test_invalid_folder_name_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="is not a folder name"):
        RunFolder.create(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_discard_removes_only_new_folders(tmp_path):
    folder = RunFolder.create(tmp_path / "outputs", "first")
    other = RunFolder.create(tmp_path / "outputs", "second")
    folder.discard()
    assert [entry.name for entry in (tmp_path / "outputs").iterdir()] == ["second"]
    other.discard()
    assert list((tmp_path / "outputs").iterdir()) == []


def test_killed_run_is_resumed_but_not_a_running_one(tmp_path):
    says = rf"in use by process {os.getpid()} on .*; only a run that has ended can be resumed"
    with RunFolder.create(tmp_path, "run") as folder:
        with pytest.raises(ValueError, match=says):
            RunFolder.resume(folder.path)
        folder.metrics.write_text("{}\n")
        (folder.checkpoints / "step-2").mkdir()
        (folder.path / "metrics.jsonl.tmp").write_text("half")
        (folder.path / "weights" / "v3").mkdir(parents=True)
        (folder.path / "weights" / "v3" / "rank0.bin").write_text("w")
    with RunFolder.resume(folder.path) as again:
        assert (again.metrics, again.checkpoints) == (folder.metrics, folder.checkpoints)
        assert not again.is_finished
        assert (
            again.path / "weights" / "v3"
        ).exists()  # resuming changes nothing before the run starts
        again.resume_writing()
        assert not (again.path / "weights").exists()
        (again.path / "weights" / "mine").mkdir(parents=True)
        again.resume_writing()
        assert (again.path / "weights" / "mine").exists()
        assert not (again.path / "metrics.jsonl.tmp").exists()
        assert again.metrics.read_text() == "{}\n"
        assert (again.checkpoints / "step-2").is_dir()
        assert read_status(again.path) == "running"


# Records of a run that continues from a checkpoint


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
        cut_back(
            metrics=tmp_path / "metrics.jsonl",
            rollouts=tmp_path / "rollouts.jsonl",
            position=position,
        )
        assert {p.name for p in tmp_path.iterdir() if ".old" not in p.name} <= set(
            files
        )  # no temporary file
        return [
            (tmp_path / name).read_text() if (tmp_path / name).exists() else "" for name in files
        ]

    return act


WRITTEN = ((0, "eval"), (1, "step"), (2, "step"), (2, "eval"), (3, "step"))


@pytest.mark.parametrize(
    ("position", "num_left"),
    [(at(2), 4), (at(2, evaluated=False), 3), (at(1), 2), (at(3), 5), (at(0), 1), (None, 0)],
)
def test_records_after_the_checkpoint_are_removed(cut, position, num_left):
    metrics, *_ = cut(metrics=metrics_of(*WRITTEN), position=position)
    assert metrics == metrics_of(*WRITTEN[:num_left])


def test_records_of_a_run_that_starts_again_are_kept_under_another_name(cut, tmp_path, caplog):
    for steps in (WRITTEN, WRITTEN[:2]):
        assert cut(metrics=metrics_of(*steps), older=rollouts_of(*steps), position=None) == [
            "",
            "",
            "",
        ]
        assert (tmp_path / "metrics.jsonl.old").read_text() == metrics_of(*steps)
        assert (tmp_path / "rollouts.1.jsonl.old").read_text() == rollouts_of(*steps)
        assert "its earlier metrics.jsonl is now metrics.jsonl.old" in caplog.text


def test_damaged_lines_and_a_truncated_last_line_are_removed(cut, caplog):
    first, second = metrics_of((1, "step")), metrics_of((2, "step"))
    metrics, *_ = cut(
        metrics=f'{first}\0\0\0\n{second}{{"step": 1, "eval/cor', position=at(2, num_records=3)
    )
    assert metrics == first + second
    assert "has 2 lines up to step 2, but 3 were written: some are lost" in caplog.text
    assert r"removed a damaged line: b'\x00\x00\x00" in caplog.text


def test_rollouts_are_truncated_in_both_files(cut):
    older = rollouts_of((0, "eval"), (1, "train"), (1, "dropped"))
    kept = rollouts_of((2, "train"), (2, "dropped"))
    later = rollouts_of((2, "eval"), (2, "eval_sampled"), (3, "train"), (3, "pending"))
    _, rollouts, before = cut(rollouts=kept + later, older=older, position=at(2, evaluated=False))
    assert (rollouts, before) == (kept, older)
    _, rollouts, before = cut(rollouts=kept + later, older=older, position=at(0))
    assert (rollouts, before) == ("", rollouts_of((0, "eval")))
