"""Memory that the trainer keeps on a CPU, and holes in it that are given back."""

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
give_back_freed_memory(at_least=500_000_000)
kept_as_little = resident_mb()
give_back_freed_memory(at_least=100_000_000)
print(kept, kept_as_little, resident_mb())
"""


def test_freed_memory_is_kept_below_what_lives_and_given_back_when_asked():
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True
    )
    kept, kept_as_little, given_back = map(float, ran.stdout.split())
    assert kept > 200
    assert kept_as_little > 200
    assert given_back < 100
