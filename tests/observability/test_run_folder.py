import json
import os
import re
import subprocess
import sys

import pytest

from rl.observability.run_folder import RunFolder, read_status


def test_new_folder_has_its_parts_and_is_unfinished(tmp_path):
    with RunFolder.create(tmp_path / "a" / "b", "run") as folder:
        assert folder.path == tmp_path / "a" / "b" / "run"
        assert folder.logs.is_dir()
        assert folder.checkpoints.is_dir()
        assert folder.metrics == folder.path / "metrics.jsonl"
        assert read_status(folder.path) == "running"


def test_time_stamp_is_added_to_the_name(tmp_path):
    with RunFolder.create(tmp_path, "tiny", time_stamp=True) as folder:
        assert re.fullmatch(r"tiny-\d{8}-\d{6}", folder.path.name)


def test_finished_folder_is_refused_and_left_as_it_is(tmp_path):
    with RunFolder.create(tmp_path, "run") as folder:
        folder.metrics.write_text("{}\n")
        folder.mark_finished()
    with pytest.raises(ValueError, match=r"holds a finished run.*--overwrite"):
        RunFolder.create(tmp_path, "run")
    assert folder.metrics.read_text() == "{}\n"
    assert read_status(folder.path) == "finished"


def test_unfinished_folder_is_refused_and_said_to_be_unfinished(tmp_path):
    RunFolder.create(tmp_path, "run").close()
    with pytest.raises(ValueError, match=r"holds an unfinished run \(it failed or was killed\)"):
        RunFolder.create(tmp_path, "run")


def test_overwrite_clears_what_a_run_wrote_and_keeps_what_others_put_there(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "weights").write_text("w")
    with RunFolder.create(tmp_path, "run") as folder:
        folder.metrics.write_text("{}\n")
        (folder.logs / "trainer-0.log").write_text("x")
        (folder.path / "nan_batch_version_12.npz").write_bytes(b"batch")
        (folder.path / "collectives_rank1.json").write_text("[]")
        (folder.path / "status.json.tmp").write_text("{")
        (folder.path / "nan_notes.npz").write_bytes(b"mine")
        (folder.path / "notes.txt").write_text("mine")
        folder.checkpoints.rmdir()
        folder.checkpoints.symlink_to(elsewhere)
        folder.mark_finished()
    with RunFolder.create(tmp_path, "run", overwrite=True) as again:
        assert not again.metrics.exists()
        assert list(again.logs.iterdir()) == []
        assert not again.checkpoints.is_symlink()
        assert [file.name for file in again.path.glob("nan*")] == ["nan_notes.npz"]
        assert not (again.path / "collectives_rank1.json").exists()
        assert not (again.path / "status.json.tmp").exists()
        assert (again.path / "notes.txt").read_text() == "mine"
        assert (elsewhere / "weights").read_text() == "w"
        assert read_status(again.path) == "running"


@pytest.mark.parametrize(
    "given", ["checkpoints/hf", "", "../link", "../links", "../run/checkpoints/hf/weights"]
)
def test_what_a_run_starts_from_is_never_cleared(tmp_path, given):
    with RunFolder.create(tmp_path, "run") as folder:
        weights = folder.checkpoints / "hf" / "weights"
        weights.parent.mkdir()
        weights.write_text("w")
    (tmp_path / "link").symlink_to(weights.parent)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "weights").symlink_to(weights)
    inputs = {"hf_assets_path": folder.path / given}
    with pytest.raises(ValueError, match=r"hf_assets_path='.*' lies in the folder of the run.*/run; choose"):
        RunFolder.create(tmp_path, "run", overwrite=True, inputs=inputs)
    assert weights.read_text() == "w"
    assert read_status(folder.path) == "running"
    RunFolder.create(tmp_path, "run-2", overwrite=True, inputs=inputs).close()


def test_an_input_behind_a_link_that_would_be_cleared_is_refused(tmp_path):
    (tmp_path / "big" / "hf").mkdir(parents=True)
    with RunFolder.create(tmp_path, "run") as folder:
        folder.checkpoints.rmdir()
        folder.checkpoints.symlink_to(tmp_path / "big")
    with pytest.raises(ValueError, match="hf_assets_path"):
        RunFolder.create(
            tmp_path, "run", overwrite=True, inputs={"hf_assets_path": folder.checkpoints / "hf"}
        )
    assert folder.checkpoints.is_symlink()


def test_folder_in_use_is_refused_with_the_process_even_with_overwrite(tmp_path):
    with RunFolder.create(tmp_path, "run") as folder:
        folder.metrics.write_text("{}\n")
        for overwrite in (False, True):
            with pytest.raises(ValueError, match=f"in use by process {os.getpid()} on "):
                RunFolder.create(tmp_path, "run", overwrite=overwrite)
        assert folder.metrics.read_text() == "{}\n"
        assert folder.logs.is_dir()


