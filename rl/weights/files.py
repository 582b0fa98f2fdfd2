"""Weights on their way through files, for machines that share a file system and nothing faster.

    <folder>/<state_dict_key>/
        v3/              announced: written with torch.distributed.checkpoint, parts of any layout
        v4.not-announced/

The calls, their order and their errors are those of `WeightStore`. What touches files does so in a thread
of its own, so that the deadline holds whatever the file system does; a push, in which ranks meet, does so in
the thread of their collectives, and the deadline is that of the collectives.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from monarch.actor import ProcMesh
from torch import Tensor

from rl.distributed.first_rank import on_first_rank
from rl.distributed.process_group import CollectiveTimeoutError, awaiting
from rl.distributed.shards import unwrapped
from rl.distributed.threads import use_threads
from rl.folder_lock import is_free, lock
from rl.training.checkpoint import read_tensors, saved_names, write_tensors
from rl.weights.box_sums import sums_of
from rl.weights.errors import (
    IncompleteVersionError,
    VersionExistsError,
    VersionNotFoundError,
    WeightMismatchError,
    WeightStoreError,
)
from rl.weights.plan import check_names
from rl.weights.shards import parts_of
from rl.weights.store import Dtype, Transfer, WeightStore
from rl.weights.volumes import VolumeStats
from rl.worker_thread import WorkerThread

_PARTIAL = ".not-announced"
T = TypeVar("T")


class FileWeightStore(WeightStore):
    """Every process that pushes or pulls sees the same `folder`."""

    @dataclass(kw_only=True, slots=True)
    class Config(WeightStore.Config):
        transport: Literal["auto", "torchstore", "files"] = "files"

    is_collective = True

    def __init__(self, *, config: WeightStore.Config, folder: str | Path, dtype: Dtype = "float32") -> None:
        super().__init__(config=config, dtype=dtype)
        self.folder = _inside(folder, config)
        self._is_started = False
        self._made_parent = False
        self._lock_fd: int | None = None
        self._group: dist.ProcessGroup | None = None
        self._thread: WorkerThread | None = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_thread": None, "_lock_fd": None}

    async def start(self, mesh: ProcMesh) -> None:
        """Make the folder, also in place of what a killed run left there; `mesh` has no part in it.

        Raises:
            WeightStoreError: it is there already, and another run's, or somebody else's.
        """
        del mesh
        await self._in_thread("start", self._start)

    def _start(self) -> None:
        parent = self.folder.parent
        self._made_parent = not parent.exists()
        parent.mkdir(parents=True, exist_ok=True)
        was_locked = _lock_file(self.folder).exists()
        try:
            self._lock_fd = lock(
                parent, name=_lock_file(self.folder).name, as_what="weights.folder", otherwise="wait for it"
            )
        except ValueError as error:
            raise WeightStoreError(f"{_taken(self.folder)} ({error})") from error
        if self.folder.exists():
            if not was_locked:
                self._unlock()
                raise WeightStoreError(_taken(self.folder))
            shutil.rmtree(self.folder)  # of a run that was killed
        self.folder.mkdir()
        self._is_started = True

    def _unlock(self) -> None:
        if self._lock_fd is not None:
            _lock_file(self.folder).unlink(missing_ok=True)
            os.close(self._lock_fd)
            self._lock_fd = None

    async def stop(self) -> None:
        """Remove all files. Idempotent."""
        # What a file system that hangs does not remove stays for `discard`.
        with suppress(WeightStoreError):
            if self._is_started:
                await self._in_thread("stop", self.discard)
        if self._thread is not None:
            self._thread.stop(timeout_s=1.0)
            self._thread = None

    def forget(self) -> None:
        """As `WeightStore.forget`; the files stay for `discard`."""
        super().forget()
        if self._thread is not None:
            self._thread.stop(timeout_s=1.0)
            self._thread = None

    def discard(self) -> None:
        """Remove all files; those of another run, with which this one could not start, stay."""
        if self._is_started:
            self._is_started = False
            shutil.rmtree(self.folder, ignore_errors=True)
            self._unlock()
            if self._made_parent:
                with suppress(OSError):  # another store is in it too
                    self.folder.parent.rmdir()

    async def push(
        self, *, version: int, state_dict: Mapping[str, Tensor], buffer_names: Collection[str] = ()
    ) -> Transfer:
        """As `WeightStore.push`; what several ranks hold is written once, by one of them."""
        self._check_started()
        dtype, partial = getattr(torch, self.dtype), self._partial(version)
        async with self._operation("push", version=version, num_tensors=len(state_dict)):
            sent = {
                part.name: unwrapped(state_dict[part.name].detach()).to(
                    part.dtype_to_send(dtype, buffer_names=buffer_names)
                )
                for part in parts_of(state_dict)
            }
            group = self._all_ranks()
            try:
                with awaiting(f"push of version {version}"):
                    on_first_rank(lambda _: self._claim(version), None, group=group)
                    files = write_tensors(partial, sent, staged=None, group=group)
            except CollectiveTimeoutError:
                raise
            except OSError as error:
                raise WeightStoreError(
                    f"weight store: version {version} was not written to {partial}: {error}"
                ) from error
        return Transfer(num_bytes=sum(written.num_bytes for written in files.values()), sums=sums_of(sent))

    async def announce(self, version: int) -> int:
        """As `WeightStore.announce`: the folder gets its name."""
        return await self._in_thread("announce", self._announce, version, version=version)

    def _announce(self, version: int) -> int:
        self._check_started()
        partial = self._partial(version)
        if self._announced(version).is_dir():
            raise VersionExistsError(f"version {version} is already announced")
        if not partial.is_dir():
            raise VersionNotFoundError(f"nothing of version {version} was pushed")
        if not (partial / ".metadata").is_file():
            raise IncompleteVersionError(
                f"version {version} is incomplete: the ranks that pushed it did not finish {partial}"
            )
        num_tensors = len(saved_names(partial))
        partial.rename(self._announced(version))
        return num_tensors

    async def versions(self) -> list[int]:
        """The readable versions, oldest first."""
        return await self._in_thread("versions", self._versions)

    def _versions(self) -> list[int]:
        self._check_started()
        return sorted(version for version, is_announced in self._found() if is_announced)

    async def pull(self, *, version: int, state_dict: Mapping[str, Tensor]) -> Transfer:
        """As `WeightStore.pull`; each rank reads its own part, without the others."""
        return await self._in_thread(
            "pull", self._read, version, state_dict, version=version, num_tensors=len(state_dict)
        )

    def _read(self, version: int, state_dict: Mapping[str, Tensor]) -> Transfer:
        self._check_started()
        folder = self._announced(version)
        if not folder.is_dir():
            raise VersionNotFoundError(self._what_is_there(version))
        parts = parts_of(state_dict)
        shapes = saved_names(folder)
        check_names(version, stored=set(shapes), wanted=state_dict.keys())
        for part in parts:
            if shapes[part.name] != tuple(part.box.global_shape):
                raise WeightMismatchError(
                    f"{part.name!r} has shape {shapes[part.name]} in the store "
                    f"and {tuple(part.box.global_shape)} here"
                )
        wanted: dict[str, Any] = {part.name: unwrapped(state_dict[part.name].detach()) for part in parts}
        read_tensors(folder, wanted, group=None)
        return Transfer(num_bytes=sum(part.local.nbytes for part in parts), sums=sums_of(state_dict))

    async def delete(self, version: int) -> None:
        """As `WeightStore.delete`."""
        await self._in_thread("delete", self._delete, version, version=version)

    def _delete(self, version: int) -> None:
        self._check_started()
        folders = [f for f in (self._announced(version), self._partial(version)) if f.is_dir()]
        if not folders:
            raise VersionNotFoundError(self._what_is_there(version))
        for folder in folders:
            shutil.rmtree(folder)

    async def stats(self) -> VolumeStats:
        """As `WeightStore.stats`: files, and their bytes."""
        return await self._in_thread("stats", self._stats)

    def _stats(self) -> VolumeStats:
        self._check_started()
        sizes = [file.stat().st_size for file in self.folder.glob("v*/*")]
        return VolumeStats(num_boxes=len(sizes), num_bytes=sum(sizes))

    async def _in_thread(
        self,
        name: str,
        function: Callable[..., T],
        *args: Any,
        version: int | None = None,
        num_tensors: int = 0,
    ) -> T:
        """An operation's result, with the deadline of all.

        Not in the loop's own thread, which a file system that hangs would hold. One at a time: a late read
        cannot write into tensors that were read again.
        """
        if self._thread is None:
            self._thread = WorkerThread("weight-files")
        async with self._operation(name, version=version, num_tensors=num_tensors) as progress:
            progress.waiting_for = f"files in {self.folder}"
            await self._thread.run(use_threads, 1)
            return await self._thread.run(function, *args)

    def _announced(self, version: int) -> Path:
        return self.folder / f"v{version}"

    def _partial(self, version: int) -> Path:
        return self.folder / f"v{version}{_PARTIAL}"

    def _claim(self, version: int) -> None:
        if self._announced(version).is_dir():
            raise VersionExistsError(f"version {version} is already announced")
        try:
            self._partial(version).mkdir()
        except FileExistsError as error:
            raise VersionExistsError(f"version {version} is already pushed") from error

    def _found(self) -> Iterator[tuple[int, bool]]:
        """Version, and whether it is announced."""
        for name in os.listdir(self.folder):
            yield int(name.removeprefix("v").removesuffix(_PARTIAL)), not name.endswith(_PARTIAL)

    def _what_is_there(self, version: int) -> str:
        announced = sorted(number for number, is_announced in self._found() if is_announced)
        partial = sorted(number for number, is_announced in self._found() if not is_announced)
        return (
            f"version {version} is not in the store; announced are {announced}, pushed and not announced are "
            f"{partial}"
        )

    def _check_started(self) -> None:
        if not self._is_started:
            raise WeightStoreError("the weight store is not running: call start() first")
        if not self.folder.is_dir():
            raise WeightStoreError(
                f"weight store: there is no {self.folder}: weights.folder must be on a file system that all "
                "machines of the run share"
            )

    def _all_ranks(self) -> dist.ProcessGroup | None:
        """A group of its own, on the CPU, whose collectives have this store's deadline."""
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.config.timeout_s))
        return self._group


def check_unused(config: WeightStore.Config) -> None:
    """Raise ValueError if another run has its files where this one is to have them, or somebody else has."""
    if config.folder is None:
        return
    folder = _inside(config.folder, config)
    if folder.exists() and not (_lock_file(folder).exists() and is_free(_lock_file(folder))):
        raise ValueError(f"weights.folder={config.folder!r}: {_taken(folder)}")


def make_store(config: WeightStore.Config, *, dtype: Dtype, run_folder: Path) -> WeightStore:
    """The store of a run, with the transport that its config names."""
    if config.transport == "files":
        return FileWeightStore(config=config, folder=config.folder or run_folder / "weights", dtype=dtype)
    return config.build(dtype=dtype)


def _inside(folder: str | Path, config: WeightStore.Config) -> Path:
    return Path(folder).expanduser().absolute() / config.state_dict_key


def _lock_file(folder: Path) -> Path:
    """Held while a store has this folder, and the sign that it is a store's."""
    return folder.with_name(f".{folder.name}.lock")


def _taken(folder: Path) -> str:
    return (
        f"{folder} is there already, of a run that is going on, or of somebody else: choose another folder "
        "or weights.state_dict_key"
    )
