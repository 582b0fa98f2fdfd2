"""Terminal emulator for the control sequences of a live table."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[2]
_TOKEN = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|\r\n|[\r\n]|[^\x1b\r\n]")
DEADLINE_S = 40.0


class Screen:
    """Screen of unlimited height that wraps long lines."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.lines = [""]
        self.row = self.column = 0
        self.cursor_is_shown = True
        self._rest = ""

    def feed(self, text: str) -> None:
        """Write output to the screen; raise ValueError for an unknown control sequence."""
        text = self._rest + text
        cut = text.rfind("\x1b")
        # The rest of a control sequence may come in the next piece.
        whole = len(text) if cut < 0 or _TOKEN.match(text, cut) else cut
        text, self._rest = text[:whole], text[whole:]
        for match in _TOKEN.finditer(text):
            if match[2]:
                self._control(match[1], match[2])
            elif match[0] == "\r":
                self.column = 0
            elif match[0].endswith("\n"):
                self.row, self.column = self.row + 1, 0 if "\r" in match[0] else self.column
                self._have_row()
            else:
                self._put(match[0])

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n")

    def _put(self, character: str) -> None:
        if self.column == self.width:
            self.row, self.column = self.row + 1, 0
            self._have_row()
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
        self.column += 1

    def _control(self, argument: str, kind: str) -> None:
        if kind == "A":
            self.row = max(0, self.row - int(argument or 1))
        elif kind == "K" and argument == "2":
            self.lines[self.row] = ""
        elif kind in "hl" and argument == "?25":
            self.cursor_is_shown = kind == "h"
        elif kind != "m":
            raise ValueError(f"\\x1b[{argument}{kind}")

    def _have_row(self) -> None:
        while len(self.lines) <= self.row:
            self.lines.append("")


class OnTerminal:
    """Context manager for a Python program on a pseudo-terminal whose input is a pipe."""

    def __init__(self, module: str, *args: str, width: int = 120, height: int = 40) -> None:
        self.screen = Screen(width)
        self._module, self._args = module, args
        self._size = struct.pack("HHHH", height, width, 0, 0)

    def __enter__(self) -> OnTerminal:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, self._size)
        self.process = _start(self._module, self._args, output=slave)
        os.close(slave)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        if self._master >= 0:
            os.close(self._master)

    def go_on(self) -> None:
        """Send the line of input that the program waits for."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def until(self, shown: Callable[[str], bool]) -> str:
        """Return the screen's text once `shown` accepts it; raise AssertionError at the deadline."""
        deadline = time.monotonic() + DEADLINE_S
        while not shown(self.screen.text):
            assert self._read(deadline), f"never shown, but:\n{self.screen.text}"
        return self.screen.text

    def end(self) -> int:
        """Read the remaining output and return the exit status."""
        deadline = time.monotonic() + DEADLINE_S
        while self._read(deadline):
            pass
        return self.process.wait(timeout=DEADLINE_S)

    def hang_up(self) -> None:
        """Close the terminal."""
        os.close(self._master)
        self._master = -1

    def _read(self, deadline: float) -> bool:
        """Read available output; return False if there is none."""
        ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
        try:
            data = os.read(self._master, 65536) if ready else b""
        except OSError:  # the program has ended
            return False
        self.screen.feed(data.decode())
        return bool(data)


def output_of(module: str, *args: str) -> str:
    """Return the program's output to a pipe, after sending it all input lines."""
    process = _start(module, args, output=subprocess.PIPE)
    written, _ = process.communicate(b"\n" * 100, timeout=DEADLINE_S)
    assert process.returncode == 0
    return written.decode()


def _start(module: str, args: Sequence[str], *, output: int) -> subprocess.Popen[bytes]:
    # Libraries imported by a test set COLUMNS; here the size of the terminal must decide.
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return subprocess.Popen(
        [sys.executable, "-m", module, *args],
        cwd=ROOT,
        env={**inherited, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output if output != subprocess.PIPE else None,
    )
