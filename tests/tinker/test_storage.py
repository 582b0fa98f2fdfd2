"""Checkpoints on disk: whole or absent, across restarts, and visible to their owner only."""

import asyncio
import errno
import itertools
import os
import shutil
import threading
from pathlib import Path
from unittest import mock

import pytest

from rl.tinker.service.service import Ttl
from rl.tinker.service.storage import _run_in_thread, parse_path
from rl.tinker.types import InvalidRequestError, NotFoundError, UnsavedError
from tests.support.fake_tinker import YOU, running_service, service_test, settled

pytestmark = pytest.mark.anyio


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


MODEL = "0123abcd-0000-0000-0000-000000000000:train:1"


@pytest.mark.parametrize(
    "path",
    [
        "tinker://../weights/step-1",
        "tinker://..:train:1/weights/step-1",
        f"tinker://{MODEL}/weights/..",
        f"tinker://{MODEL}/sampler_weights/.hidden",
    ],
)
def test_path_that_leaves_its_folder_names_no_checkpoint(path):
    with pytest.raises(NotFoundError, match="there is no checkpoint"):
        parse_path(path)


async def test_checkpoint_is_found_after_a_restart_by_its_owner_only(tmp_path):
    async with running_service(tmp_path) as client:
        path = await client.saved(await client.trained(), 3, "step-1", user_metadata={"a": "b"})
    async with running_service(tmp_path) as client:
        assert await client.loaded_weight(path) == -5
        (_, run) = (await client.runs("list_training_runs", offset=0, limit=9)).training_runs
        assert (run.last_checkpoint.tinker_path, run.last_checkpoint.user_metadata) == (
            path,
            {"a": "b"},
        )
        assert path == f"tinker://{run.training_run_id}/weights/step-1"
        assert (await client.runs("get_weights_info", path)).lora_rank == 4
        run_id, stranger = run.training_run_id, client.of(YOU)
        with pytest.raises(NotFoundError, match="there is no checkpoint"):
            stranger.load(path, session_id=stranger.session(), model_seq_id=0)
        for call in (
            stranger.runs("get_weights_info", path),
            stranger.runs("delete_checkpoint", run_id, "weights", "step-1"),
            stranger.runs("set_ttl", run_id, "weights", "step-1", Ttl(ttl_seconds=5)),
            stranger.runs("get_training_run", run_id),
            stranger.runs("list_checkpoints_of_run", run_id),
        ):
            with pytest.raises(NotFoundError):
                await call


@service_test(virtual=False)
async def test_taken_name_is_refused_or_overwritten_as_requested(client):
    model = await client.trained()
    path = await client.saved(model, 3, "final", user_metadata={"first": "1"})
    client.add(model, 4, 1)
    client.step(model, 5)
    assert "exists already" in (await client.failure(client.save(model, 6, "final"))).error
    assert await client.loaded_weight(path) == -5
    assert await client.saved(model, 7, "final", overwrite=True) == path
    assert await client.loaded_weight(path) == -6
    before = files(client.folder)
    client.backend.fail("save_model", OSError("disk full"))
    assert (
        await client.failure(client.save(model, 8, "final", overwrite=True))
    ).category == "server"
    assert files(client.folder) == before
    (kept,) = (await client.runs("list_checkpoints_of_run", model)).checkpoints
    assert kept.user_metadata is None
    assert len([file for file in files(client.folder) if file.endswith("weight.json")]) == 1
    record = client.folder / model.replace(":", ".") / "weights" / "blocked.json"
    record.mkdir()
    assert (await client.failure(client.save(model, 9, "blocked"))).category == "server"
    assert files(client.folder) == before


