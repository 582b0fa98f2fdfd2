import os
import subprocess
import sys

import pytest

from rl.observability.run_folder import SINK_FOLDERS, RunFolder, read_status


def test_new_folder_has_its_parts_and_is_unfinished(tmp_path):
    with RunFolder.create(tmp_path / "a" / "b", "run") as folder:
        assert folder.path == tmp_path / "a" / "b" / "run"
        assert folder.logs.is_dir()
        assert folder.checkpoints.is_dir()
        assert folder.metrics == folder.path / "metrics.jsonl"
        assert read_status(folder.path) == "running"


def test_finished_folder_is_refused_and_left_unchanged(tmp_path):
    with RunFolder.create(tmp_path, "run") as folder:
        folder.metrics.write_text("{}\n")
        folder.mark_finished()
    with pytest.raises(ValueError, match=r"holds a finished run.*--overwrite"):
        RunFolder.create(tmp_path, "run")
    assert folder.metrics.read_text() == "{}\n"
    assert read_status(folder.path) == "finished"


def test_overwrite_clears_only_files_of_runs(tmp_path):
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
        for sink in SINK_FOLDERS:
            (folder.path / sink / "earlier").mkdir(parents=True)
        folder.checkpoints.rmdir()
        folder.checkpoints.symlink_to(elsewhere)
    with RunFolder.create(tmp_path, "run", overwrite=True) as again:
        assert not again.metrics.exists()
        assert list(again.logs.iterdir()) == []
        assert not again.checkpoints.is_symlink()
        assert [file.name for file in again.path.glob("nan*")] == ["nan_notes.npz"]
        assert not (again.path / "collectives_rank1.json").exists()
        assert not (again.path / "status.json.tmp").exists()
        assert not any((again.path / sink).exists() for sink in ("tensorboard", "wandb"))
        assert (again.path / "notes.txt").read_text() == "mine"
        assert (elsewhere / "weights").read_text() == "w"
        assert read_status(again.path) == "running"


@pytest.mark.parametrize(
    "given", ["checkpoints/hf", "", "../link", "../links", "../run/checkpoints/hf/weights"]
)
def test_inputs_of_a_run_are_never_cleared(tmp_path, given):
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


def test_folder_in_use_is_refused_with_the_process_even_with_overwrite(tmp_path):
    with RunFolder.create(tmp_path, "run") as folder:
        folder.metrics.write_text("{}\n")
        for overwrite in (False, True):
            with pytest.raises(ValueError, match=f"in use by process {os.getpid()} on "):
                RunFolder.create(tmp_path, "run", overwrite=overwrite)
        assert folder.metrics.read_text() == "{}\n"
        assert folder.logs.is_dir()


def test_killed_process_releases_the_folder(tmp_path):
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


def test_foreign_folder_is_refused_even_with_overwrite(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="is not a run's folder"):
        RunFolder.create(tmp_path, "run", overwrite=True)
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["thesis.tex"]


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
    assert (tmp_path / "outputs").is_dir()  # `first` created the folder, and `second` was in use

    alone = RunFolder.create(tmp_path / "deep" / "deeper", "run")
    alone.discard()
    assert not (tmp_path / "deep").exists()


def test_killed_run_is_resumed(tmp_path):
    with RunFolder.create(tmp_path, "run") as folder:
        folder.metrics.write_text("{}\n")
        (folder.checkpoints / "step-2").mkdir()
        (folder.path / "metrics.jsonl.tmp").write_text("half")
        (folder.path / "weights").mkdir()
        (folder.path / "weights" / "v3").write_text("w")
    with RunFolder.resume(folder.path) as again:
        assert (again.metrics, again.checkpoints) == (folder.metrics, folder.checkpoints)
        assert not again.is_finished
        assert (again.path / "weights" / "v3").exists()  # resuming changes nothing before the run starts
        again.reopen()
        assert not (again.path / "weights").exists()
        assert not (again.path / "metrics.jsonl.tmp").exists()
        assert again.metrics.read_text() == "{}\n"
        assert (again.checkpoints / "step-2").is_dir()
        assert read_status(again.path) == "running"


def test_running_run_is_not_resumed(tmp_path):
    says = rf"in use by process {os.getpid()} on .*; only a run that has ended can be resumed"
    with RunFolder.create(tmp_path, "run") as folder, pytest.raises(ValueError, match=says):
        RunFolder.resume(folder.path)
