"""The machine itself: driver, compiler, memory, GPUs, links; imports, a Triton kernel, NCCL."""

from __future__ import annotations

import importlib
import itertools
import os
import resource
import shutil
import sysconfig
import time
from pathlib import Path

from actors.preflight.capability import CUDA_CAPABILITY, FLASH_CAPABILITY
from tools.gpu_check.report import Report

LEAST_DRIVER = 580
"""Driver that CUDA 13 needs."""
SHARED_MEMORY_GIB = 1
"""Size of /dev/shm below which NCCL may lack memory; weights are not kept there."""
ALL_REDUCE_BYTES = 1 << 28
ALL_REDUCE_GB_PER_S = 10.0
"""Slowest that is called fast: PCIe 4 without peer access reaches about this."""


def machine(report: Report) -> None:
    try:
        import pynvml
    except ImportError:
        report.faults.append(
            "this environment has no GPU builds: RELAY_DEVICE=gpu python3 tools/setup_env.py"
        )
        return
    import torch

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        report.faults.append(
            f"NVIDIA's driver does not answer ({error}): install driver {LEAST_DRIVER} or newer"
        )
        return
    driver = str(pynvml.nvmlSystemGetDriverVersion())
    report.figure("driver", float(".".join(driver.split(".")[:2])))
    report.require(
        int(driver.split(".")[0]) >= LEAST_DRIVER,
        f"driver {driver}: CUDA 13 needs {LEAST_DRIVER} or newer",
    )
    _build_tools(report)
    num_gpus = torch.cuda.device_count()
    report.figure("GPUs", num_gpus)
    report.require(num_gpus > 0, f"PyTorch {torch.__version__} sees no GPU")
    for i in range(num_gpus):
        has = torch.cuda.get_device_properties(i)
        report.notes.append(
            f"GPU {i}: {has.name}, {has.total_memory / 2**30:.0f} GiB, sm_{has.major}{has.minor}"
        )
        report.require(
            (has.major, has.minor) >= CUDA_CAPABILITY,
            f"GPU {i} has compute capability {has.major}.{has.minor}; CUDA 13 has kernels from 7.5 "
            "on",
        )
        if (has.major, has.minor) < FLASH_CAPABILITY:
            report.notes.append(f"GPU {i} is too old for flash attention: only float32 is accepted")
    pairs = list(itertools.permutations(range(num_gpus), 2))
    if apart := [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]:
        report.notes.append(
            f"no peer access between GPUs {', '.join(apart)}: collectives go over the host's memory"
        )


def _build_tools(report: Report) -> None:
    compiler = os.environ.get("CC", "gcc")
    report.require(
        any(map(shutil.which, (compiler.split()[0], "clang"))),
        f"no {compiler}: Triton compiles with it; install gcc",
    )
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    report.require(
        header.exists(), f"no {header}: Triton needs Python's headers (Debian, Ubuntu: python3-dev)"
    )
    memory = shutil.disk_usage("/dev/shm")
    report.figure("/dev/shm GiB", memory.free / 2**30)
    if memory.free < SHARED_MEMORY_GIB << 30:
        report.notes.append(
            f"/dev/shm has {memory.free / 2**30:.2g} GiB free: NCCL may need more between GPUs "
            "without peer access; a container's option is --shm-size 8g"
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and limit < memory.free:
        report.notes.append(
            f"ulimit -l is {limit >> 10} KiB: pinning memory may fail, and weights then sync slowly"
        )


def start(report: Report) -> None:
    started = time.monotonic()
    import torch

    for name in ("monarch.actor", "vllm"):
        # The rest needs PyTorch alone, and is checked all the same.
        try:
            importlib.import_module(name)
        except ImportError as error:
            report.faults.append(f"{name} cannot be imported, so no run starts here: {error}")
    report.figure("import s", time.monotonic() - started)
    from torch.multiprocessing.spawn import spawn

    from tools.gpu_check.triton_kernel import doubled

    x = torch.arange(5000.0, device="cuda")
    report.close("a Triton kernel", doubled(x), 2 * x, atol=0)
    num_gpus = torch.cuda.device_count()
    if num_gpus > 1:
        rates = torch.multiprocessing.get_context("spawn").SimpleQueue()
        folder = Path(os.environ.get("TMPDIR", "/tmp"), f"relay-gpu-check-{os.getpid()}")
        try:
            spawn(_all_reduce, (num_gpus, str(folder), rates), nprocs=num_gpus)
        finally:
            folder.unlink(missing_ok=True)
        answers = [rates.get() for _ in range(num_gpus)]
        report.same("an all-reduce", max(difference for difference, _ in answers), atol=0)
        slowest = min(rate for _, rate in answers)
        report.figure("all-reduce GB/s", slowest, at_least=ALL_REDUCE_GB_PER_S)


def _all_reduce(rank: int, num_ranks: int, rendezvous: str, rates: object) -> None:
    """Put the error and the bus bandwidth in GB/s, as NCCL's own tests count it, of this rank into
    `rates`.
    """
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks
    )
    x = torch.ones(ALL_REDUCE_BYTES // 4, device="cuda")
    dist.all_reduce(x)
    difference = (x - num_ranks).abs().max().item()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(5):
        dist.all_reduce(x)
    torch.cuda.synchronize()
    took_s = (time.perf_counter() - started) / 5
    rate = ALL_REDUCE_BYTES * 2 * (num_ranks - 1) / num_ranks / took_s / 1e9
    rates.put((difference, rate))  # type: ignore[attr-defined]
    dist.destroy_process_group()