@service_test(virtual=False)
async def test_client_is_told_that_the_disk_is_full(client):
    model = await client.trained()
    path = await client.saved(model, 3, "kept")
    before = files(client.folder)
    client.backend.fail("save_model", UnsavedError("No space left on device"))
    of_trainer = await client.failure(client.save(model, 4, "first"))

    def full(descriptor):
        raise OSError(errno.EDQUOT, "Disk quota exceeded", "/secret/path")

    with mock.patch.object(os, "fsync", full):
        of_server = await client.failure(client.save(model, 5, "second"))
        with pytest.raises(UnsavedError, match=r"refused it \(Disk quota exceeded\)") as of_call:
            await client.runs("set_ttl", model, "weights", "kept", Ttl(ttl_seconds=5))
    assert of_call.value.status == 507
    assert [(one.category, "No space left" in one.error) for one in (of_trainer, of_server)] == [
        ("server", True),
        ("server", False),
    ]
    assert "Disk quota exceeded" in of_server.error
    assert "secret" not in of_server.error
    assert files(client.folder) == before
    assert await client.loaded_weight(path) == -5


async def test_kill_before_the_record_is_replaced_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    folder, killed, replace = tmp_path / "storage", tmp_path / "killed", Path.replace

    def copy_and_replace(path, target):
        if target.name == "final.json":
            shutil.copytree(folder, killed)
        return replace(path, target)

    async with running_service(folder) as client:
        model = await client.trained()
        path = await client.saved(model, 3, "final")
        client.add(model, 4, 1)
        client.step(model, 5)
        monkeypatch.setattr(Path, "replace", copy_and_replace)
        await client.saved(model, 6, "final", overwrite=True)
        assert await client.loaded_weight(path) == -6
    async with running_service(killed) as client:
        assert await client.loaded_weight(path) == -5


async def test_checkpoint_expires_in_time_with_its_files(tmp_path):
    time_s = [1_000.0]
    async with running_service(tmp_path, wall_time_s=lambda: time_s[0]) as client:
        model = await client.trained()
        names = ("short", "long", "kept")
        short, *_ = [
            await client.saved(model, 3 + i, name, ttl_seconds=100) for i, name in enumerate(names)
        ]
        for name, ttl in (("long", 500), ("kept", None)):
            await client.runs("set_ttl", model, "weights", name, Ttl(ttl_seconds=ttl))
        time_s[0] = 1_100
        with pytest.raises(NotFoundError):
            await client.runs("get_weights_info", short)
        left = (await client.runs("list_checkpoints_of_run", model)).checkpoints
        ends = {one.checkpoint_id: one.expires_at and one.expires_at.timestamp() for one in left}
        assert ends == {"weights/long": 1_500, "weights/kept": None}
        assert await client.saved(model, 6, "short") == short  # the name is free again
    time_s[0] = 1_501
    async with running_service(tmp_path, wall_time_s=lambda: time_s[0]) as client:
        found = (await client.runs("list_checkpoints_of_run", model)).checkpoints
        assert {one.checkpoint_id for one in found} == {"weights/short", "weights/kept"}
        assert not any("long" in file for file in files(tmp_path))


async def test_expired_checkpoint_that_cannot_be_removed_fails_no_save(
    tmp_path, caplog, monkeypatch
):
    time_s = [1_000.0]
    async with running_service(tmp_path, wall_time_s=lambda: time_s[0]) as client:
        model = await client.trained()
        for seq_id, name in ((3, "stuck"), (4, "other")):
            await client.saved(model, seq_id, name, ttl_seconds=100)
        unlink = Path.unlink
        time_s[0] = 1_101

        def unless_stuck(path, *args, **options):
            if path.name == "stuck.json":
                raise PermissionError(f"{path} belongs to another user")
            unlink(path, *args, **options)

        monkeypatch.setattr(Path, "unlink", unless_stuck)
        await client.saved(model, 5, "next")
        assert "stuck.json has expired and cannot be removed" in caplog.text
        assert not any("other" in file for file in files(tmp_path))
        caplog.clear()
        time_s[0] += 59
        await client.saved(model, 6, "soon")
        assert "stuck" not in caplog.text  # the next search is a minute after the last one


async def test_cancelled_work_on_files_is_waited_for():
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def work():
        begun.set()
        go_on.wait(30)
        done.set()

    task = asyncio.create_task(_run_in_thread(work))
    await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    await settled()
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done.is_set()


