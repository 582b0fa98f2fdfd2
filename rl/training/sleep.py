"""Sleep and wake of a trainer that shares its GPU: tensors move to host memory and back.

    sleep = TrainerSleep(engine)
    sleep.sleep()     # the device memory is free; only wake may be called
    sleep.wake()      # every tensor has its bits again

Tensors keep their identity, because only the memory behind them is freed; references that FSDP and
the optimizer hold stay valid.
"""

from __future__ import annotations

import logging
import time

import torch
from torch import Tensor

from rl.distributed.process_group import barrier
from rl.distributed.sharding import local_tensor
from rl.training.checkpoints.tensors import collect_model_tensors
from rl.training.compat import identify_storage
from rl.training.engine import TrainingEngine

logger = logging.getLogger(__name__)


class TrainerSleep:
    """Moves the tensors of one rank's engine; every rank makes the same calls."""

    def __init__(self, engine: TrainingEngine) -> None:
        self.engine = engine
        self._moved: list[tuple[torch.UntypedStorage, Tensor]] = []
        """Emptied storages, each with the host copy of its bytes."""
        self._host: dict[int, Tensor] = {}
        """Host copy of each storage, kept because page-locked memory is slow to allocate."""
        self.asleep = False

    def sleep(self) -> int:
        """Move weights, optimizer state and reference policy to the host; return the bytes freed.

        Idempotent. Raises ValueError if a gradient is accumulated, which would be lost.
        """
        if self.asleep:
            return 0
        engine = self.engine
        if any(p.grad is not None for p in engine.policy.parameters.values()):
            raise ValueError("sleep with a gradient accumulated: call optim_step first")
        started = time.perf_counter()
        engine.checkpointer.wait()  # A background save may read what is about to move.
        engine.policy.release()
        if engine.reference is not None:
            engine.reference.policy.release()
        barrier()

        for storage in self._find_storages():
            key = identify_storage(storage)
            host = self._host.get(key)
            if host is None or host.nbytes != storage.nbytes():
                pinned = storage.device.type == "cuda"
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
                self._host[key] = host
            host.untyped_storage().copy_(storage)
            storage.resize_(0)
            self._moved.append((storage, host))
        self.asleep = True

        # The allocator would keep the memory for this process, and the generator needs it.
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)
            torch.cuda.empty_cache()
        freed = sum(host.nbytes for _, host in self._moved)
        logger.info("asleep: %.3g GB freed in %.2f s", freed / 1e9, time.perf_counter() - started)
        return freed

    def wake(self) -> int:
        """Move everything back bit for bit; return the bytes moved. Idempotent."""
        started = time.perf_counter()
        moved_bytes = 0
        # A storage leaves the list once it is back, so that a wake that ran out of memory can be
        # retried.
        while self._moved:
            storage, host = self._moved[-1]
            storage.resize_(host.nbytes)
            storage.copy_(host.untyped_storage())
            self._moved.pop()
            moved_bytes += host.nbytes
        if self.asleep:
            logger.info(
                "awake: %.3g GB back in %.2f s", moved_bytes / 1e9, time.perf_counter() - started
            )
        self.asleep = False
        return moved_bytes

    def _find_storages(self) -> list[torch.UntypedStorage]:
        """Return the storages on the engine's device; tied parameters share one."""
        engine = self.engine
        parts = [*engine.policy.parts]
        if engine.reference is not None:
            parts += engine.reference.policy.parts
        tensors = engine.optimizer.list_tensors()
        for part in parts:
            tensors += collect_model_tensors(part).values()

        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = local_tensor(tensor).untyped_storage()
            # Offloaded tensors are in host memory already.
            if storage.device.type == engine.device.type and storage.nbytes():
                storages.setdefault(identify_storage(storage), storage)
        return list(storages.values())
