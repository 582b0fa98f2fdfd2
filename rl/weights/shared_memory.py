"""Shared-memory segments of two processes on one host: who owns them, and who reads them.

A segment is a memfd: anonymous POSIX shared memory that other processes of the same user open as
`/proc/<pid>/fd/<number>`. It has no name in a file system, so nothing needs cleaning up: the kernel frees
it when the last process that holds it ends, in whatever way. Two runs cannot collide, and the size of
/dev/shm does not matter.

Touching a page for the first time costs several times as much as copying it, so an owner keeps segments
for later versions (`SegmentPool`), and readers and writers keep them mapped (`SegmentMaps`). A reader or
writer holds a shared flock on the segment (the kernel releases it when the process ends) and checks that
the generation is the expected one. Reuse needs the exclusive lock, and starts a new generation.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import psutil
import torch
from torch import Tensor

from rl.weights.types import SharedMemoryError, StaleSegmentError

HEADER = mmap.PAGESIZE
"""Bytes before the data: the segment's id (16), then its generation (8)."""
_ID_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentRef:
    """One use of a shared-memory segment, for processes on the owner's host."""

    host: str
    pid: int
    """The process that owns the segment."""
    descriptor: int
    """File descriptor in the owner."""
    id: bytes
    """Identity of the segment; descriptors are reused, ids are not."""
    num_bytes: int
    generation: int

    @property
    def header(self) -> bytes:
        return self.id + self.generation.to_bytes(8, "little")


@cache
def this_host() -> str:
    """Return a name shared by all processes that can share segments: same boot, pid namespace and user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}-{os.geteuid()}"


def free_memory() -> int:
    """Return the bytes that this process can still allocate, within the machine's and the cgroup's limit."""
    free, group = psutil.virtual_memory().available, Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # no cgroup, or no limit ("max")
        limit = int((group / "memory.max").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(counts.get("inactive_file", 0))
        free = min(free, limit - used)
    return free


class Segment:
    """A shared-memory segment owned by this process."""

    def __init__(self, num_bytes: int) -> None:
        """Allocate every page now: memory that is missing later would kill the process by SIGBUS.

        Raises:
            SharedMemoryError: says how much was asked for and how much is free.
        """
        self.num_bytes = num_bytes
        self._descriptor = os.memfd_create("relay-weights", os.MFD_CLOEXEC)
        size = HEADER + num_bytes
        try:
            os.posix_fallocate(self._descriptor, 0, size)
        except OSError as error:
            os.close(self._descriptor)
            raise SharedMemoryError(
                f"{size / 1e9:.3g} GB of shared memory could not be allocated "
                f"({os.strerror(error.errno or 0)}); {free_memory() / 1e9:.3g} GB of memory are free here"
            ) from error
        self._memory, self.data = _map(self._descriptor, num_bytes)
        self._ref = SegmentRef(
            host=this_host(),
            pid=os.getpid(),
            descriptor=self._descriptor,
            id=os.urandom(_ID_BYTES),
            num_bytes=num_bytes,
            generation=0,
        )

    def take(self) -> SegmentRef | None:
        """Start a new use under a new generation; return None while a process reads the last one."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        self._ref = replace(self._ref, generation=self._ref.generation + 1)
        self._memory[: len(self._ref.header)] = self._ref.header
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return self._ref

    def close(self) -> None:
        """Refuse new readers. The memory is freed when the last process unmaps it."""
        os.close(self._descriptor)


