"""What of a process's stacks belongs into an error's message: those that are not idle, a line each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rl.observability.stacks import ORDER

MAX_STACKS = 6
MAX_FRAMES = 4
"""Of each."""
ROOT = f"{Path(__file__).resolve().parent.parent.parent}/"
PACKAGES = ("/site-packages/", "/dist-packages/", "/lib/python3.", "<")
"""What paths of code have in them that is neither this project's nor its user's."""
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_WAITING = {
    ("threading.py", "wait"), ("threading.py", "wait_for"), ("threading.py", "acquire"), ("queue.py", "get"),
    ("selectors.py", "select"), ("thread.py", "_worker"), ("connection.py", "wait"), ("socket.py", "accept"),
}  # fmt: skip
"""Innermost calls of the standard library in which a thread waits to be given something."""
_OF_EVERY_PROCESS = {"process_main.py", "worker_thread.py", "launch.py", "interpreter.py"}
"""Our files that a thread may be in which has nothing to do."""


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def name(self) -> str:
        return self.file.rpartition("/")[2]

    @property
    def is_ours(self) -> bool:
        """Of this project or of its user, and not of a package or of Python."""
        return not any(part in self.file for part in PACKAGES)

    def __str__(self) -> str:
        return f"{self.file.removeprefix(ROOT)}:{self.line} {self.function}"


@dataclass(frozen=True, slots=True)
class Stack:
    """Of a thread or a task."""

    title: str
    frames: tuple[Frame, ...]
    """Innermost first."""

    @property
    def is_task(self) -> bool:
        return self.title.startswith("Task ")

    @property
    def is_idle(self) -> bool:
        """Whether it waits to be given something to do; a task of ours always waits for something."""
        ours = [f for f in self.frames if f.is_ours and f.name not in _OF_EVERY_PROCESS]
        if self.is_task:
            return not ours
        if not self.frames:
            return True
        innermost = self.frames[0]
        waits = (innermost.name, innermost.function) in _WAITING
        return not ours and (waits or innermost.name in _OF_EVERY_PROCESS)


def parse_stacks(text: str) -> list[Stack]:
    """What `rl.observability.stacks.ask` gave, stack by stack."""
    found: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if line.endswith(ORDER):
            found.append((line.removesuffix(ORDER).strip(), []))
        elif found and (match := _FRAME.match(line)):
            found[-1][1].append(Frame(match["file"], int(match["line"]), match["function"]))
    return [Stack(title, tuple(frames)) for title, frames in found]


def excerpt(text: str, *, max_stacks: int = MAX_STACKS) -> list[str]:
    """A line for each stack that is not idle, threads before tasks; what is no stack is given as it is."""
    stacks = parse_stacks(text)
    if not stacks:
        return [line for line in text.splitlines() if line.strip()]
    busy = sorted((s for s in stacks if not s.is_idle), key=lambda s: s.is_task)
    if not busy:
        return ["no thread is busy"]
    lines = [_line(stack) for stack in busy[:max_stacks]]
    return [*lines, f"and {len(busy) - max_stacks} more"] if len(busy) > max_stacks else lines


def _line(stack: Stack) -> str:
    # From the first call that is ours: what a package does within it is told by its innermost call.
    first = next((i for i, frame in enumerate(stack.frames) if frame.is_ours), 0)
    shown = list(stack.frames[first : first + MAX_FRAMES])
    if first:
        shown.insert(0, stack.frames[0])
    return f"{'task' if stack.is_task else 'thread'} at {' < '.join(map(str, shown))}"
