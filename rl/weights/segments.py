"""Shared memory that two processes of one host map: segments, who owns them, who reads them.

A segment is a memfd: anonymous POSIX shared memory, which other processes of the same user open as
`/proc/<pid>/fd/<number>`. It has no name in a file system, so it needs no cleaning up: the kernel
frees it when the last process that holds it ends, however that ends. Two runs cannot meet, and
the size of /dev/shm does not matter.

Pages that are touched for the first time cost several times as much as a copy, so an owner keeps
segments for later versions (`SegmentPool`), and readers and writers keep them mapped
(`SegmentMaps`). A reader locks the segment (flock, shared; the kernel ends the lock with the
process) and checks that it still holds the generation it was told of; so does a writer. Who is to
reuse it needs the lock for itself, and gives it a new generation.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from rl.weights.errors import SharedMemoryError, StaleSegmentError

HEADER = mmap.PAGESIZE
"""Bytes before the data: the segment's id (16), then its generation (8)."""
_ID_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentRef:
    """One use of a segment, for processes on its host."""

    host: str
    pid: int
    descriptor: int
    """In the process `pid`, which owns it."""
    id: bytes
    """Descriptors are used again, this is not."""
    num_bytes: int
    generation: int


@cache
def this_host() -> str:
    """The same in processes that can share segments: a boot of a machine, process ids and a user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}-{os.geteuid()}"


def free_memory() -> int:
    """Bytes that this process can still get, by the machine's account and its control group's."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # none, or no limit ("max")
        return free
    return min(free, limit - used + int(counts.get("inactive_file", 0)))