@service_test(virtual=False)
async def test_names_cannot_leave_their_folder_and_the_default_is_the_seq_id(client):
    model, session = client.model(), client.session()
    names = (
        "",
        ".",
        "..",
        ".a",
        "-a",
        "a/b",
        "../a",
        "a\\b",
        "a\n",
        "a\0",
        "ä",
        "a b",
        "a" * 129,
        "a@1",
    )
    for i, name in enumerate(names):
        for seq_id, save in ((2 * i + 1, client.save), (2 * i + 2, client.save_sampler)):
            with pytest.raises(InvalidRequestError, match="name="):
                save(model, seq_id, name)
        with pytest.raises((InvalidRequestError, NotFoundError)):
            client.load(f"tinker://{model}/weights/{name}", session_id=session, model_seq_id=1)
    for run in ("run", "..", "%2e%2e", "0" * 500):
        for call in (("get_training_run", run), ("delete_checkpoint", run, "weights", "..")):
            with pytest.raises(NotFoundError):
                await client.runs(*call)
    assert files(client.folder.parent) == set()
    last = 2 * len(names) + 1
    for i, usual in enumerate(("000010", "step_1.half-way", "_", "a" * 128, None), start=last):
        path = await client.saved(model, i, usual)
        assert path.endswith(f"/weights/{usual or f'{last + 4:06}'}")
        assert await client.loaded_weight(path) == 0


async def test_damaged_and_foreign_files_are_ignored_and_leftovers_of_a_kill_removed(
    tmp_path, caplog
):
    async with running_service(tmp_path) as client:
        model = await client.trained()
        paths = [await client.saved(model, seq_id, f"s{seq_id}") for seq_id in (3, 4)]
    folder = tmp_path / model.replace(":", ".") / "weights"
    (folder / "s3.json").write_text('{"format": 2, "settings": []}')
    (folder / "final@3").mkdir()  # as an earlier version saved it
    present = {one.name for one in folder.iterdir()}
    # A kill leaves data without a record, or a folder that was being written.
    unwritten = f".s4.{'0' * 32}.being-written"
    for left in (f"s4@{'0' * 32}", f"other@{'0' * 32}", unwritten):
        shutil.copytree(next(folder.glob("s4@*")), folder / left)
    (folder / f"{unwritten}.lock").touch()
    earlier = (
        tmp_path / model.replace(":", ".").replace("train.0", "train.1") / "weights" / "final@3"
    )
    earlier.mkdir(parents=True)
    (earlier / "weights.bin").write_text("w")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    async with running_service(tmp_path) as client:
        found = await client.runs("list_checkpoints", offset=0, limit=9)
        assert [one.tinker_path for one in found.checkpoints] == paths[1:]
        with pytest.raises(NotFoundError):
            await client.runs("get_weights_info", paths[0])
        assert await client.loaded_weight(paths[1]) == -5
    assert (tmp_path / "notes.txt").exists()
    assert (earlier / "weights.bin").exists()
    assert f"{earlier} is ignored" in caplog.text
    assert {one.name for one in folder.iterdir()} == present


async def test_runs_are_listed_newest_first_with_their_last_checkpoints(tmp_path):
    clock = itertools.count(1_000)
    async with running_service(tmp_path, wall_time_s=lambda: float(next(clock))) as client:
        models = [client.model() for _ in range(3)]
        paths = [await client.saved(models[0], seq_id, f"s{seq_id}") for seq_id in (1, 2)]
        paths.append(await client.saved_sampler(models[0], 3, "s3"))
        runs = await client.runs("list_training_runs", offset=1, limit=5)
        assert runs.cursor.total_count == 3
        assert [run.training_run_id for run in runs.training_runs] == [models[1], models[0]]
        oldest = runs.training_runs[1]
        assert oldest.last_checkpoint.tinker_path == paths[1]
        assert oldest.last_sampler_checkpoint.tinker_path == paths[2]
        listed = (await client.runs("list_checkpoints_of_run", models[0])).checkpoints
        assert [one.tinker_path for one in listed] == paths[::-1]
        some = await client.runs("list_checkpoints", offset=1, limit=1)
        assert ([one.tinker_path for one in some.checkpoints], some.cursor.total_count) == (
            [paths[1]],
            3,
        )
        await client.runs("delete_checkpoint", models[0], "weights", "s2")
        left = await client.runs("get_training_run", models[0])
        assert left.last_checkpoint.tinker_path == paths[0]
