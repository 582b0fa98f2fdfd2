"""Shared memory between processes: reuse, slow readers, owners that die, too little memory."""

import asyncio
import os
import signal
import threading
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from rl.weights import shared_memory
from rl.weights.shared_memory import (
    HEADER,
    Segment,
    SegmentMaps,
    SegmentPool,
    SegmentRef,
    identify_host,
)
from rl.weights.types import SharedMemoryError, VersionNotFoundError
from tests.support.forked import limit_files, run_in_fork

SIZE = 1000


@pytest.fixture
def maps():
    maps = SegmentMaps(max_age=2)
    yield maps
    maps.close()


def take(pool, num_bytes=SIZE, version=1):
    return pool.take(version, num_bytes, num_versions=3)


def test_reused_memory_has_a_new_generation(maps):
    pool = SegmentPool()
    first, ref = take(pool)
    with maps.hold(ref) as old:
        pass
    pool.drop(1)
    second, new = take(pool)
    assert second is first
    assert (new.id, new.generation) == (ref.id, ref.generation + 1)
    with pytest.raises(VersionNotFoundError, match="another version"), maps.hold(ref):
        pass
    with maps.hold(new) as data:
        assert data.data_ptr() == old.data_ptr()
    assert take(pool)[0] is not first
    pool.close()


def test_descriptor_that_is_a_pipe_by_now_is_a_lost_version(maps):
    reading, writing = os.pipe()
    segment, ref = take(SegmentPool())
    num_open = len(os.listdir("/proc/self/fd"))
    with (
        pytest.raises(VersionNotFoundError, match="another version"),
        maps.hold(replace(ref, descriptor=reading)),
    ):
        pass
    assert len(os.listdir("/proc/self/fd")) == num_open
    segment.close()
    os.close(reading)
    os.close(writing)


def test_process_that_may_not_open_the_memory_is_told_another_transport(maps, monkeypatch):
    segment, ref = take(SegmentPool())
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", Mock(side_effect=PermissionError))
        with pytest.raises(SharedMemoryError, match="transport='torchstore'"), maps.hold(ref):
            pass
    segment.close()


def test_memory_is_not_reused_while_it_is_read(maps):
    pool = SegmentPool()
    first, ref = take(pool)
    first.data.fill_(1)
    with maps.hold(ref) as data, maps.hold(ref):
        pool.drop(1)
        other, _ = take(pool)
        assert other is not first
        other.data.fill_(2)
        assert data.unique().tolist() == [1]
    pool.close()


def test_killed_reader_releases_its_lock(maps):
    segment, ref = take(SegmentPool())

    def die():
        with maps.hold(ref):
            held = segment.take() is None
            os.kill(os.getpid(), signal.SIGKILL if held else signal.SIGTERM)
        return ""

    assert run_in_fork(die)[0] == -signal.SIGKILL
    assert segment.take() is not None
    segment.close()


def test_killed_owner_leaves_readers_their_data_and_no_file(maps):
    names = set(os.listdir("/dev/shm"))
    reading, writing = os.pipe()
    waiting, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        segment, ref = take(SegmentPool())
        segment.data.fill_(5)
        os.write(writing, f"{ref.descriptor} {ref.id.hex()}".encode())
        os.read(waiting, 1)
        os._exit(0)
    descriptor, identity = os.read(reading, 1000).decode().split()
    ref = SegmentRef(
        host=identify_host(), pid=pid, descriptor=int(descriptor), id=bytes.fromhex(identity),
        num_bytes=SIZE,
        generation=1,
    )  # fmt: skip
    with maps.hold(ref) as data:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert data.unique().tolist() == [5]
    with (
        pytest.raises(VersionNotFoundError, match=f"the memory of process {pid}"),
        maps.hold(ref),
    ):
        pass
    assert set(os.listdir("/dev/shm")) <= names
    for fd in (reading, writing, waiting, told):
        os.close(fd)


def test_pool_keeps_only_segments_that_the_latest_version_can_use():
    pool = SegmentPool()
    versions = {
        version: {take(pool, version=version)[0] for _ in range(2)} for version in (1, 2, 3)
    }
    for version in versions:
        pool.drop(version)
    assert {take(pool, version=4)[0] for _ in range(2)} == versions[3]
    assert take(pool, version=4)[0] not in versions[1] | versions[2]
    pool.close()


def test_unused_segments_are_unmapped(maps):
    refs = [take(SegmentPool())[1] for _ in range(2)]
    with maps.hold(refs[0]):
        pass
    for _ in range(3):
        maps.begin_operation()
        with maps.hold(refs[1]):
            pass
    assert [pid_and_id[1] for pid_and_id in maps._maps] == [refs[1].id]


def test_refused_page_locks_are_logged_once_and_made_in_a_thread_that_keeps_to_its_gpu(
    maps, monkeypatch, caplog
):
    refs, calls = [take(SegmentPool())[1] for _ in range(3)], []
    devices: list[torch.device] = []

    def answer(call, error):
        calls.append((call, threading.current_thread().name))
        return error

    driver, errors = Mock(), iter([0, 2, 2])
    driver.cudaError.success = 0
    driver.cudaHostRegister.side_effect = lambda *_: answer("lock", next(errors))
    driver.cudaHostUnregister.side_effect = lambda *_: answer("unlock", 0)
    driver.cudaGetErrorString.return_value = "out of memory"
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)

    async def prepare(ref):
        with maps.hold(ref):
            await maps.prepare(ref, device=torch.device("cuda", 1))

    for ref in refs * 2:
        asyncio.run(prepare(ref))
    thread = maps._thread
    maps.close()
    assert thread.stop(timeout_s=5)
    assert calls == [(call, "weight-memory") for call in ("lock", "lock", "lock", "unlock")]
    assert devices == [torch.device("cuda", 1)] * 3
    (warning,) = caplog.messages
    assert "not be page-locked for cuda:1 (cudaHostRegister: out of memory)" in warning
    assert "ulimit -l unlimited" in warning


def test_too_little_memory_raises_instead_of_killing(monkeypatch):
    def reserve():
        limit_files(HEADER + 100)
        try:
            Segment(SIZE * 1000)
        except SharedMemoryError as error:
            return str(error)
        return "reserved"

    status, answer = run_in_fork(reserve)
    assert status == 0
    assert answer.startswith("0.001 GB of shared memory could not be allocated (File too large); ")
    monkeypatch.setattr(shared_memory, "free_memory", lambda: 11 * 10**9)
    with pytest.raises(
        SharedMemoryError, match=r"need 12 GB .* and 11 GB are free: lower weights\.keep"
    ):
        take(SegmentPool(), 4 * 10**9)
