"""A program on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[2]
DEADLINE_S = 40.0


class OnTerminal:
    """Context manager for a Python program on a pseudo-terminal whose input is a pipe."""

    def __init__(self, module: str, *args: str, width: int = 120, height: int = 40) -> None:
        self.output = ""
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

    def until(self, text: str) -> None:
        """Wait until the program has written the text; raise AssertionError at the deadline."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.output:
            assert self._read(deadline), f"never written, but:\n{self.output}"

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
        self.output += data.decode(errors="replace")
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
