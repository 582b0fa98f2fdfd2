"""Counters of processes that ran, or run, on the null device: launches, calls, waits, contexts,
memory.
"""

from __future__ import annotations

import ctypes
import os
import struct
from dataclasses import dataclass
from pathlib import Path

HEAD, SLOT = struct.Struct("<7q64s64s64s8x"), struct.Struct("<Qq496s")
NUM_CALLS, NUM_KERNELS = 512, 4096
NUM_BYTES = HEAD.size + SLOT.size * (NUM_CALLS + NUM_KERNELS)
"""Layout of csrc/counters.c."""
WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaMemcpy2D",
)
"""Calls that let the host wait for the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """What one process asked of its devices."""

    pid: int
    role: str
    """Role of relay, or "" outside an actor."""
    local_rank: str
    visible: str
    """CUDA_VISIBLE_DEVICES at the first call that was counted."""
    launches: int
    """Kernels that the host launched, those that were captured included."""
    replayed: int
    """Kernels in the graphs that the host launched."""
    violations: int
    """Calls that a capture does not allow."""
    contexts: tuple[int, ...]
    """Devices on which there is a context, as the process numbers them."""
    bytes_used: int
    """Device memory that is allocated, on all devices of the process."""
    bytes_peak: int
    calls: dict[str, int]
    kernels: dict[str, int]
    """Launches by name, for C++ the mangled one; the first 495 characters."""

    @property
    def waits(self) -> int:
        """Times the host waited for the device."""
        return sum(self.calls.get(name, 0) for name in WAITS)

    @property
    def physical_contexts(self) -> tuple[int, ...]:
        """Devices on which there is a context, as the machine numbers them."""
        visible = [int(device) for device in self.visible.split(",") if device]
        return tuple(visible[device] if visible else device for device in self.contexts)

    def num_kernels(self, part: str) -> int:
        """Return the number of launches of kernels with `part` in their name."""
        return sum(count for name, count in self.kernels.items() if part in name)


def read(data: bytes) -> Counters:
    """Return the counters of one process from the bytes of its file."""
    pid, launches, replayed, violations, contexts, used, peak, *texts = HEAD.unpack_from(data)
    visible, role, rank = (_text(text) for text in texts)
    end_of_calls = HEAD.size + SLOT.size * NUM_CALLS
    return Counters(
        pid=pid,
        role=role,
        local_rank=rank,
        visible=visible,
        launches=launches,
        replayed=replayed,
        violations=violations,
        contexts=tuple(device for device in range(64) if contexts >> device & 1),
        bytes_used=used,
        bytes_peak=peak,
        calls=_slots(data[HEAD.size : end_of_calls]),
        kernels=_slots(data[end_of_calls:NUM_BYTES]),
    )


def read_folder(folder: Path) -> list[Counters]:
    """Return the counters of all processes that used a device, by role and rank."""
    found = [read(file.read_bytes()) for file in folder.iterdir()]
    return sorted(found, key=lambda one: (one.role, one.local_rank, one.pid))


def read_own() -> Counters:
    """Return the counters of this process, which runs on the null device."""
    return read(ctypes.string_at(_library().null_gpu_counters(), NUM_BYTES))


def reset_own() -> None:
    """Set launches, calls and kernels of this process to 0; contexts, violations and memory
    stay.
    """
    _library().null_gpu_reset()


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ["NULL_GPU_LIBRARY"])
    library.null_gpu_counters.restype = ctypes.c_void_p
    return library


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode()


def _slots(data: bytes) -> dict[str, int]:
    return {_text(name): count for used, count, name in SLOT.iter_unpack(data) if used and count}
