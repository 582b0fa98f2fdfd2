"""Memory that processes keep on a CPU, and holes in it that are given back."""

import subprocess
import sys

SCRIPT = """
from pathlib import Path
from rl.utils.processes import give_back_freed_memory, keep_freed_memory
def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6
keep_freed_memory()
blocks = [b"x" * 1_000_000 for _ in range(200)]
del blocks[:100], blocks[:-1]
kept = resident_mb()
give_back_freed_memory()
print(kept, resident_mb())
"""


def test_freed_memory_is_kept_below_what_lives_and_given_back_when_asked():
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True
    )
    kept, given_back = map(float, ran.stdout.split())
    assert kept > 200
    assert given_back < 100


GROWTH = """
from pathlib import Path
from rl.utils.processes import FreedMemory, keep_freed_memory
def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6
def leave_holes(num):
    blocks = [b"x" * 1_000_000 for _ in range(num)]
    lasting.append(blocks.pop())
keep_freed_memory()
lasting = []
freed = FreedMemory(most_bytes=100_000_000)
for num in (60, 300, 60):
    leave_holes(num)
    before = resident_mb()
    freed.give_back_if_much()
    print(before - resident_mb())
"""


def test_freed_memory_is_given_back_only_when_it_has_grown_much():
    ran = subprocess.run(
        [sys.executable, "-c", GROWTH], capture_output=True, text=True, timeout=60, check=True
    )
    little, much, little_again = map(float, ran.stdout.split())
    assert abs(little) < 5
    assert much > 200
    # Although the holes of the last time are still counted as free by the allocator.
    assert abs(little_again) < 5


THREADS = """
from pathlib import Path
from rl.utils.processes import share_freed_memory
from rl.utils.threads import WorkerThread
def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6
def leave_holes():
    blocks = [b"x" * 50_000 for _ in range(800)]
    lasting.append(blocks.pop())
share_freed_memory()
lasting = []
threads = [WorkerThread(f"{i}") for i in range(8)]
threads[0].submit(leave_holes).result()
before = resident_mb()
for thread in threads[1:]:
    thread.submit(leave_holes).result()
print(resident_mb() - before)
"""


def test_threads_take_what_another_thread_has_freed():
    ran = subprocess.run(
        [sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=60, check=True
    )
    # 40 MB for each thread, if each kept its own.
    assert float(ran.stdout) < 40