class Segment:
    """Shared memory of this process."""

    def __init__(self, num_bytes: int) -> None:
        """Reserve it, page by page: memory that is missing later would kill by SIGBUS.

        Raises:
            SharedMemoryError: says how much was asked for and is free.
        """
        self._descriptor = os.memfd_create("relay-weights", os.MFD_CLOEXEC)
        size = HEADER + num_bytes
        try:
            os.posix_fallocate(self._descriptor, 0, size)
        except OSError as error:
            os.close(self._descriptor)
            raise SharedMemoryError(
                f"{size / 1e9:.3g} GB of shared memory could not be had ({os.strerror(error.errno or 0)}); "
                f"{free_memory() / 1e9:.3g} GB of memory are free here"
            ) from error
        memory = _map(self._descriptor, size)
        self.data = _tensor(memory, num_bytes)
        """[num_bytes] uint8."""
        self._header = memoryview(memory)[:HEADER]
        self._ref = SegmentRef(
            host=this_host(),
            pid=os.getpid(),
            descriptor=self._descriptor,
            id=os.urandom(_ID_BYTES),
            num_bytes=num_bytes,
            generation=0,
        )
        self._header[:_ID_BYTES] = self._ref.id

    @property
    def num_bytes(self) -> int:
        return self._ref.num_bytes

    def take(self) -> SegmentRef | None:
        """A new use, under a new generation; None while somebody reads the one before."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        self._ref = replace(self._ref, generation=self._ref.generation + 1)
        self._header[_ID_BYTES : _ID_BYTES + 8] = self._ref.generation.to_bytes(8, "little")
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return self._ref

    def close(self) -> None:
        """Nobody can open it any more. Its memory is freed when nobody has it mapped."""
        os.close(self._descriptor)


class SegmentPool:
    """The segments of one owner: in use, or waiting for the next version."""

    def __init__(self) -> None:
        self._free: list[Segment] = []

    def take(self, num_bytes: int) -> tuple[Segment, SegmentRef]:
        """The smallest that is large enough and that nobody reads, or a new one."""
        for segment in sorted(self._free, key=lambda s: s.num_bytes):
            # A much larger one would be held for the sake of a small version.
            if num_bytes <= segment.num_bytes <= 2 * num_bytes and (ref := segment.take()) is not None:
                self._free.remove(segment)
                return segment, ref
        segment = Segment(num_bytes)
        ref = segment.take()
        assert ref is not None, "nobody knows of a new segment"
        return segment, ref

    def give_back(self, segments: list[Segment]) -> None:
        """Those of one version, which is deleted: as many stay as it had."""
        if not segments:
            return
        self._free += segments
        num_surplus = len(self._free) - len(segments)
        for segment in self._free[:num_surplus]:
            segment.close()
        del self._free[:num_surplus]

    def close(self) -> None:
        for segment in self._free:
            segment.close()
        self._free = []


class MappedSegment:
    """A segment, usually of another process, in this one's memory."""

    def __init__(self, ref: SegmentRef) -> None:
        """
        Raises:
            StaleSegmentError: it is closed.
            SharedMemoryError: this process may not open it.
        """
        try:
            self._descriptor = os.open(f"/proc/{ref.pid}/fd/{ref.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except PermissionError as error:
            raise SharedMemoryError(
                f"process {os.getpid()} may not open the shared memory of process {ref.pid}: "
                "set weights.transport='torchstore'"
            ) from error
        except OSError as error:
            raise StaleSegmentError(f"the memory of process {ref.pid}: {error.strerror}") from error
        try:
            if os.fstat(self._descriptor).st_size != HEADER + ref.num_bytes:
                raise StaleSegmentError(f"process {ref.pid} has closed the memory")
            memory = _map(self._descriptor, HEADER + ref.num_bytes)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.data = _tensor(memory, ref.num_bytes)
        """[num_bytes] uint8."""
        self._header = memoryview(memory)[:HEADER]
        self._num_holders = 0
        self._changing = threading.Lock()
        self._is_registered = False

    @contextmanager
    def holding(self, ref: SegmentRef) -> Iterator[Tensor]:
        """The data, which nobody reuses meanwhile.

        Raises:
            StaleSegmentError: they are another version's already.
        """
        self._lock(ref)
        try:
            self._check(ref)
            yield self.data
        finally:
            self._unlock()

    def register(self) -> None:
        """Let a GPU copy from and to it directly; without effect where it does not take it."""
        if not self._is_registered:
            torch.cuda.cudart().cudaHostRegister(self.data.data_ptr(), self.data.nbytes, 0)
            self._is_registered = True

    def close(self) -> None:
        """Before the last reference goes, which frees the mapping."""
        if self._is_registered:
            torch.cuda.cudart().cudaHostUnregister(self.data.data_ptr())
        os.close(self._descriptor)

    def _check(self, ref: SegmentRef) -> None:
        expected = ref.id + ref.generation.to_bytes(8, "little")
        if self._header[: len(expected)] != expected:
            raise StaleSegmentError(f"process {ref.pid} has used the memory for another version")

    # Several tasks of one process may hold it at once, which the kernel sees as one holder.

    def _lock(self, ref: SegmentRef) -> None:
        with self._changing:
            if self._num_holders == 0:
                try:
                    fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise StaleSegmentError(f"process {ref.pid} is reusing the memory") from error
            self._num_holders += 1

    def _unlock(self) -> None:
        with self._changing:
            self._num_holders -= 1
            if self._num_holders == 0:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    @property
    def is_idle(self) -> bool:
        return self._num_holders == 0


class SegmentMaps:
    """What this process has mapped, and used in one of its latest operations."""

    def __init__(self, *, max_age: int) -> None:
        """`max_age` in operations."""
        self._max_age = max_age
        self._age = 0
        self._maps: dict[tuple[int, bytes], MappedSegment] = {}
        self._last_used: dict[tuple[int, bytes], int] = {}

    def begin_operation(self) -> None:
        """Unmap what has not been used for long: its owner may have given it up."""
        self._age += 1
        for key, mapped in list(self._maps.items()):
            if self._age - self._last_used[key] > self._max_age and mapped.is_idle:
                self._maps.pop(key).close()

    def open(self, ref: SegmentRef) -> MappedSegment:
        """
        Raises:
            StaleSegmentError: it cannot be opened (any more).
        """
        key = (ref.pid, ref.id)
        if key not in self._maps:
            self._maps[key] = MappedSegment(ref)
        self._last_used[key] = self._age
        return self._maps[key]

    def close(self) -> None:
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()


def _map(descriptor: int, size: int) -> mmap.mmap:
    return mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _tensor(memory: mmap.mmap, num_bytes: int) -> Tensor:
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    # It keeps `memory` alive.
    return torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER, count=num_bytes)