class SegmentPool:
    """The free segments of one owner, kept for the next version."""

    def __init__(self) -> None:
        self._free: list[Segment] = []
        self._is_checked = False

    def take(self, num_bytes: int, *, num_versions: int) -> tuple[Segment, SegmentRef]:
        """Return the smallest free segment that is large enough and unread, or a new one.

        Raises:
            SharedMemoryError: there is no memory for `num_versions` segments, which is checked at first,
                or for a new one.
        """
        if not self._is_checked and num_bytes * num_versions > free_memory():
            raise SharedMemoryError(
                f"weights need {num_bytes * num_versions / 1e9:.3g} GB of shared memory in process "
                f"{os.getpid()} ({num_versions} versions: those kept and the one being written), and "
                f"{free_memory() / 1e9:.3g} GB are free: lower weights.keep_versions (now "
                f"{num_versions - 1}), or set weights.transport='files'"
            )
        self._is_checked = True
        for segment in sorted(self._free, key=lambda s: s.num_bytes):
            # A much larger segment would hold memory for the sake of a small version.
            if num_bytes <= segment.num_bytes <= 2 * num_bytes and (ref := segment.take()) is not None:
                self._free.remove(segment)
                return segment, ref
        segment = Segment(num_bytes)
        ref = segment.take()
        assert ref is not None, "a new segment has no readers"
        return segment, ref

    def give_back(self, segments: list[Segment]) -> None:
        """Take back the segments of one deleted version, and close older ones."""
        if segments:
            self.close()
            self._free = list(segments)

    def close(self) -> None:
        for segment in self._free:
            segment.close()
        self._free = []


class _Mapping:
    """A segment mapped into this process; the memory goes with the last reference to `data`."""

    def __init__(self, ref: SegmentRef, descriptor: int) -> None:
        self.memory, self.data = _map(descriptor, ref.num_bytes)
        self.last_used = 0
        """Number of the operation that used the segment last."""
        self.is_pinned = False

    def pin(self) -> None:
        """Pin the memory for direct copies by a GPU, where the driver allows it."""
        if not self.is_pinned:
            torch.cuda.cudart().cudaHostRegister(self.data.data_ptr(), self.data.nbytes, 0)
            self.is_pinned = True

    def close(self) -> None:
        if self.is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self.data.data_ptr())


class SegmentMaps:
    """The segments, usually of other processes, that this process has mapped and used recently."""

    def __init__(self, *, max_age: int) -> None:
        """`max_age` is the number of operations that an unused segment stays mapped."""
        self._max_age = max_age
        self._num_operations = 0
        self._maps: dict[tuple[int, bytes], _Mapping] = {}

    def begin_operation(self) -> None:
        """Unmap segments that have not been used for long: the owner may have given them up."""
        self._num_operations += 1
        for key, mapped in list(self._maps.items()):
            if self._num_operations - mapped.last_used > self._max_age:
                self._maps.pop(key).close()

    @contextmanager
    def holding(self, ref: SegmentRef, *, pinned: bool = False) -> Iterator[Tensor]:
        """Yield the data, [num_bytes] uint8, which the owner does not reuse within this context.

        Raises:
            StaleSegmentError: the owner has closed the segment, or it holds another version.
            SharedMemoryError: this process may not open the segment.
        """
        descriptor = _open_locked(ref)
        try:
            key = (ref.pid, ref.id)
            mapped = self._maps[key] = self._maps.get(key) or _Mapping(ref, descriptor)
            mapped.last_used = self._num_operations
            if pinned:
                mapped.pin()
            yield mapped.data
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # the mapping keeps a duplicate of the descriptor
            os.close(descriptor)

    def close(self) -> None:
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()


def _open_locked(ref: SegmentRef) -> int:
    """Open a segment with a shared lock, which the kernel keeps for each opening separately."""
    try:
        descriptor = os.open(f"/proc/{ref.pid}/fd/{ref.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except PermissionError as error:
        raise SharedMemoryError(
            f"process {os.getpid()} may not open the shared memory of process {ref.pid}: "
            "set weights.transport='torchstore'"
        ) from error
    except OSError as error:
        raise StaleSegmentError(f"the memory of process {ref.pid}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.pread(descriptor, len(ref.header), 0) == ref.header:
            return descriptor
    except OSError as error:  # it is being reused, or another file has the number by now
        os.close(descriptor)
        raise StaleSegmentError(f"process {ref.pid} is reusing the memory") from error
    os.close(descriptor)
    raise StaleSegmentError(f"process {ref.pid} has used the memory for another version")


def _map(descriptor: int, num_bytes: int) -> tuple[mmap.mmap, Tensor]:
    """Return a segment's memory with its header, and the data behind it, [num_bytes] uint8."""
    memory = mmap.mmap(descriptor, HEADER + num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    if num_bytes == 0:
        return memory, torch.empty(0, dtype=torch.uint8)
    # The tensor keeps `memory` alive.
    return memory, torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER, count=num_bytes)
