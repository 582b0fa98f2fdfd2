"""A trainer that leaves its device to somebody else for a while: its tensors go to the host and come back.

    sleep = TrainerSleep(engine)
    sleep.sleep()     # the device's memory is free; nothing but wake may be called
    sleep.wake()      # every bit is where it was

Tensors keep their identity: only the memory behind them goes, so whoever holds a parameter, FSDP and the
optimizer among them, still holds it afterwards.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rl.distributed.process_group import World, barrier
from rl.distributed.shards import local_tensor, unwrapped
from rl.models.spec import ModelSpec
from rl.training.engine import TrainingEngine
from rl.training.engine_config import EngineConfig
from rl.training.memory import MemoryEstimate

logger = logging.getLogger(__name__)

CONTEXT_BYTES = 2 * 2**30
"""What a process keeps of a GPU however little it stores there: context, NCCL's buffers, pieces that the
allocator cannot give back. Assumed, not measured."""


@dataclass(kw_only=True, slots=True)
class _Moved:
    storage: torch.UntypedStorage
    num_bytes: int


class TrainerSleep:
    """Of one rank's engine; every rank calls the same."""

    def __init__(self, engine: TrainingEngine) -> None:
        self.engine = engine
        self._moved: list[_Moved] = []
        self._host: dict[int, Tensor] = {}
        """Where each storage goes, kept from one sleep to the next: page-locked memory takes long to get."""
        self._asleep = False

    @property
    def asleep(self) -> bool:
        return self._asleep

    def sleep(self) -> int:
        """Move weights, optimizer state and reference policy to the host; idempotent.

        Returns:
            Bytes freed on the device.

        Raises:
            ValueError: a gradient is accumulated, which would be lost.
        """
        if self._asleep:
            return 0
        engine = self.engine
        if any(p.grad is not None for p in engine.policy.parameters.values()):
            raise ValueError("sleep with a gradient accumulated: call optim_step first")
        started = time.perf_counter()
        engine.checkpointer.wait()  # one that is written in the background reads what is about to move
        engine.policy.release()
        if engine.reference is not None:
            engine.reference.policy.release()
        barrier()
        for storage in self._storages():
            num_bytes = storage.nbytes()
            key = storage._cdata
            if key not in self._host or self._host[key].nbytes != num_bytes:
                pinned = storage.device.type == "cuda"
                self._host[key] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
            self._host[key].untyped_storage().copy_(storage)
            storage.resize_(0)
            self._moved.append(_Moved(storage=storage, num_bytes=num_bytes))
        self._asleep = True
        _give_back(engine.device)
        freed = sum(moved.num_bytes for moved in self._moved)
        logger.info("asleep: %.3g GB freed in %.2f s", freed / 1e9, time.perf_counter() - started)
        return freed

    def wake(self) -> int:
        """Bring everything back, bit for bit; idempotent. Returns the bytes moved."""
        started = time.perf_counter()
        moved_bytes = 0
        # One leaves the list when it is back, so that a wake that found no memory can be tried again.
        while self._moved:
            moved = self._moved[-1]
            moved.storage.resize_(moved.num_bytes)
            moved.storage.copy_(self._host[moved.storage._cdata].untyped_storage())
            moved_bytes += self._moved.pop().num_bytes
        if self._asleep:
            logger.info("awake: %.3g GB back in %.2f s", moved_bytes / 1e9, time.perf_counter() - started)
        self._asleep = False
        return moved_bytes

    def _storages(self) -> list[torch.UntypedStorage]:
        """What lies on the engine's device, each memory once: tied parameters share theirs."""
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in self._tensors():
            storage = local_tensor(unwrapped(tensor)).untyped_storage()
            if storage.device.type == self.engine.device.type and storage.nbytes():
                found.setdefault(storage._cdata, storage)
        return list(found.values())

    def _tensors(self) -> Iterator[Tensor]:
        engine = self.engine
        for parameter in engine.policy.parameters.values():
            yield parameter.data
        for state in engine.optimizer.inner.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        if engine.optimizer.muon is not None:
            yield from engine.optimizer.muon.momenta.values()
        if engine.reference is not None:
            for parameter in engine.reference.policy.parameters.values():
                yield parameter.data


def check_shared_device(
    trainer: MemoryEstimate,
    *,
    generator_fraction: float,
    device_bytes: int,
    host_bytes: int,
    ranks_per_host: int,
) -> None:
    """Whether trainer and generator can have a device by turns.

    Args:
        trainer: of one rank.
        generator_fraction: of the device, that the generator takes (`generator.gpu_memory_utilization`).
        host_bytes: memory of the host, where those sleep that have no turn.

    Raises:
        ValueError: says what is needed, and which field to lower.
    """
    gb = 1e9
    for who, need, field in (
        ("the trainer's turn", trainer.total, "trainer.training.max_tokens_per_microbatch"),
        ("the generator's turn", generator_fraction * device_bytes, "generator.gpu_memory_utilization"),
    ):
        if need + 2 * CONTEXT_BYTES > device_bytes:
            raise ValueError(
                f"launch.share_gpus=True: {who} needs {need / gb:.3g} GB, and "
                f"{2 * CONTEXT_BYTES / gb:.3g} GB stay with the two processes; the device has "
                f"{device_bytes / gb:.3g} GB: lower {field}"
            )
    asleep = ranks_per_host * trainer.held
    if asleep > host_bytes:
        raise ValueError(
            f"launch.share_gpus=True: {ranks_per_host} sleeping ranks of the trainer need "
            f"{asleep / gb:.3g} GB of the host, which has {host_bytes / gb:.3g} GB: more hosts, or no sharing"
        )


def check_this_device(
    config: EngineConfig, spec: ModelSpec, *, world: World, generator_fraction: float, ranks_per_host: int
) -> None:
    """`check_shared_device` of this process's GPU, before anything is allocated; nothing on a CPU.

    Raises:
        ValueError: as that says.
    """
    device = world.default_device()
    if device.type != "cuda":
        return
    degrees = config.parallelism.degrees(world.size)
    check_shared_device(
        config.estimate_memory(spec, degrees=degrees, on_gpu=True),
        generator_fraction=generator_fraction,
        device_bytes=torch.cuda.get_device_properties(device).total_memory,
        host_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        ranks_per_host=ranks_per_host,
    )


def _give_back(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
