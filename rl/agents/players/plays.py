"""One play of an agent: what to start with which limits, and what became of it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

from rl.utils.printing import describe_value
from rl.utils.processes import signal_name

PlayEnd = Literal["ok", "error", "time limit", "output limit", "folder limit", "ended", "lost"]
"""Reason why a play ended: the agent's own end, with exit status 0 or another, one of its limits,
the owner, who asked for it, or the loss of the agent's guard."""
EPISODE_VARIABLES = (
    "OPENAI_BASE_URL",
    "OPENAI_API_BASE",
    "OPENAI_API_KEY",
    "ANTHROPIC_BASE_URL",
    "ANTHROPIC_API_KEY",
    "RELAY_EPISODE_URL",
)
"""Variables by which clients find the model, with values of each episode."""
MIB = 1 << 20
NOT_FOUND, NOT_STARTED = 127, 126
"""Exit statuses of a command that does not exist or cannot be started, as of a shell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSpec:
    """An agent to start, and its limits.

    Raises ValueError for values that no play can have.

    Example:
        AgentSpec(
            command=("python", "agent.py"),
            env={"OPENAI_BASE_URL": "http://127.0.0.1:8000/v1"},
            files={"task.md": "Write a poem into poem.txt."},
            collect=("poem.txt",),
            time_limit_s=60.0,
        )
    """

    command: tuple[str, ...] | None = None
    """Program with its arguments, looked up in PATH; None: the function of the process."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables beside those of the owner's environment that hold no secret."""
    argument: Any = None
    """Argument of the function, which must pickle."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts by their path in the working folder, written before the start."""
    collect: tuple[str, ...] = ()
    """Paths in the working folder of the files to return."""
    time_limit_s: float = 600.0
    """Longest time in seconds from the start of the agent."""
    max_output_bytes: int = 16 * MIB
    """Most bytes of stdout and stderr together."""
    max_folder_bytes: int = 1024 * MIB
    """Most disk space of the folder of a play; also the largest file that the agent can write."""
    max_files: int = 50_000
    """Most files and folders in the folder of a play."""
    keep_home: bool = False
    """Leave HOME and XDG_CACHE_HOME to the agent, for what is installed there."""

    def __post_init__(self) -> None:
        # Private copies: frozen, and of a type that pickles.
        object.__setattr__(self, "env", dict(self.env))
        object.__setattr__(self, "files", dict(self.files))
        _check_command(self.command)
        for name, value in self.env.items():
            if not (_is_text(name) and name and "=" not in name and _is_text(value)):
                raise ValueError(
                    f"env={{{describe_value(name)}: {describe_value(value)}}}: name and value must "
                    "be texts without NUL, the name not empty and without '='"
                )
        for path in self.files:
            _check_path(path, name="files")
            if not isinstance(self.files[path], str):
                raise ValueError(f"files[{path!r}] must be a text")
            for parent in PurePosixPath(path).parents:
                if str(parent) in self.files:
                    raise ValueError(f"files: {str(parent)!r} cannot be a file and hold {path!r}")
        if isinstance(self.collect, str):
            raise ValueError(f"collect={self.collect!r} must be a tuple of paths")
        for path in self.collect:
            _check_path(path, name="collect")
        _check_limits(self)


def _check_limits(spec: AgentSpec) -> None:
    if not 0 < spec.time_limit_s < float("inf"):
        raise ValueError(f"time_limit_s={spec.time_limit_s!r} must be finite and above 0")
    for name in ("max_output_bytes", "max_folder_bytes", "max_files"):
        if getattr(spec, name) < 1:
            raise ValueError(f"{name}={getattr(spec, name)!r} must be at least 1")


def _check_command(command: Any) -> None:
    if command is None:
        return
    is_tuple = isinstance(command, tuple | list) and len(command) > 0
    if not is_tuple or not all(map(_is_text, command)) or not command[0]:
        raise ValueError(
            f"command={describe_value(command)} must be a tuple of texts without NUL, such as "
            "('python', 'agent.py')"
        )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def _check_path(path: Any, *, name: str) -> None:
    """Raise ValueError unless the path names something below the working folder."""
    parts = path.split("/") if _is_text(path) else [""]
    if not set(parts).isdisjoint(("", ".", "..")):
        raise ValueError(
            f"{name}: {describe_value(path)} must be a relative path in the working folder, such "
            "as 'src/main.py': without '.', '..', NUL, or '/' at its beginning or end"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentResult:
    """What became of one play."""

    reason: PlayEnd
    status: int
    """Exit status as in `subprocess.Popen.returncode`: negative for a signal."""
    output: str
    """Last part of stdout and stderr, with the traceback of a function's error."""
    value: Any = None
    """Value that the function returned, if that is JSON; else None, and the output says why."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files to collect that exist, by their path; of a large one the beginning."""
    num_left: int = 0
    """Processes that the agent left at its own end, without those below them; they were ended."""
    wall_s: float
    """Seconds from the start of the agent to the end of all that it started."""
    cpu_s: float
    """Processor time of the agent and of what it started, as far as it was waited for."""

    def describe(self) -> str:
        """Return the end of the play in a few words, for messages."""
        if self.reason in ("ok", "ended", "lost"):
            return self.reason
        if self.reason != "error":
            return f"stopped at its {self.reason}"
        how = f"exit status {self.status}"
        if self.status < 0:
            how = f"ended by {signal_name(-self.status)}"
        # The guard's own kills have other reasons. A shell tells of its command's end by 128 + 9.
        is_killed = self.status in (-signal.SIGKILL, 128 + signal.SIGKILL)
        return f"{how}, perhaps because memory ran out" if is_killed else how
