"""Versions of the weights, on their way from trainer to generators.

    store = WeightStore.Config().build(dtype="bfloat16")     # controller
    await store.start(mesh)                                  # now it can be handed to actors

    await store.push(version=3, state_dict=...)              # every trainer rank
    await store.announce(3)                                  # controller, after all of them
    await store.pull(version=3, state_dict=...)              # every generator rank, in place
    await store.prune()                                      # controller, after all of them

A version is a snapshot: it is published under a new key, readable once it is announced, never overwritten,
and deleted only when nothing reads it. Trainer and generator may be sharded differently.
A drawing of the whole way is in docs/architecture.md.

Push and pull return checksums of what was sent and of what then was there, for `rl.weights.checksum.check_sums`.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import uuid
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError, ProcMesh
from torch import Tensor

from rl.config.configurable import Configurable
from rl.config.effect import only_if, unless
from rl.observability.spans import span
from rl.types import BoxSum
from rl.utils.errors import RunError
from rl.utils.files import LOCK, is_unlocked, locked_folder
from rl.utils.threads import run_aside
from rl.weights.plan import lay_out, outgoing_parts, parts_of, plan_reads
from rl.weights.shared_memory import SegmentRef, this_host
from rl.weights.transport import Transport, gather_all, has_rdma
from rl.weights.types import Transfer, WeightStoreError, WeightTimeoutError
from rl.weights.volume import VersionIndex, Volume

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(kw_only=True, slots=True)
class _Progress:
    """Progress of an operation, for its error messages."""

    waiting_for: str = "the index"


class WeightStore(Configurable):
    """A handle on the store. After `start` it can be pickled and works in every process of the run."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        timeout_s: float = 120.0
        """Longest time of one push, pull or other operation."""
        keep_versions: int = 2
        """Number of the newest versions that `prune` keeps."""
        state_dict_key: str = field(default="policy", metadata=only_if("transport", "files"))
        """Name of the versions' folder in `folder`."""
        transport: Literal["auto", "torchstore", "files"] = "auto"
        """auto: shared memory between processes of one host, torchstore's messages or RDMA between hosts;
        torchstore: messages or RDMA everywhere; files: a folder that all machines share, for machines that
        cannot reach each other's memory."""
        rdma: bool = field(default=True, metadata=unless("transport", "files"))
        """Let torchstore use RDMA between hosts that have the hardware."""
        num_threads: int = 2
        """CPU threads of each rank that copy weights, besides the threads that compute."""
        folder: str | None = field(default=None, metadata=only_if("transport", "files"))
        """Absolute path of the folder for transport="files"; None: `weights` in the run's folder."""

        def __post_init__(self) -> None:
            if not self.timeout_s > 0:
                raise ValueError(f"timeout_s={self.timeout_s} must be positive")
            for name in ("keep_versions", "num_threads"):
                if getattr(self, name) < 1:
                    raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
            if self.folder is not None and self.transport != "files":
                raise ValueError(f"folder={self.folder!r} has no effect without transport='files'")
            if self.folder is not None and not Path(self.folder).expanduser().is_absolute():
                raise ValueError(
                    f"folder={self.folder!r} must be an absolute path: every machine of the run opens it"
                )
            if Path(self.state_dict_key).name != self.state_dict_key or self.state_dict_key.startswith("."):
                raise ValueError(f"state_dict_key={self.state_dict_key!r} must be the plain name of a folder")

    def __init__(self, *, config: Config, dtype: Dtype = "float32", run_folder: Path | None = None) -> None:
        """`dtype` is the generators': floating-point parameters are cast to it when they are pushed."""
        self.config = config
        self.dtype = dtype
        self._index: Any = None
        self._volumes: Any = None
        self._coordinates: list[dict[str, int]] = []
        """Place of each volume in the mesh."""
        self._hosts: list[str] = []
        """Host of each volume."""
        self._folder = _folder(config, run_folder) if config.transport == "files" else None
        self._files = ExitStack()
        """The lock of the folder."""
        self._transport: Transport | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_transport": None, "_files": None}

    async def start(self, mesh: ProcMesh) -> None:
        """Spawn a volume in each process of `mesh`, and the index in the first.

        On the trainer's mesh each rank's push stays within its process. On a separate mesh (one process is
        enough) the weights outlive the trainer.

        Raises:
            WeightStoreError: the folder for files belongs to another run, or is no store's.
        """
        async with self._operation("start") as progress:
            if self._folder is not None:
                progress.waiting_for = f"files in {self._folder}"
                await run_aside(self._make_folder, name="weight-files")
            progress.waiting_for = "the volumes"
            name = uuid.uuid4().hex[:8]
            self._volumes = mesh.spawn(f"weight_volumes_{name}", Volume)
            hosts = await self._volumes.host.call()
            self._coordinates = [dict(point) for point, _ in hosts.items()]
            self._hosts = [host for _, host in hosts.items()]
            first = mesh.slice(**dict.fromkeys(mesh.extent.labels, 0))
            self._index = first.spawn(f"weight_index_{name}", VersionIndex)

    def _make_folder(self) -> None:
        assert self._folder is not None
        self.discard()
        try:
            _check_folder(self._folder)
            locked = locked_folder(self._folder, as_what="weights.folder", otherwise="wait for its end")
            self._files.enter_context(locked)
        except ValueError as error:
            raise WeightStoreError(str(error)) from error
        self._files.callback(self._remove_files)
        self._remove_files()  # of a run that was killed

    def _remove_files(self) -> None:
        assert self._folder is not None
        for version in self._folder.glob("v*"):
            shutil.rmtree(version, ignore_errors=True)

    async def stop(self) -> None:
        """Free everything that is stored; the actors end with their mesh. Idempotent."""
        index, volumes = self._index, self._volumes
        self.forget()
        # A process that is dead or stuck frees its memory when it ends; `discard` removes files that are left.
        with suppress(WeightStoreError):
            async with self._operation("stop"):
                await run_aside(self.discard, name="weight-files")
                if index is not None:
                    await volumes.reset.call()

    def forget(self) -> None:
        """Drop the store's actors, which may be dead, without calling them; `start` may follow. Idempotent."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        self._index = self._volumes = None
        self._coordinates, self._hosts = [], []

    def discard(self) -> None:
        """Remove the files, which would outlive the processes of a run. Idempotent."""
        self._files.close()

    async def push(
        self, *, version: int, state_dict: Mapping[str, Tensor], buffer_names: Collection[str] = ()
    ) -> Transfer:
        """Send this rank's part of the weights; every rank of the trainer calls it with its own part.

        Floating-point tensors are cast to `dtype`, except the buffers in `buffer_names`. A box that several
        ranks hold is sent once, by the first that asks. A tensor that is no DTensor counts as equal on all
        ranks. The tensors must not change before the call returns.

        Raises:
            VersionExistsError: this version was pushed before.
            SharedMemoryError: there is not enough memory for all versions.
            ValueError: names a tensor whose layout cannot be sent.
            WeightTimeoutError: names version, number of tensors, rank and what was awaited.
        """
        index, rank = self._started(), current_torch_rank()
        async with self._operation("push", version=version, num_tensors=len(state_dict)) as progress:
            parts = outgoing_parts(state_dict, dtype=getattr(torch, self.dtype), buffer_names=buffer_names)
            boxes = [(part.name, part.box) for part in parts]
            mine = await index.claim.call_one(version, rank, boxes)
            outgoing = list(itertools.compress(parts, mine))
            number, here = rank % len(self._hosts), self._here()
            volume = self._volume(number)
            place: SegmentRef | Path | None = None
            if self._folder is not None:
                place = self._folder / f"v{version}" / f"rank{rank}.bin"
                progress.waiting_for = f"the file {place}"
                sums = await here.send_by_file(place, outgoing)
            elif self.config.transport == "auto" and self._hosts[number] == this_host():
                progress.waiting_for = f"volume {number}"
                place, sums = await here.send_by_memory(
                    volume, version, outgoing, num_versions=self.config.keep_versions + 1
                )
            else:
                progress.waiting_for = f"volume {number}"
                sums = await here.send_by_messages(volume, version, outgoing)
            progress.waiting_for = "the index"
            await index.register.call_one(version, number, lay_out(outgoing)[0], place)
        return Transfer(num_bytes=sum(part.num_bytes for part in outgoing), sums=tuple(sums))

    async def announce(self, version: int) -> int:
        """Make a version readable, after every rank has pushed; return its number of tensors.

        Raises:
            IncompleteVersionError: a rank's part is missing; names a tensor and the parts there are.
            VersionNotFoundError: nothing of the version was pushed.
            VersionExistsError: the version is already announced.
        """
        index = self._started()
        async with self._operation("announce", version=version):
            return await index.announce.call_one(version)

    async def versions(self) -> list[int]:
        """Return the readable versions, oldest first."""
        index = self._started()
        async with self._operation("versions"):
            return await index.versions.call_one()

    async def pull(self, *, version: int, state_dict: Mapping[str, Tensor]) -> tuple[BoxSum, ...]:
        """Fill this rank's tensors, DTensors or plain, in place; return the checksums of what is then there.

        Names and shapes are checked before anything is written. If the transfer fails, some tensors are
        already new: do not use them, pull again.

        Raises:
            VersionNotFoundError: not announced, or deleted; lists the versions there are.
            WeightMismatchError: a name is missing on one side, or a shape differs; names both.
            WeightTimeoutError: names version, number of tensors, rank and what was awaited.
        """
        index, here = self._started(), self._here()
        async with self._operation("pull", version=version, num_tensors=len(state_dict)) as progress:
            reads = plan_reads(version, parts_of(state_dict), await index.locate.call_one(version))
            progress.waiting_for = f"boxes from volumes {sorted(reads)}"
            if self._folder is not None:
                progress.waiting_for = f"files in {self._folder}"
            rdma = self.config.rdma and has_rdma()
            is_near = self.config.transport == "auto"
            sums = await gather_all(
                here.fetch(self._volume(number), version, some, is_near=is_near, rdma=rdma)
                for number, some in reads.items()
            )
        return tuple(itertools.chain.from_iterable(sums))

    async def delete(self, version: int) -> None:
        """Delete a version, announced or half pushed, and free its memory.

        Raises:
            VersionNotFoundError: the version does not exist; lists the versions there are.
        """
        index = self._started()
        async with self._operation("delete", version=version) as progress:
            await index.remove.call_one(version)
            if self._folder is not None:
                progress.waiting_for = f"files in {self._folder}"
                folder = self._folder / f"v{version}"
                await run_aside(lambda: shutil.rmtree(folder, ignore_errors=True), name="weight-files")
            else:
                progress.waiting_for = "the volumes"
                await self._volumes.drop.call(version)

    async def prune(self) -> list[int]:
        """Delete all announced versions but the `keep_versions` newest; return the deleted versions."""
        old = (await self.versions())[: -self.config.keep_versions]
        for version in old:
            await self.delete(version)
        return old

    def _volume(self, number: int) -> Any:
        return self._volumes.slice(**self._coordinates[number])

    def _started(self) -> Any:
        """Return the index."""
        if self._index is None:
            raise WeightStoreError("the weight store is not running: call start() first")
        return self._index

    def _here(self) -> Transport:
        """Return this process's threads and mapped memory, made at first use."""
        if self._transport is None:
            max_age = 4 * (self.config.keep_versions + 1)
            self._transport = Transport(num_threads=self.config.num_threads, max_age=max_age)
        return self._transport

    @asynccontextmanager
    async def _operation(
        self, name: str, *, version: int | None = None, num_tensors: int = 0
    ) -> AsyncIterator[_Progress]:
        """Run the body under the store's deadline, and re-raise remote errors with their own type.

        Raises:
            WeightTimeoutError: names operation, version, number of tensors, rank and what was awaited.
            WeightStoreError: an actor raised it, or an actor was lost.
        """
        progress = _Progress()
        of_version = "" if version is None else f" of version {version}"
        of_tensors = f" ({num_tensors} tensors)" if num_tensors else ""
        what = f"weight store: {name}{of_version}{of_tensors} on rank {current_torch_rank()}"
        try:
            with span(f"waits for the weight store ({name})", version=version):
                async with asyncio.timeout(self.config.timeout_s):
                    yield progress
        except TimeoutError as error:
            if isinstance(error, RunError):
                raise  # An inner deadline, with its own message.
            raise WeightTimeoutError(
                f"{what} not finished within timeout_s={self.config.timeout_s:g}: "
                f"waited for {progress.waiting_for}"
            ) from error
        except ActorError as error:
            if isinstance(error.exception, WeightStoreError):
                raise error.exception from None
            raise
        except SupervisionError as error:
            raise WeightStoreError(f"{what} failed: lost {progress.waiting_for}: {error}") from error


def current_torch_rank() -> int:
    """Return this process's rank, 0 where there is no process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def check_unused(config: WeightStore.Config) -> None:
    """Raise ValueError if the configured folder belongs to a running run, or is no store's."""
    if config.folder is not None:
        _check_folder(_folder(config, None))


def _check_folder(folder: Path) -> None:
    is_stores = (folder / LOCK).exists() and is_unlocked(folder / LOCK)
    if folder.exists() and any(folder.iterdir()) and not is_stores:
        raise ValueError(
            f"weights.folder: {folder} already exists and belongs to a running run, or to something else: "
            "choose another folder or weights.state_dict_key"
        )


def _folder(config: WeightStore.Config, run_folder: Path | None) -> Path:
    """Return the folder of the versions' files."""
    if config.folder is not None:
        return Path(config.folder).expanduser() / config.state_dict_key
    assert run_folder is not None, "files need weights.folder or the folder of a run"
    return run_folder / "weights" / config.state_dict_key
