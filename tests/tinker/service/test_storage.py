"""Checkpoints on the disk: whole or not there, across restarts and kills, and their owner's alone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl.tinker.errors import InvalidRequestError, NotFoundError
from rl.tinker.service.limits import Limits
from rl.tinker.service.names import CheckpointPath, Ids, parse_path
from rl.tinker.service.run_files import RunRecord
from rl.tinker.service.service import Service
from rl.tinker.service.storage import Storage
from tests.support.fake_tinker_backend import (
    LORA,
    FakeTinkerBackend,
    failure_of,
    forward_backward,
    new_model,
    optim_step,
    result_of,
    running_service,
    settled,
)

ROOT = Path(__file__).parents[2]


async def saved(service: Service, model: str, seq_id: int, name: str | None, **options: Any) -> str:
    request = service.training.save_state(model, seq_id, name, owner="local", **options)
    return (await result_of(service, request.request_id)).path


async def loaded_weight(service: Service, path: str, *, number: int = 0) -> float:
    """Of a new model with the checkpoint's weights."""
    session_id = service.sessions.create(owner="local")
    request = service.training.create_from_state(session_id, number, path, optimizer=True, owner="local")
    model = (await result_of(service, request.request_id)).model_id
    step = await result_of(service, optim_step(service, model, 1))
    return step.metrics["weight"]


