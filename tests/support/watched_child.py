"""Process to be watched: it prints "ready", does what its second argument says, and exits when
stdin closes.

python -m tests.support.watched_child LOGS tasks
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl.observability.spans import RECORDER, TimelineConfig, span
from rl.observability.stacks import catch_signal, write_stacks_to

ROOT = Path(__file__).resolve().parent.parent.parent


@contextmanager
def watched_child(
    logs: Path, what: str, *, role: str = "trainer", rank: int = 0
) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that is ready; kill it at the end of the block."""
    command = [
        sys.executable,
        "-m",
        "tests.support.watched_child",
        str(logs),
        what,
        role,
        str(rank),
    ]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


async def wait_for_an_answer(never: asyncio.Event) -> None:
    await never.wait()


async def endpoint(never: asyncio.Event) -> None:
    await wait_for_an_answer(never)


async def tasks() -> None:
    never = asyncio.Event()
    waiting = [asyncio.create_task(endpoint(never), name=f"call {number}") for number in range(3)]
    await asyncio.sleep(0)
    print("ready", flush=True)
    await asyncio.gather(*waiting)


def hold_the_interpreter() -> None:
    """Run native code that never releases the interpreter's lock."""
    print("ready", flush=True)
    sum(itertools.repeat(0))


def thread_in_a_lock() -> None:
    def take_twice() -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    threading.Thread(target=take_twice, daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()


def main(logs: str, what: str, role: str, rank: str) -> None:
    catch_signal()
    write_stacks_to(Path(logs), role=role, rank=int(rank))
    RECORDER.start(Path(logs), role=role, rank=int(rank), timeline=TimelineConfig())
    with span("optim_step", version=7):
        if what == "tasks":
            asyncio.run(tasks())
        elif what == "native":
            hold_the_interpreter()
        else:
            thread_in_a_lock()


if __name__ == "__main__":
    main(*sys.argv[1:])
