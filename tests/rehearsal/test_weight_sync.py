"""Weight sync on the null device: contexts of the threads that copy, and page locks that are
refused.
"""

import pytest

pytestmark = pytest.mark.rehearsal

SYNC = (
    "-m",
    "benchmarks.weight_sync",
    "--device",
    "cuda",
    "--quick",
    "--layers",
    "1",
    "--repeats",
    "1",
)
REFUSED = "could not be page-locked for cuda:0 (cudaHostRegister:"


def test_every_rank_has_a_context_on_its_own_gpu_only(rehearsal):
    """Two writers, FSDP on GPUs 0 and 1, and two readers, tensor parallel on 2 and 3."""
    options = ("--only", "fsdp2_to_tp2", "--no-check")
    ended = rehearsal.python(*SYNC, *options, settings={"DEVICES": 4})
    assert ended.status == 0, ended.describe()
    assert sorted(one.physical_contexts for one in ended.counters) == [(0,), (1,), (2,), (3,)]
    assert all(one.calls["cudaHostRegister"] for one in ended.counters)
    assert REFUSED not in ended.errors


def test_refused_page_locks_are_said_once_and_the_bytes_arrive(rehearsal):
    """The benchmark compares the pulled tensors with those that were pushed; copies between host
    and GPU are real.
    """
    settings = {"DEVICES": 2, "FAIL_REGISTER": 1, "ZERO_READS": 0}
    ended = rehearsal.python(*SYNC, "--only", "one_to_one", "--no-check", settings=settings)
    assert ended.status == 0, ended.describe()
    assert ended.errors.count(REFUSED) == 2, ended.describe()
