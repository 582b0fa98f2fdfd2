"""Shared memory of the versions: its owner in each trainer process, and readers on the same host.

A segment is a memfd: anonymous POSIX shared memory that other processes of the same user open as
`/proc/<pid>/fd/<number>`. It has no name in a file system: the kernel frees it when the last
process that holds it ends, two runs cannot collide, and the size of /dev/shm does not matter.

Touching a page for the first time costs several times as much as copying it, so an owner keeps
segments for later versions (`SegmentPool`), and readers and writers keep them mapped
(`SegmentMaps`). A reader or writer holds a shared flock on the segment (the kernel releases it when
the process ends) and checks that the generation is the expected one. Reuse needs the exclusive
lock, and starts a new generation.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import psutil
import torch
from monarch.actor import Actor, endpoint
from torch import Tensor

from rl.utils.processes import use_threads
from rl.utils.threads import WorkerThread
from rl.weights.boxes import Box, PackedPart
from rl.weights.types import SharedMemoryError, VersionExistsError, VersionNotFoundError

logger = logging.getLogger(__name__)

HEADER = mmap.PAGESIZE
"""Bytes before the data: the segment's id (16), then its generation (8)."""
_ID_BYTES = 16
MADV_POPULATE_WRITE = 23
"""From linux/mman.h; Python's mmap does not name it."""
Offsets = tuple[int, ...]


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
def identify_host() -> str:
    """Return a name of this host, the same in all processes that can share segments.

    They have the same boot, pid namespace and user: a reader opens /proc/<pid> of the owner.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}-{os.geteuid()}"


def free_memory() -> int:
    """Return the bytes that this process can still allocate, on the machine and in its cgroup."""
    free, group = psutil.virtual_memory().available, Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # no cgroup, or no limit ("max")
        limit = int((group / "memory.max").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # The kernel drops cached files that are not in use before it kills for lack of memory.
        used = int((group / "memory.current").read_text()) - int(counts.get("inactive_file", 0))
        free = min(free, limit - used)
    return free


class Segment:
    """A shared-memory segment owned by this process."""

    def __init__(self, num_bytes: int) -> None:
        """Allocate every page; raise SharedMemoryError if there is too little memory."""
        self.num_bytes = num_bytes
        self._descriptor = os.memfd_create("relay-weights", os.MFD_CLOEXEC)
        size = HEADER + num_bytes
        try:
            if size > free_memory():
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            # Every page now: memory that is missing later would kill the process by SIGBUS.
            os.posix_fallocate(self._descriptor, 0, size)
        except OSError as error:
            os.close(self._descriptor)
            raise SharedMemoryError(
                f"{size / 1e9:.3g} GB of shared memory could not be allocated "
                f"({os.strerror(error.errno or 0)}); {free_memory() / 1e9:.3g} GB of memory are "
                "free here"
            ) from error
        self.data = _open_data(self._descriptor, num_bytes)
        self._ref = SegmentRef(
            host=identify_host(),
            pid=os.getpid(),
            descriptor=self._descriptor,
            id=os.urandom(_ID_BYTES),
            num_bytes=num_bytes,
            generation=0,
        )

    def take(self) -> SegmentRef | None:
        """Start a new use under a new generation; return None while a process still reads."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        # Written under the lock: a reader that opens the segment from now on sees that its version
        # has gone, and a reader that was faster has kept the lock.
        self._ref = replace(self._ref, generation=self._ref.generation + 1)
        os.pwrite(self._descriptor, self._ref.header, 0)
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return self._ref

    def close(self) -> None:
        """Refuse new readers. The memory is freed when the last process unmaps it."""
        os.close(self._descriptor)