def test_killed_process_frees_the_folder(tmp_path):
    code = (
        "import sys; from rl.observability.run_folder import RunFolder\n"
        f"folder = RunFolder.create({str(tmp_path)!r}, 'run'); print('made', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"made\n"
        with pytest.raises(ValueError, match=f"in use by process {process.pid} "):
            RunFolder.create(tmp_path, "run", overwrite=True)
        process.kill()
    with pytest.raises(ValueError, match="holds an unfinished run"):
        RunFolder.create(tmp_path, "run")
    RunFolder.create(tmp_path, "run", overwrite=True).close()


def test_folder_of_somebody_else_is_refused_even_with_overwrite(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="is not a run's folder"):
        RunFolder.create(tmp_path, "run", overwrite=True)
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_empty_folder_is_taken(tmp_path):
    (tmp_path / "run").mkdir()
    RunFolder.create(tmp_path, "run").close()
    assert (tmp_path / "run" / "logs").is_dir()


def test_dump_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "outputs").write_text("x")
    with pytest.raises(ValueError, match="outputs is not a folder"):
        RunFolder.create(tmp_path / "outputs" / "deeper", "run")
    assert (tmp_path / "outputs").read_text() == "x"


def test_run_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "run").write_text("x")
    with pytest.raises(ValueError, match="run is not a folder"):
        RunFolder.create(tmp_path, "run")


def test_place_that_cannot_be_written_is_refused():
    with pytest.raises(ValueError, match=r"/proc/relay/run cannot be"):
        RunFolder.create("/proc/relay", "run")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a"])
def test_name_that_is_no_folder_name_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="is not a folder name"):
        RunFolder.create(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_refused_copy_without_its_lock_file_stays_without_one(tmp_path):
    with RunFolder.create(tmp_path, "run") as folder:
        folder.mark_finished()
    (folder.path / ".lock").unlink()
    with pytest.raises(ValueError, match="finished run"):
        RunFolder.create(tmp_path, "run")
    assert not (folder.path / ".lock").exists()


def test_discard_removes_the_folders_made_and_no_other_run(tmp_path):
    folder = RunFolder.create(tmp_path / "outputs", "first")
    other = RunFolder.create(tmp_path / "outputs", "second")
    folder.discard()
    assert [entry.name for entry in (tmp_path / "outputs").iterdir()] == ["second"]
    other.discard()
    assert (tmp_path / "outputs").is_dir()  # the first made it, and `second` was in use then

    alone = RunFolder.create(tmp_path / "deep" / "deeper", "run")
    alone.discard()
    assert not (tmp_path / "deep").exists()


def test_status_names_the_process_and_a_broken_one_is_unfinished(tmp_path):
    with RunFolder.create(tmp_path, "run") as folder:
        status = json.loads((folder.path / "status.json").read_text())
        assert (status["status"], status["pid"]) == ("running", os.getpid())
        (folder.path / "status.json").write_text('{"status": "fin')
        assert read_status(folder.path) == "running"


def test_a_run_that_was_killed_is_resumed_with_all_that_is_in_its_folder(tmp_path):
    with RunFolder.create(tmp_path, "run") as folder:
        folder.metrics.write_text("{}\n")
        (folder.checkpoints / "step-2").mkdir()
        (folder.path / "metrics.jsonl.tmp").write_text("half")
        (folder.path / "weights").mkdir()
        (folder.path / "weights" / "v3").write_text("w")
    with RunFolder.resume(folder.path) as again:
        assert (again.metrics, again.checkpoints) == (folder.metrics, folder.checkpoints)
        assert not again.is_finished
        assert (again.path / "weights" / "v3").exists()  # nothing is touched before it goes on
        again.reopen()
        assert not (again.path / "weights").exists()
        assert not (again.path / "metrics.jsonl.tmp").exists()
        assert again.metrics.read_text() == "{}\n"
        assert (again.checkpoints / "step-2").is_dir()
        assert read_status(again.path) == "running"


def test_a_finished_run_is_known_as_such_and_unfinished_once_it_goes_on(tmp_path):
    with RunFolder.create(tmp_path, "run") as folder:
        folder.mark_finished()
    with RunFolder.resume(folder.path) as again:
        assert again.is_finished
        again.reopen()
        assert not again.is_finished


def test_a_folder_that_is_no_runs_is_not_resumed(tmp_path):
    (tmp_path / "notes").mkdir()
    for path in (tmp_path / "notes", tmp_path / "nothing"):
        with pytest.raises(ValueError, match=rf"{path} is not the folder of a run"):
            RunFolder.resume(path)
    assert list((tmp_path / "notes").iterdir()) == []


def test_a_run_that_goes_on_is_not_resumed(tmp_path):
    says = rf"in use by process {os.getpid()} on .*; only a run that has ended can be resumed"
    with RunFolder.create(tmp_path, "run") as folder, pytest.raises(ValueError, match=says):
        RunFolder.resume(folder.path)


def test_a_run_with_its_checkpoints_elsewhere_is_resumed_with_them(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    RunFolder.create(tmp_path, "run", checkpoints=elsewhere).close()
    with RunFolder.resume(tmp_path / "run", checkpoints=elsewhere) as folder:
        folder.reopen()
        assert folder.checkpoints == elsewhere
        assert not (folder.path / "checkpoints").exists()
