"""Checkpoints of one run beside each other: names that are taken again, and lists of many."""

from __future__ import annotations

import asyncio
import cProfile
import pstats
import time
from pathlib import Path
from typing import Any

from rl.tinker.service.limits import Limits
from rl.tinker.service.storage import Storage
from tests.support.fake_tinker_backend import (
    forward_backward,
    optim_step,
    result_of,
    running_service,
    settled,
)
from tests.tinker.service.test_storage import loaded_weight, saved, trained


def test_a_name_can_be_taken_again_while_what_had_it_is_still_read(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, backend):
            model = await trained(service)
            path = await saved(service, model, 3, "a")
            gate = backend.hold("load_state")
            session_id = service.sessions.create(owner="local")
            reader = service.training.create_from_state(session_id, 0, path, optimizer=False, owner="local")
            await settled()
            await service.catalogue.delete_checkpoint(path, owner="local")
            forward_backward(service, model, 4, 2)
            optim_step(service, model, 5)
            again = await saved(service, model, 6, "a")
            gate.set()
            old = backend.weights[(await result_of(service, reader.request_id)).model_id]
            return path, again, old, await loaded_weight(service, again, number=1)

    path, again, old, new = asyncio.run(main())
    assert again == path
    assert (old, new) == (-5, -7)


def test_listing_many_checkpoints_reads_their_folder_once(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            model = await trained(service)
            paths = [await saved(service, model, 3 + i, f"a{i}") for i in range(6)]
            storage = Storage(tmp_path, limits=Limits(), wall_time_s=time.time)
            profile = cProfile.Profile()
            found = profile.runcall(storage.checkpoints, model)
            return paths, [str(stored.path) for stored in found], pstats.Stats(profile)

    paths, found, stats = asyncio.run(main())
    calls = {what[2]: num for what, (num, *_) in stats.stats.items()}
    assert found == paths[::-1]
    assert calls["<built-in method posix.listdir>"] == 1