class SegmentPool:
    """The segments of one owner: those of each version, and free ones for the next version."""

    def __init__(self) -> None:
        self._used: dict[int, list[Segment]] = {}
        self._free: list[Segment] = []
        self._checked_bytes = 0

    def take(
        self, version: int, num_bytes: int, *, num_versions: int
    ) -> tuple[Segment, SegmentRef]:
        """Return a free segment of this size that nobody reads, or a new one.

        Raises:
            SharedMemoryError: `num_versions` of this size do not fit; checked at the first call of
                a size.
        """
        needed = num_bytes * num_versions
        if needed > self._checked_bytes and needed > free_memory():
            raise SharedMemoryError(
                f"weights need {num_bytes * num_versions / 1e9:.3g} GB of shared memory in process "
                f"{os.getpid()} ({num_versions} versions: those kept and the one being written), "
                f"and {free_memory() / 1e9:.3g} GB are free: lower weights.keep_versions (now "
                f"{num_versions - 1}), or set weights.transport='files'"
            )
        self._checked_bytes = max(self._checked_bytes, needed)
        segment, ref = self._reuse(num_bytes) or self._allocate(num_bytes)
        self._used.setdefault(version, []).append(segment)
        return segment, ref

    def _reuse(self, num_bytes: int) -> tuple[Segment, SegmentRef] | None:
        for segment in self._free:
            if segment.num_bytes != num_bytes:
                continue
            ref = segment.take()
            if ref is not None:
                self._free.remove(segment)
                return segment, ref
        return None

    def _allocate(self, num_bytes: int) -> tuple[Segment, SegmentRef]:
        segment = Segment(num_bytes)
        ref = segment.take()
        assert ref is not None, "a new segment has no readers"
        return segment, ref

    def drop(self, version: int, *, reuse: bool = True) -> None:
        """Free the segments of a deleted version for the next one, and close older free ones.

        Without `reuse` they are closed: no version of their size follows.
        """
        segments = self._used.pop(version, [])
        if not reuse:
            self._close(segments)
        elif segments:
            # Free segments that the deleted version could not use are of another size, or are
            # being read: the next version would hardly use them either.
            self._close(self._free)
            self._free = segments

    def close(self) -> None:
        for segments in (self._free, *self._used.values()):
            self._close(segments)
        self._free, self._used = [], {}

    def _close(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            segment.close()


class Volume(Actor):
    """Actor that owns a trainer process's stored boxes, which are views of its shared memory.

    Processes of its host copy out of the memory themselves; other hosts ask for boxes in messages.
    """

    def __init__(self) -> None:
        use_threads(1)  # The process is a trainer's, which computes in another thread.
        self._pool = SegmentPool()
        self._stored: dict[int, dict[tuple[str, Offsets], tuple[Box, Tensor]]] = {}
        """Boxes by version, and within it by name and offsets, each with its memory."""

    @endpoint
    async def reserve(
        self, version: int, parts: Sequence[PackedPart], num_bytes: int, num_versions: int
    ) -> SegmentRef:
        """Return shared memory for one rank's boxes, which the rank then maps and fills.

        The memory is the segment of a deleted version that has this size and that no process reads
        any more, or is allocated. This actor owns it until the version is dropped.

        Args:
            parts: the boxes at their offsets in the memory, which has `num_bytes`.
            num_versions: versions that must fit at the same time: those kept and this one.

        Raises:
            VersionExistsError: a box is there already; a version is never overwritten.
            SharedMemoryError: there is too little memory.
        """
        # Several ranks may share a volume, so a version grows with each rank that pushes it.
        stored = self._stored.setdefault(version, {})
        for part in parts:
            if (part.name, part.box.offsets) in stored:
                raise VersionExistsError(
                    f"version {version} is already pushed: push a new one, or delete this one"
                )
        segment, ref = self._pool.take(version, num_bytes, num_versions=num_versions)
        for part in parts:
            stored[part.name, part.box.offsets] = (part.box, part.view(segment.data))
        return ref

    @endpoint
    async def read(
        self, version: int, parts: Sequence[tuple[Offsets, PackedPart]], num_bytes: int
    ) -> np.ndarray:
        """Return boxes as one message, [num_bytes] uint8.

        Args:
            parts: the offsets of a stored box, and the part of it to send, at its place in the
                message.
        """
        message = np.empty(num_bytes, dtype=np.uint8)  # Monarch carries numpy faster than tensors.
        flat = torch.from_numpy(message)
        stored = self._stored.get(version, {})
        for offsets, part in parts:
            if (part.name, offsets) not in stored:
                raise VersionNotFoundError(
                    f"version {version} was deleted while it was being pulled"
                )
            box, tensor = stored[part.name, offsets]
            part.view(flat).copy_(box.slice_inner(tensor, inner=part.box))
        return message

    @endpoint
    async def drop(self, version: int, reuse: bool = True) -> None:
        self._stored.pop(version, None)
        self._pool.drop(version, reuse=reuse)

    @endpoint
    async def reset(self) -> None:
        self._stored.clear()
        self._pool.close()


@dataclass(kw_only=True, slots=True)
class _Mapping:
    """A segment mapped into this process; the memory goes with the last reference to `data`."""

    data: Tensor
    last_used: int = 0
    """Number of the operation that used the segment last."""
    is_prepared: bool = False
    is_pinned: bool = False
    """Whether the memory is page-locked for direct copies by a GPU."""

    def prepare(self, device: torch.device) -> str | None:
        """Touch all pages, and lock them for a GPU; return the driver's reason if it refuses."""
        if self.is_prepared:
            return None
        self.is_prepared = True
        # MAP_POPULATE would hold Python's lock for half a second per GB. Linux before 5.14 refuses
        # this advice: copies touch the pages then.
        address, size = ctypes.c_void_p(self.data.data_ptr()), ctypes.c_size_t(self.data.nbytes)
        ctypes.CDLL(None).madvise(address, size, MADV_POPULATE_WRITE)
        if device.type == "cpu":
            return None

        torch.cuda.set_device(device)  # A thread starts on GPU 0, and would open a context there.
        cudart = torch.cuda.cudart()
        error = cudart.cudaHostRegister(self.data.data_ptr(), self.data.nbytes, 0)
        self.is_pinned = error == cudart.cudaError.success
        return None if self.is_pinned else cudart.cudaGetErrorString(error)

    def unpin(self) -> None:
        if self.is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self.data.data_ptr())


