"""What calls of the sandboxed Python cost: one after another, and hundreds at the same moment.

    python -m benchmarks.python_sandbox

Prints milliseconds of one call, median of 50, beside those of an interpreter that starts and ends
(`python -I -S -c pass`); CPU time of a call, in its process and in this one; and seconds until 256 calls
that are made at once are answered. The last line is a JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time

from rl.tools.python_sandbox import PythonSandbox

NUM_ALONE, NUM_AT_ONCE = 50, 256


def cpu_s() -> float:
    """Of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


async def measure(sandbox: PythonSandbox) -> dict[str, float]:
    await sandbox.run("1")
    alone_s, bare_s = [], []
    for _ in range(NUM_ALONE):
        started = time.perf_counter()
        result = await sandbox.run("6 * 7")
        alone_s.append(time.perf_counter() - started)
        assert result.text == "42", result
        started = time.perf_counter()
        subprocess.run([os.path.realpath(sys.executable), "-I", "-S", "-c", "pass"], env={}, check=True)
        bare_s.append(time.perf_counter() - started)
    started, cpu_before_s = time.perf_counter(), cpu_s()
    results = await asyncio.gather(*[sandbox.run("6 * 7") for _ in range(NUM_AT_ONCE)])
    at_once_s, cpu_call_s = time.perf_counter() - started, (cpu_s() - cpu_before_s) / NUM_AT_ONCE
    return {
        "call_ms": round(1e3 * statistics.median(alone_s), 1),
        "bare_ms": round(1e3 * statistics.median(bare_s), 1),
        "cpu_ms": round(1e3 * cpu_call_s, 1),
        "at_once_s": round(at_once_s, 2),
        "num_ok": sum(result.reason == "ok" for result in results),
    }


def main() -> None:
    sandbox = PythonSandbox.Config().build()
    figures = asyncio.run(measure(sandbox))
    print(f"one call {figures['call_ms']} ms, a bare interpreter {figures['bare_ms']} ms")
    print(f"CPU time of a call {figures['cpu_ms']} ms")
    print(f"{NUM_AT_ONCE} calls at once {figures['at_once_s']} s, {figures['num_ok']} of them ok")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