async def trained(service: Service) -> str:
    """A model whose weight is -5."""
    model = new_model(service)
    forward_backward(service, model, 1, 5)
    await result_of(service, optim_step(service, model, 2))
    return model


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_checkpoint_is_found_by_its_owner_after_a_restart_and_by_nobody_else(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            path = await saved(service, await trained(service), 3, "step-1", user_metadata={"a": "b"})
        async with running_service(tmp_path) as (service, _):
            weight = await loaded_weight(service, path)
            (run,) = (await service.catalogue.training_runs(owner="local")).items[1:]
            info = await service.catalogue.weights_info(path, owner="local")
            assert (await service.catalogue.training_runs(owner="you")).total == 0
            stranger = service.sessions.create(owner="you")
            with pytest.raises(NotFoundError, match="there is no checkpoint"):
                service.training.create_from_state(stranger, 0, path, optimizer=True, owner="you")
            for call in (
                service.catalogue.weights_info(path, owner="you"),
                service.catalogue.delete_checkpoint(path, owner="you"),
                service.catalogue.set_ttl(path, 5, owner="you"),
                service.catalogue.training_run(run.training_run_id, owner="you"),
                service.catalogue.checkpoints(run.training_run_id, owner="you"),
            ):
                with pytest.raises(NotFoundError):
                    await call
            return path, weight, run, info

    path, weight, run, info = asyncio.run(main())
    assert weight == -5
    assert run.last_checkpoint == info
    assert (info.path, info.user_metadata, info.settings.base_model) == (path, {"a": "b"}, "tiny")
    assert path == f"tinker://{run.training_run_id}/weights/step-1"


def test_no_owner_is_written_to_the_disk(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            model = new_model(service, owner="tml-my-secret-key")
            request = service.training.save_state(model, 1, "a", owner="tml-my-secret-key").request_id
            await result_of(service, request, "tml-my-secret-key")

    asyncio.run(main())
    texts = [(tmp_path / file).read_text() for file in files(tmp_path)]
    assert len(texts) == 3
    assert not any("secret" in text for text in texts)


def test_a_name_that_is_taken_is_refused_or_overwritten_as_asked(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            model = await trained(service)
            path = await saved(service, model, 3, "final", user_metadata={"first": "1"})
            forward_backward(service, model, 4, 1)
            optim_step(service, model, 5)
            taken = service.training.save_state(model, 6, "final", owner="local").request_id
            failure = await failure_of(service, taken)
            before = await loaded_weight(service, path)
            assert await saved(service, model, 7, "final", overwrite=True) == path
            metadata = (await service.catalogue.weights_info(path, owner="local")).user_metadata
            return failure, before, await loaded_weight(service, path), metadata, files(tmp_path)

    failure, before, after, metadata, left = asyncio.run(main())
    assert failure.category == "user"
    assert "is there already" in failure.error
    assert (before, after) == (-5, -6)
    assert metadata is None
    assert len([file for file in left if file.endswith("weight.json")]) == 1


def test_a_save_that_fails_leaves_the_older_one_and_nothing_else(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, backend):
            model = await trained(service)
            path = await saved(service, model, 3, "final")
            left = files(tmp_path)
            backend.fail("save_state", OSError("disk full"))
            request = service.training.save_state(model, 4, "final", overwrite=True, owner="local").request_id
            failure = await failure_of(service, request)
            assert files(tmp_path) == left
            return failure, await loaded_weight(service, path)

    failure, weight = asyncio.run(main())
    assert failure.category == "server"
    assert weight == -5


def test_a_run_that_saved_nothing_leaves_nothing_behind(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, backend):
            backend.fail("save_state", OSError("disk full"))
            model = new_model(service)
            await failure_of(service, service.training.save_state(model, 1, "a", owner="local").request_id)
            await result_of(service, service.training.unload(model, owner="local").request_id)
            await trained(service)

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_expires_at_its_time_and_its_files_go(tmp_path: Path) -> None:
    time_s = [1_000.0]

    async def main() -> Any:
        async with running_service(tmp_path, wall_time_s=lambda: time_s[0]) as (service, _):
            model = await trained(service)
            short = await saved(service, model, 3, "short", ttl_seconds=100)
            long = await saved(service, model, 4, "long", ttl_seconds=100)
            kept = await saved(service, model, 5, "kept", ttl_seconds=100)
            prolonged = await service.catalogue.set_ttl(long, 500, owner="local")
            assert (await service.catalogue.set_ttl(kept, None, owner="local")).expires is None
            assert prolonged.expires is not None
            assert prolonged.expires.timestamp() == 1_500
            time_s[0] = 1_100
            with pytest.raises(NotFoundError):
                await service.catalogue.weights_info(short, owner="local")
            left = await service.catalogue.checkpoints(model, owner="local")
            replaced = await saved(service, model, 6, "short")  # its name is free again
            assert replaced == short
        time_s[0] = 1_501
        async with running_service(tmp_path, wall_time_s=lambda: time_s[0]) as (service, _):
            run = model
            return left, await service.catalogue.checkpoints(run, owner="local"), files(tmp_path)

    left, after, on_disk = asyncio.run(main())
    assert {checkpoint.checkpoint_id for checkpoint in left} == {"weights/long", "weights/kept"}
    assert {checkpoint.checkpoint_id for checkpoint in after} == {"weights/short", "weights/kept"}
    assert not any("long" in file for file in on_disk)


def test_a_sweep_removes_what_has_expired_and_is_not_due_again_before_the_next(tmp_path: Path) -> None:
    time_s = [1_000.0]

    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            await saved(service, await trained(service), 3, "by-the-real-clock")
            storage = Storage(tmp_path, limits=Limits(), wall_time_s=lambda: time_s[0])
            model_id = f"{Ids().new_session('me')}:train:0"
            run = RunRecord(
                model_id=model_id,
                session_id="",
                owner_hash="",
                settings=LORA,
                created_s=0.0,
                user_metadata=None,
            )

            async def write(folder: Path) -> None:
                (folder / "weights").write_bytes(bytes(10))

            for name, ttl_seconds in (("first", 10), ("second", 20), ("kept", None)):
                path = CheckpointPath(model_id=model_id, kind="training", name=name)
                stored = await storage.save(
                    run, path, write, overwrite=False, ttl_seconds=ttl_seconds, user_metadata=None
                )
                assert stored.record.size_bytes == 10
            due = []
            for now_s in (1_009, 1_010, 1_019, 1_020):
                time_s[0] = now_s
                due.append(storage.has_expired())
                storage.sweep()
            return due

    assert asyncio.run(main()) == [False, True, False, True]
    weights = [file.split("/")[2] for file in files(tmp_path) if file.endswith("checkpoint.json")]
    assert sorted(weights) == ["by-the-real-clock@1", "kept@1"]


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_removed_afterwards(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, backend):
            path = await saved(service, await trained(service), 3, "a")
            gate = backend.hold("load_state")
            session_id = service.sessions.create(owner="local")
            request = service.training.create_from_state(session_id, 0, path, optimizer=False, owner="local")
            await settled()
            await service.catalogue.delete_checkpoint(path, owner="local")
            with pytest.raises(NotFoundError):
                await service.catalogue.weights_info(path, owner="local")
            gate.set()
            loaded = await result_of(service, request.request_id)
            return loaded, backend.weights[loaded.model_id], files(tmp_path)

    _loaded, weight, on_disk = asyncio.run(main())
    assert weight == -5
    assert not any("weight.json" in file for file in on_disk)


def test_limits_of_storage_name_themselves_and_deleting_makes_room(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path, limits=Limits(checkpoints=1)) as (service, _):
            model = await trained(service)
            path = await saved(service, model, 3, "a")
            full = service.training.save_state(model, 4, "b", owner="local").request_id
            failure = await failure_of(service, full)
            assert await saved(service, model, 5, "a", overwrite=True) == path  # no further one
            await service.catalogue.delete_checkpoint(path, owner="local")
            await saved(service, model, 6, "b")
        async with running_service(tmp_path, limits=Limits(storage_bytes=1)) as (service, _):
            full = service.training.save_sampler(new_model(service), 1, "c", owner="local").request_id
            return failure, await failure_of(service, full)

    count, size = asyncio.run(main())
    assert "limit checkpoints: there are 1" in count.error
    assert "limit storage_bytes: checkpoints take" in size.error


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".a", "-a", "a/b", "../a", "a\\b", "a\n", "a\0", "ä", "a b", "a" * 129, "a@1"]
)
def test_names_cannot_leave_their_folder(tmp_path: Path, name: str) -> None:
    async def main() -> Any:
        async with running_service(tmp_path / "storage") as (service, _):
            model = new_model(service)
            with pytest.raises(InvalidRequestError, match="name is"):
                service.training.save_state(model, 1, name, owner="local")
            with pytest.raises(InvalidRequestError, match="name is"):
                service.training.save_sampler(model, 2, name, owner="local")
            session_id = service.sessions.create(owner="local")
            with pytest.raises((InvalidRequestError, NotFoundError)):
                service.training.create_from_state(
                    session_id, 0, f"tinker://{model}/weights/{name}", optimizer=True, owner="local"
                )

    asyncio.run(main())
    assert files(tmp_path) == set()


@pytest.mark.parametrize("name", ["000010", "final", "step_1.half-way", "_", "a" * 128])
def test_ordinary_names_are_taken(tmp_path: Path, name: str) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            path = await saved(service, await trained(service), 3, name)
            assert path.endswith(f"/weights/{name}")
            return await loaded_weight(service, path)

    assert asyncio.run(main()) == -5


def test_a_state_without_a_name_is_called_by_its_seq_id(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            return await saved(service, await trained(service), 3, None)

    assert asyncio.run(main()).endswith("/weights/000003")


def test_files_that_are_no_runs_or_damaged_are_left_out(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            first = await trained(service)
            paths = [await saved(service, first, seq_id, f"s{seq_id}") for seq_id in (3, 4)]
        folder = tmp_path / first.replace(":", ".")
        (folder / "weights/s3@1/checkpoint.json").write_text('{"format": 1, "settings": []}')
        (tmp_path / "notes").mkdir()
        (tmp_path / "notes.txt").write_text("hello")
        async with running_service(tmp_path) as (service, _):
            found = await service.catalogue.all_checkpoints(owner="local")
            with pytest.raises(NotFoundError):
                await service.catalogue.weights_info(paths[0], owner="local")
            return paths, found

    paths, found = asyncio.run(main())
    assert [checkpoint.path for checkpoint in found.items] == paths[1:]
    assert (tmp_path / "notes.txt").exists()


def test_a_folder_that_cannot_be_written_is_named_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def main() -> Any:
        await Service(backend=FakeTinkerBackend(), storage_folder=tmp_path / "file").start()

    with pytest.raises(ValueError, match=r"storage_folder is .*file', which cannot be written"):
        asyncio.run(main())


KILLED = """
import asyncio, sys
from pathlib import Path
from tests.support.fake_tinker_backend import forward_backward, optim_step, result_of, running_service
from tests.tinker.service.test_storage import saved, trained

async def main():
    async with running_service(Path(sys.argv[1])) as (service, backend):
        model = await trained(service)
        path = await saved(service, model, 3, "final")
        forward_backward(service, model, 4, 1)
        await result_of(service, optim_step(service, model, 5))
        save_state = backend.save_state

        async def endless(model_id, folder):
            await save_state(model_id, folder)
            print(path, flush=True)
            await asyncio.Event().wait()

        backend.save_state = endless
        await saved(service, model, 6, "final", overwrite=True)

asyncio.run(main())
"""
"""It is killed when the backend has written everything, and the checkpoint has not appeared."""


def test_a_kill_while_a_checkpoint_is_replaced_leaves_the_old_one(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    path = process.stdout.readline().strip()
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    process.stdout.close()
    half_written = [file for file in files(tmp_path) if ".being-written/" in file]

    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            return files(tmp_path), await loaded_weight(service, path)

    left, weight = asyncio.run(main())
    assert len(half_written) == 1
    assert weight == -5
    assert not any(".being-written" in file for file in left)


def test_of_two_versions_that_a_kill_left_the_newer_one_counts_and_the_older_goes(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            model = await trained(service)
            path = await saved(service, model, 3, "final")
            folder = tmp_path / model.replace(":", ".") / "weights"
            (folder / "final@1").rename(folder / "held-back")  # as if killed before it was removed
            await saved(service, model, 4, "final")
            (folder / "final@1").rename(folder / "final@10")
            (folder / "held-back").rename(folder / "final@9")
            (folder / "final@10/data/weight.json").write_text("-7.0")
            storage = Storage(tmp_path, limits=Limits(), wall_time_s=lambda: 0.0)
            assert storage.find(parse_path(path), "local").folder.name == "final@10"  # before the older goes
        async with running_service(tmp_path) as (service, _):
            return await loaded_weight(service, path), sorted(p.name for p in folder.iterdir())

    weight, left = asyncio.run(main())
    assert weight == -7
    assert left == ["final@10"]
