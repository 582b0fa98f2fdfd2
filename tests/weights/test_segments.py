"""Shared memory between processes: reuse, readers that are slow, owners that die, memory that is missing."""

import os
import signal
from pathlib import Path

import pytest
import torch

from rl.weights.errors import SharedMemoryError, StaleSegmentError
from rl.weights.room import Room, SharedMemoryRoom
from rl.weights.segments import (
    HEADER,
    MappedSegment,
    Segment,
    SegmentMaps,
    SegmentPool,
    SegmentRef,
    free_memory,
    this_host,
)
from tests.support.forked import in_copy, limit_files

SIZE = 1000


def used(segment):
    """A reference to a new use of a segment that nobody reads."""
    ref = segment.take()
    assert ref is not None
    return ref


def test_what_one_process_writes_another_reads():
    segment = Segment(SIZE)
    ref = used(segment)
    segment.data.fill_(3)

    def read_and_write():
        with MappedSegment(ref).holding(ref) as data:
            answer = str(data.sum().item())
            data[0] = 7
            return answer

    assert in_copy(read_and_write) == (0, "3000")
    assert segment.data[:2].tolist() == [7, 3]
    segment.close()


def test_memory_that_is_given_back_is_used_again_under_a_new_generation():
    pool = SegmentPool()
    first, ref = pool.take(SIZE)
    mapped = MappedSegment(ref)
    pool.give_back([first])
    second, new = pool.take(SIZE - 10)
    assert second is first
    assert (new.id, new.generation) == (ref.id, ref.generation + 1)
    with pytest.raises(StaleSegmentError, match="another version"), mapped.holding(ref):
        pass
    with mapped.holding(new) as data:
        assert data.data_ptr() == mapped.data.data_ptr()
    third, _ = pool.take(SIZE)
    assert third is not first
    pool.give_back([second, third])
    pool.close()


def test_memory_is_not_used_again_while_somebody_reads_it():
    pool = SegmentPool()
    first, ref = pool.take(SIZE)
    first.data.fill_(1)
    mapped = MappedSegment(ref)
    with mapped.holding(ref) as data, mapped.holding(ref):
        pool.give_back([first])
        other, _ = pool.take(SIZE)
        assert other is not first
        other.data.fill_(2)
        assert data.unique().tolist() == [1]
    pool.give_back([other])
    assert {pool.take(SIZE)[0] for _ in range(1)} <= {first, other}
    pool.close()


def test_a_reader_that_is_killed_holds_nothing_any_more():
    segment = Segment(SIZE)
    ref = used(segment)

    def die():
        with MappedSegment(ref).holding(ref):
            held = segment.take() is None
            os.kill(os.getpid(), signal.SIGKILL if held else signal.SIGTERM)
        return ""

    assert in_copy(die)[0] == -signal.SIGKILL
    assert segment.take() is not None
    segment.close()


def test_an_owner_that_is_killed_leaves_readers_their_data_and_no_file():
    names = set(os.listdir("/dev/shm"))
    reading, writing = os.pipe()
    go_on, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        segment = Segment(SIZE)
        segment.data.fill_(5)
        ref = used(segment)
        text = f"{ref.descriptor} {ref.id.hex()} {ref.generation}"
        os.write(writing, text.encode())
        os.read(go_on, 1)
        os._exit(0)
    descriptor, identity, generation = os.read(reading, 1000).decode().split()
    ref = SegmentRef(
        host=this_host(), pid=pid, descriptor=int(descriptor), id=bytes.fromhex(identity), num_bytes=SIZE,
        generation=int(generation),
    )  # fmt: skip
    mapped = MappedSegment(ref)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with mapped.holding(ref) as data:
        assert data.unique().tolist() == [5]
    with pytest.raises(StaleSegmentError, match=f"the memory of process {pid}"):
        MappedSegment(ref)
    assert set(os.listdir("/dev/shm")) <= names
    for fd in (reading, writing, go_on, told):
        os.close(fd)


def test_the_pool_keeps_as_much_as_one_version_needs():
    pool = SegmentPool()
    versions = [[pool.take(SIZE)[0] for _ in range(2)] for _ in range(3)]
    for version in versions:
        pool.give_back(version)
    kept = {pool.take(SIZE)[0] for _ in range(2)}
    assert kept == set(versions[-1])
    assert pool.take(SIZE)[0] not in {segment for version in versions for segment in version}


def test_a_large_segment_is_not_held_for_a_small_version():
    pool = SegmentPool()
    large, _ = pool.take(10 * SIZE)
    pool.give_back([large])
    assert pool.take(SIZE)[0] is not large
    assert pool.take(9 * SIZE)[0] is large


def test_maps_that_are_not_used_for_long_are_given_up():
    segments = [Segment(SIZE) for _ in range(2)]
    refs = [used(segment) for segment in segments]
    maps = SegmentMaps(max_age=2)
    first = maps.open(refs[0])
    for _ in range(3):
        maps.begin_operation()
        second = maps.open(refs[1])
    assert maps.open(refs[1]) is second
    assert maps.open(refs[0]) is not first
    maps.close()
    for segment in segments:
        segment.close()


def test_too_little_memory_is_an_error_and_no_signal():
    def reserve():
        limit_files(HEADER + 100)
        try:
            Segment(SIZE * 1000)
        except SharedMemoryError as error:
            return str(error)
        return "reserved"

    status, answer = in_copy(reserve)
    assert status == 0
    assert answer.startswith("0.001 GB of shared memory could not be had (File too large); ")
    assert answer.endswith(" GB of memory are free here")


def test_a_closed_segment_frees_its_memory_when_the_last_view_goes():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    size = 64 * 2**20
    segment = Segment(size)
    view = segment.data[:10]
    with_it = resident()
    segment.close()
    del segment
    assert with_it - resident() < size // 2
    del view
    assert with_it - resident() > size // 2


def test_free_memory_is_a_part_of_the_machines():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < free_memory() < total
    assert str(os.geteuid()) in this_host()


def room(num_bytes, *, free, host="a"):
    return Room(host=host, box_bytes=[num_bytes], num_versions=3, free_bytes=free)


def test_room_counts_all_ranks_of_a_host_once_and_the_memory_before_the_first():
    rooms = SharedMemoryRoom()
    rooms.promise(room(0, free=100), rank=0, num_bytes=20)
    # What rank 0 has written meanwhile is no longer free, and not counted twice.
    rooms.promise(room(0, free=40), rank=1, num_bytes=10)
    rooms.promise(room(0, free=10), rank=0, num_bytes=20)
    rooms.promise(room(0, free=100, host="b"), rank=2, num_bytes=30)
    with pytest.raises(SharedMemoryError) as caught:
        rooms.promise(room(0, free=40), rank=3, num_bytes=4 * 10**9)
    assert str(caught.value) == (
        "weights need 12 GB of shared memory (3 versions of 4 GB: those kept and the one being written), and "
        "1e-07 GB of memory are free: lower weights.keep_versions (now 2), or send them through files "
        "(weights.transport='files')"
    )
    rooms.promise(room(0, free=40), rank=3, num_bytes=3)


def test_an_empty_segment_is_allowed():
    segment = Segment(0)
    ref = used(segment)
    with MappedSegment(ref).holding(ref) as data:
        assert data.numel() == 0
    assert torch.equal(segment.data, data)
    segment.close()
