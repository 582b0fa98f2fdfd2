"""GB/s of weights from trainer ranks to generator ranks, beside plain torchstore and memory copies.

    python -m benchmarks.weight_sync [--quick]
    python -m benchmarks.weight_sync --device cuda --model 8b --layers 4 --only fsdp2_to_tp2

Tensors are the layers of Qwen3 in bfloat16: 28 layers of 0.6B are 308 tensors and 0.88 GB. A
measurement is a whole call as the controller sees it, from the first message to the last answer, on
all ranks; checksums are included and compared after each pull. The first versions, which touch
their memory for the first time, are not measured. Each figure is the median of several repeats. In
the same run:

    layouts      one process to one, FSDP2 on two to one and to TP on two, TP on two to TP on two
    float32      one to one, from float32 weights that are cast while they are written
    torchstore   its own `put` and `get`, key by key, over Monarch's messages
    memory_copy  the same tensors copied within a process

The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
import warnings
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torchstore
from monarch.actor import ProcMesh

from actors.launch.launcher import Launcher, setup_process_group_env
from actors.launch.placement import Placement
from benchmarks.weight_sync_actors import Model, Plan, SyncRank
from rl.weights.checksum import check_sums
from rl.weights.store import Snapshot, WeightStore

T = TypeVar("T")

FULL = 28
"""Number of layers."""
SPEEDS = ("push_gb_per_s", "pull_gb_per_s")
NUM_WARM_UP = 3
"""Versions that are pushed before measuring, so that every segment has been used once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    name: str
    source: Plan
    target: Plan
    num_writers: int
    num_readers: int
    num_layers: int = FULL
    model: Model = "0.6b"
    """Sizes of a layer."""
    device: str = "cpu"
    """Type of the devices that hold the tensors; every rank has a GPU of its own."""
    checked: bool = True
    """False to skip the comparison of checksums, on a device that computes nothing."""
    dtype: str = "bfloat16"
    """Dtype of the writers' tensors; bfloat16 is sent."""


def main() -> None:
    args = parser().parse_args()
    warnings.filterwarnings("ignore", message="is_rdma_available", category=DeprecationWarning)
    print(json.dumps(asyncio.run(measure(args))))


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    options.add_argument(
        "--quick", action="store_true", help="few layers, few repeats, one process to one"
    )
    options.add_argument("--layers", type=int, help=f"number of layers; {FULL}")
    options.add_argument(
        "--model", choices=("0.6b", "8b"), default="0.6b", help="sizes of a layer; 0.6b"
    )
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu")
    options.add_argument("--only", help="name of the one case to measure, without its peers")
    options.add_argument(
        "--no-check", action="store_true", help="no checksums, for a device that computes nothing"
    )
    options.add_argument("--repeats", type=int, help="of each figure; 7")
    options.add_argument("--threads", type=int, default=2, help="that each process copies with; 2")
    return options


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    num_layers = args.layers or (4 if args.quick else FULL)
    repeats = args.repeats or (3 if args.quick else 7)
    load = os.getloadavg()[0]
    one = Case(
        name="one_to_one",
        source="whole",
        target="whole",
        num_writers=1,
        num_readers=1,
        num_layers=num_layers,
        model=args.model,
        device=args.device,
        checked=not args.no_check,
    )
    cases = [
        one,
        replace(one, name="one_to_one_float32", dtype="float32"),
        replace(one, name="fsdp2_to_tp1", source="fsdp", num_writers=2),
        replace(one, name="fsdp2_to_tp2", source="fsdp", target="tp", num_writers=2, num_readers=2),
        replace(one, name="tp2_to_tp2", source="tp", target="tp", num_writers=2, num_readers=2),
    ]
    if args.quick and args.only is None:
        cases = cases[:1]  # The one that `ratio` compares with its peers.
    chosen = [case for case in cases if args.only in (None, case.name)]
    figures = [await measure_case(case, repeats=repeats, threads=args.threads) for case in chosen]
    if args.only is not None or args.device != "cpu":
        return {"benchmark": "weight_sync", "load_before": round(load, 2), "cases": figures}
    plain, copies = await measure_peers(one, repeats=min(repeats, 3), threads=args.threads)
    ours = figures[0]
    compared = {"torchstore": plain, "memory_copy": dict.fromkeys(SPEEDS, copies["one_thread"])}
    return {
        "benchmark": "weight_sync",
        "cores": os.cpu_count(),
        "load_before": round(load, 2),
        "threads": args.threads,
        "repeats": repeats,
        "cases": figures,
        "torchstore": plain,
        "memory_copy_gb_per_s": copies,
        "compared": "GB/s: relay's weight store over torchstore, and over a copy by one thread",
        "ratio": {
            f"{speed.partition('_')[0]}_vs_{other}": round(ours[speed] / of_other[speed], 2)
            for other, of_other in compared.items()
            for speed in SPEEDS
        },
    }


