"""Two recipes of the cookbook at once on one server over actors, with the numbers that each has
alone.

    python -m tools.tinker_cookbook.together [--recipes math_rl math_rl_ppo]

Needs the environment and the base model of `make tinker-cookbook`, and makes them if missing. Each
recipe runs by itself, and then both run at once, with a key each, on the same server in the
batch-invariant mode. Every number of every step must be the same, but for times. The cookbook
leaves the seeds of samples and adapters to the server, which draws them. Here all adapters have
seed 0, and a sample's seed follows from the key and the client's numbers of its sampler and
request, which are the same in every run, in whatever order the requests arrive.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from actors.generator import VLLMGenerator
from actors.tinker import ActorBackend
from rl.models.lora import LoRA
from rl.tinker.auth import KEY_PREFIX
from rl.tinker.backend import TinkerWorkers
from rl.tinker.base_model import BaseModelFolder
from rl.tinker.http_server import ServerThread
from rl.tinker.types import SampleOutput, SampleRequest
from rl.utils.compat import exit_process
from tools.tinker_cookbook.main import CACHE, EXAMPLE_DATA, ROOT, VENV, Runner, run_command, set_up
from tools.tinker_cookbook.model import CONTEXT, make_base_model
from tools.tinker_cookbook.recipes import Finding, Recipe, Row, all_recipes, chosen, read_rows

OF_TIMES = ("time", "progress")
"""Parts of the names of metrics that differ from run to run."""


class SeedingBackend(ActorBackend):
    """Backend over actors that gives all adapters one seed, and each sample a seed by its owner and
    the numbers of its sampler and request in the client's session.
    """

    def __init__(self, *, config: ActorBackend.Config) -> None:
        super().__init__(config=config)
        self._owners: dict[str, int] = {}
        """Owners by the order of their first samples: the first key is another one in each call of
        the tool.
        """
        self.spans: list[tuple[str, float, float]] = []
        """Owner, begin and end of each request."""

    async def _start_workers(self, base: BaseModelFolder) -> TinkerWorkers:
        workers = await super()._start_workers(base)
        create_model = workers.create_model

        async def create_seeded(model_id: str, lora: LoRA.Config | None) -> None:
            # The server would draw the seed, as the cookbook asks for none.
            await create_model(model_id, None if lora is None else replace(lora, seed=0))

        workers.create_model = create_seeded  # type: ignore[method-assign]
        return workers

    async def sample(self, version: int, request: SampleRequest, owner: str = "") -> SampleOutput:
        task = asyncio.current_task()
        assert task is not None
        # The server names the task by the request: sample <session>:sample:<sampler>:<request>.
        _, _, numbers = task.get_name().partition(":sample:")
        assert numbers, f"{task.get_name()} has no number of a request"
        place = f"{self._owners.setdefault(owner, len(self._owners))}:{numbers}"
        seed = int.from_bytes(hashlib.sha256(place.encode()).digest()[:7], "little")
        begin = time.monotonic()
        sampling = replace(request.sampling, seed=seed)
        output = await super().sample(version, replace(request, sampling=sampling), owner)
        self.spans.append((owner, begin, time.monotonic()))
        return output

    def count_shared(self) -> tuple[int, int]:
        """Return how many requests ran while one of another owner did, and how many there were."""
        shared = 0
        for owner, begin, end in self.spans:
            shared += any(
                other != owner and first < end and begin < last for other, first, last in self.spans
            )
        return shared, len(self.spans)


def strip(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return metrics without those of time."""
    return [
        {name: value for name, value in row.items() if not any(part in name for part in OF_TIMES)}
        for row in rows
    ]


def compare(alone: Sequence[Row], beside: Sequence[Row]) -> Finding:
    """Compare the metrics of two runs of a recipe."""
    first, second = strip(alone), strip(beside)
    different = [
        f"step {mine.get('step')} {name}: {mine.get(name)} and {theirs.get(name)}"
        for mine, theirs in zip(first, second, strict=False)
        for name in sorted({*mine, *theirs})
        if mine.get(name) != theirs.get(name)
    ]
    numbers = sum(len(row) for row in first)
    return Finding(
        promise="the same numbers as alone",
        holds=not different and len(first) == len(second) > 0,
        seen=f"{len(different)} of {numbers} numbers differ"
        + "".join(f"; {d}" for d in different[:3]),
    )


def run_together(names: Sequence[str], *, deadline_s: float) -> int:
    python = set_up(ROOT).python
    (site_packages,) = (ROOT / VENV / "lib").glob("python*/site-packages")
    recipes = chosen(all_recipes(site_packages / EXAMPLE_DATA), names)
    if len(recipes) != 2:
        raise ValueError(f"--recipes {' '.join(names)}: must be two")
    base = BaseModelFolder.Config(folder=str(make_base_model(CACHE)), batch_invariant=True)
    generator = VLLMGenerator.Config(dtype="float32", max_model_len=CONTEXT, cpu_kv_cache_gib=0.5)
    backend = SeedingBackend(config=ActorBackend.Config(base=base, generator=generator))
    folder = CACHE / "together"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    second_key = f"{KEY_PREFIX}{'2' * 32}"
    server = ServerThread(backend, storage_folder=folder / "storage", more_keys=(second_key,))

    def run(recipe: Recipe, key: str, name: str) -> tuple[list[Finding], tuple[Row, ...]]:
        runner = Runner(
            python=python,
            model=backend.base_model.name,
            server={"TINKER_BASE_URL": server.url, "TINKER_API_KEY": key},
            folder=folder / name,
            deadline_s=deadline_s,
        )
        findings = runner.run(recipe)
        return findings, read_rows(folder / name / recipe.name / "run" / "metrics.jsonl")

    findings: list[Finding] = []
    alone: dict[str, tuple[Row, ...]] = {}
    try:
        pairs = list(zip(recipes, (server.api_key, second_key), strict=True))
        for recipe, key in pairs:
            found, alone[recipe.name] = run(recipe, key, "alone")
            findings += found
        backend.spans.clear()
        with ThreadPoolExecutor(len(pairs)) as threads:
            runs = {
                recipe.name: threads.submit(run, recipe, key, "beside") for recipe, key in pairs
            }
        shared, requests = backend.count_shared()
        print(f"at once: {shared} of {requests} requests ran beside one of the other recipe")
        for name, future in runs.items():
            found, beside = future.result()
            same = compare(alone[name], beside)
            print(f"{name}: {'kept' if same.holds else 'NOT KEPT'}: {same.promise} ({same.seen})")
            findings += [*found, same]
    finally:
        server.close()
    return 0 if shared and all(finding.holds for finding in findings) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--recipes", nargs=2, default=["math_rl", "math_rl_ppo"], help="two names, not the same"
    )
    parser.add_argument("--deadline_s", type=float, default=900.0, help="longest run of a recipe")
    args = parser.parse_args(argv)
    return run_command(lambda: run_together(args.recipes, deadline_s=args.deadline_s))


if __name__ == "__main__":
    exit_process(main())