class SegmentMaps:
    """The segments, usually of other processes, that this process has mapped and used recently."""

    def __init__(self, *, max_age: int) -> None:
        """`max_age` is the number of operations that an unused segment stays mapped."""
        self.max_age = max_age
        self._num_operations = 0
        self._maps: dict[tuple[int, bytes], _Mapping] = {}
        self._has_warned = False
        # The thread that touches, locks and unlocks pages. It makes no other CUDA call: after a
        # refused lock, a thread's next kernel would raise the error.
        self._thread: WorkerThread | None = None

    def begin_operation(self) -> None:
        """Unmap segments that have not been used for long: the owner may have given them up."""
        self._num_operations += 1
        # A mapped segment's memory is not freed, even when its owner has closed it.
        for key, mapped in list(self._maps.items()):
            if self._num_operations - mapped.last_used > self.max_age:
                self._release(key)

    @contextmanager
    def hold(self, ref: SegmentRef) -> Iterator[Tensor]:
        """Yield the data, [num_bytes] uint8, which the owner does not reuse within this context.

        Raises:
            VersionNotFoundError: the owner has closed the segment, or it holds another version.
            SharedMemoryError: this process may not open the segment.
        """
        descriptor = _open_locked(ref)
        try:
            key = (ref.pid, ref.id)
            if key not in self._maps:
                self._maps[key] = _Mapping(data=_open_data(descriptor, ref.num_bytes))
            self._maps[key].last_used = self._num_operations
            yield self._maps[key].data
        finally:
            # Closing is not enough: the mapping keeps a duplicate of the descriptor, with its lock.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    async def prepare(self, ref: SegmentRef, *, device: torch.device) -> None:
        """Touch the pages of a segment under `hold`, in a thread, and lock them for a GPU."""
        if self._thread is None:
            self._thread = WorkerThread("weight-memory")
        reason = await self._thread.run(self._maps[ref.pid, ref.id].prepare, device)
        # Once, as every version would meet the same limit.
        if reason is not None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%.3g GB of shared memory could not be page-locked for %s (cudaHostRegister: %s): "
                "weights are copied, but slower. Raise the limit of locked memory (`ulimit -l "
                "unlimited`; a container's `--ulimit memlock=-1`), and see that enough memory is "
                "free",
                ref.num_bytes / 1e9, device, reason,
            )  # fmt: skip

    def unmap(self, ref: SegmentRef) -> None:
        """Unmap a segment that is not used again; its memory goes when its owner closes it too."""
        if (ref.pid, ref.id) in self._maps:
            self._release((ref.pid, ref.id))

    def _release(self, key: tuple[int, bytes]) -> None:
        mapped = self._maps.pop(key)
        if self._thread is not None:
            self._thread.submit(mapped.unpin)  # The memory stays until then.

    def close(self) -> None:
        for key in list(self._maps):
            self._release(key)
        if self._thread is not None:
            self._thread.stop(timeout_s=0.0)
            self._thread = None


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
        raise VersionNotFoundError(f"the memory of process {ref.pid}: {error.strerror}") from error
    # An error means that the segment is being reused, or that another file has the number by now.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.pread(descriptor, len(ref.header), 0) == ref.header:
            return descriptor
    os.close(descriptor)
    raise VersionNotFoundError(f"process {ref.pid} has used the memory for another version")


def _open_data(descriptor: int, num_bytes: int) -> Tensor:
    """Return the data behind a segment's header, [num_bytes] uint8."""
    memory = mmap.mmap(descriptor, HEADER + num_bytes, mmap.MAP_SHARED)
    # The tensor keeps `memory` alive.
    return torch.frombuffer(memory, dtype=torch.uint8)[HEADER:]