class Ranks:
    """Writers and readers of a case, on separate meshes."""

    def __init__(self, case: Case, *, threads: int) -> None:
        self.case = case
        self.threads = threads
        self.launcher = Launcher()
        self.meshes: list[ProcMesh] = []

    async def __aenter__(self) -> Ranks:
        case = self.case
        every = range(case.num_writers + case.num_readers)
        for role, ranks in (
            ("writers", every[: case.num_writers]),
            ("readers", every[case.num_writers :]),
        ):
            gpus = tuple(ranks) if case.device == "cuda" else None
            processes = await self.launcher.spawn_role(
                Placement(role=role, num_procs=len(ranks), threads=self.threads, gpus=gpus)
            )
            self.meshes.append(processes.mesh)
            await setup_process_group_env(processes)
        self.writers, self.readers = (
            mesh.spawn("ranks", SyncRank, self.threads) for mesh in self.meshes
        )
        for ranks in (self.writers, self.readers):
            await ranks.setup.call(case.device)
        dtype = getattr(torch, case.dtype)
        await self.writers.build.call(case.source, case.num_layers, case.model, dtype, 0)
        sizes = await self.readers.build.call(
            case.target, case.num_layers, case.model, torch.bfloat16, 1
        )
        self.num_bytes = next(size for _, size in sizes.items())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.launcher.stop_all()

    async def foreign_contexts(self) -> list[str]:
        """Return which ranks have a context on another rank's GPU, as "readers rank 1: GPU 0"."""
        roles = {"writers": self.writers, "readers": self.readers}
        answers = {role: await mesh.foreign_contexts.call() for role, mesh in roles.items()}
        return [
            f"{role} rank {rank}: GPU {gpu}"
            for role, answer in answers.items()
            for rank, (_, gpus) in enumerate(answer.items())
            for gpu in gpus
        ]


async def measure_case(case: Case, *, repeats: int, threads: int) -> dict[str, Any]:
    async with Ranks(case, threads=threads) as ranks:
        store = WeightStore.Config(num_threads=threads).build(dtype="bfloat16")
        await store.start(ranks.meshes[0])
        for role in (ranks.writers, ranks.readers):
            await role.use_store.call(store)
        push_s, pull_s = [], []
        for version in range(NUM_WARM_UP + repeats):
            snapshot, took_push = await timed(push(ranks, store, version))
            pulled, took_pull = await timed(ranks.readers.pull.call(snapshot))
            sums = [box for _, of_rank in pulled.items() for box in of_rank]
            if case.checked:
                check_sums(version=version, pushed=snapshot.sums, pulled={"readers": sums})
            await store.prune()
            push_s.append(took_push)
            pull_s.append(took_pull)
        if case.checked and (case.target, case.dtype, case.model) == ("whole", "bfloat16", "0.6b"):
            assert await ranks.readers.equals.call_one(case.num_layers, torch.bfloat16, 0)
        foreign = await ranks.foreign_contexts() if case.device == "cuda" else []
        await store.stop()
    for name, took_s in (("push", push_s), ("pull", pull_s)):
        first, later = took_s[:NUM_WARM_UP], statistics.median(took_s[NUM_WARM_UP:])
        print(
            f"{case.name}: {name} {later:.3f} s, the first "
            f"{', '.join(f'{took:.3f}' for took in first)} s"
        )
    figures = speeds(case.name, ranks.num_bytes / 1e9, push_s[NUM_WARM_UP:], pull_s[NUM_WARM_UP:])
    return figures | {"foreign_contexts": foreign}


def speeds(
    name: str, gb: float, push_s: Sequence[float], pull_s: Sequence[float]
) -> dict[str, Any]:
    """Return the figures of one case, from the seconds of its calls."""
    figures = {"name": name, "gb": round(gb, 3)}
    for speed, took_s in zip(SPEEDS, (push_s, pull_s), strict=True):
        figures[speed] = round(gb / statistics.median(took_s), 3)
    print(figures, flush=True)
    return figures


async def push(ranks: Ranks, store: WeightStore, version: int) -> Snapshot:
    """Push from all ranks and announce the version."""
    answers = await ranks.writers.push.call(version)
    return store.announce([shard for _, shard in answers.items()])


async def timed(answer: Awaitable[T]) -> tuple[T, float]:
    """Return the awaited result and the seconds it took."""
    started = time.perf_counter()
    return await answer, time.perf_counter() - started


async def measure_peers(
    case: Case, *, repeats: int, threads: int
) -> tuple[dict[str, Any], dict[str, float]]:
    """Measure plain torchstore, and copies within a process by one thread and by all."""
    async with Ranks(case, threads=threads) as ranks:
        name = "plain"
        # As its own default, one volume in a process of its own.
        volume = await ranks.launcher.spawn_role(
            Placement(role="volume", num_procs=1, threads=threads)
        )
        await torchstore.initialize(mesh=volume.mesh, store_name=name)
        push_s, pull_s = [], []
        for version in range(repeats):
            _, took = await timed(ranks.writers.put_by_torchstore.call(name, version))
            push_s.append(took)
            _, took = await timed(ranks.readers.get_by_torchstore.call(name, version))
            pull_s.append(took)
            await ranks.readers.delete_by_torchstore.call(name, version)
        assert await ranks.readers.equals.call_one(case.num_layers, torch.bfloat16, 0)
        await torchstore.shutdown(name)
        all_threads = await ranks.readers.copy_memory.call_one(repeats)
    async with Ranks(case, threads=1) as ranks:
        one_thread = await ranks.readers.copy_memory.call_one(repeats)
    gb = ranks.num_bytes / 1e9
    copies = {"one_thread": gb / one_thread, f"{threads}_threads": gb / all_threads}
    return speeds("torchstore", gb, push_s, pull_s), {
        name: round(speed, 2) for name, speed in copies.items()
    }


if __name__ == "__main__":
    main()
