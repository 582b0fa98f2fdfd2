"""Lists of runs and checkpoints, of memory and disk together."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from rl.tinker.errors import InvalidRequestError, NotFoundError
from tests.support.fake_tinker_backend import BASE, LORA, new_model, result_of, running_service


def test_runs_are_listed_newest_first_with_their_last_checkpoints(tmp_path: Path) -> None:
    clock = itertools.count(1_000)

    async def main() -> Any:
        async with running_service(tmp_path, wall_time_s=lambda: float(next(clock))) as (service, _):
            models = []
            for number in range(3):
                session_id = service.sessions.create(owner="local")
                settings = service.training.create_model(
                    session_id, 0, LORA, user_metadata={"number": number}, owner="local"
                )
                models.append(settings.model_id)
            paths = []
            for seq_id, name in enumerate(("save_state", "save_state", "save_sampler"), 1):
                save = getattr(service.training, name)
                request = save(models[0], seq_id, f"s{seq_id}", owner="local").request_id
                paths.append((await result_of(service, request)).path)
            assert service.catalogue.base_models()[0] == BASE
            runs = await service.catalogue.training_runs(owner="local", offset=1, limit=5)
            checkpoints = await service.catalogue.checkpoints(models[0], owner="local")
            some = await service.catalogue.all_checkpoints(owner="local", offset=1, limit=1)
            await service.catalogue.delete_checkpoint(paths[1], owner="local")
            left = await service.catalogue.training_run(models[0], owner="local")
            return models, paths, runs, checkpoints, some, left

    models, paths, runs, checkpoints, some, left = asyncio.run(main())
    assert runs.total == 3
    assert [run.training_run_id for run in runs.items] == [models[1], models[0]]
    oldest = runs.items[1]
    assert (oldest.user_metadata, oldest.settings) == ({"number": 0}, LORA)
    assert oldest.last_checkpoint.path == paths[1]
    assert oldest.last_sampler_checkpoint.path == paths[2]
    assert oldest.last_request > oldest.created
    assert [checkpoint.path for checkpoint in checkpoints] == paths[::-1]
    assert all(checkpoint.size_bytes == len("0.0") for checkpoint in checkpoints)
    assert ([checkpoint.path for checkpoint in some.items], some.total) == ([paths[1]], 3)
    assert left.last_checkpoint.path == paths[0]


def test_a_run_that_saved_nothing_is_listed_as_long_as_it_is_in_memory(tmp_path: Path) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            model = new_model(service)
            assert await service.catalogue.checkpoints(model, owner="local") == ()
            assert (await service.catalogue.training_run(model, owner="local")).last_checkpoint is None
            await result_of(service, service.training.unload(model, owner="local").request_id)
            with pytest.raises(NotFoundError, match="there is no training run"):
                await service.catalogue.training_run(model, owner="local")

    asyncio.run(main())


@pytest.mark.parametrize(
    "path",
    ["", "weights/a", "tinker://", "tinker://run/weights", "tinker://run/other/a", "tinker://run/weights/a/b",
     "http://run/weights/a", "tinker:///weights/a", "tinker://run/weights/"],
)  # fmt: skip
def test_what_is_no_path_is_refused_with_the_form_of_one(tmp_path: Path, path: str) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            with pytest.raises(
                InvalidRequestError, match="it has the form tinker://<training run>/weights/<name>"
            ):
                await service.catalogue.weights_info(path, owner="local")

    asyncio.run(main())


@pytest.mark.parametrize("run", ["run", "..", "%2e%2e", "0" * 500])
def test_runs_that_never_were_are_not_found(tmp_path: Path, run: str) -> None:
    async def main() -> Any:
        async with running_service(tmp_path) as (service, _):
            with pytest.raises(NotFoundError):
                await service.catalogue.training_run(run, owner="local")
            for name in ("a", "..", "%2e"):
                with pytest.raises(NotFoundError):
                    await service.catalogue.delete_checkpoint(f"tinker://{run}/weights/{name}", owner="local")

    asyncio.run(main())
