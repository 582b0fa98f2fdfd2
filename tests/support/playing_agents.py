"""Functions that tests play as agents, and an event loop to play them in."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from rl.agents.players.plays import AgentSpec
from rl.agents.players.process import AgentProcess
from rl.types import Problem
from rl.utils.compat import exit_at_once

PLACE = f"{__name__}:obey"
DAEMON = (
    "import os, sys, time; os.getsid(0) == os.getpid() or os.setsid()\n"
    "print(os.getpid(), file=open(sys.argv[1], 'a'), flush=True); time.sleep(600)"
)
"""Program that starts a session of its own and writes its pid into a file."""

np.random.seed(0)  # as a module of a user may do


def obey(request):
    """Call the function that the request names, with the rest of it."""
    if isinstance(request, Problem):
        return [request.id, request.info["number"]]
    name, *arguments = request
    return globals()[name](*arguments)


def give(value):
    return value


def nest(depth):
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def write_value(text):
    """Write into the file of the value, as an agent could that looks for it."""
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if "memfd:value" in os.readlink(f"/proc/self/fd/{descriptor}"):
                os.pwrite(int(descriptor), text, 0)
    exit_at_once(0)


def show_variable(name):
    return [os.environ.get(name), os.getcwd(), os.environ["HOME"]]


async def wait_and_show(name):
    await asyncio.sleep(0)
    return os.environ[name]


def meet(folder, name, other):
    """Return after another play has come to the same folder; tell the own variable."""
    os.environ["MET"] = name
    open(os.path.join(folder, name), "w").close()
    while not os.path.exists(os.path.join(folder, other)):
        time.sleep(0.001)
    return os.environ["MET"]


def fail():
    print("before the error")
    raise LookupError("no such city")


def leave(code):
    sys.exit(code)


def end_at_once(code):
    os._exit(code)


def be_killed():
    print("the last line")
    os.kill(os.getpid(), signal.SIGSEGV)


def describe_process():
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    are_default = [signal.getsignal(number) is signal.SIG_DFL for number in numbers]
    return [os.getsid(0) == os.getpid(), os.read(0, 1).decode(), *are_default]


def read_scores():
    pids = ("self", os.getppid())
    return [Path(f"/proc/{pid}/oom_score_adj").read_text() for pid in pids]


def hang():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass


def kill_parent(file):
    """Start a daemon, then kill the guard of this play."""
    subprocess.Popen([sys.executable, "-c", DAEMON, file])
    while not os.path.exists(file) or not Path(file).read_text().endswith("\n"):
        time.sleep(0.001)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def draw_number():
    return float(np.random.random())


class Played:
    """Agents in a process, played by the caller's thread."""

    def __init__(self, function=PLACE, **settings):
        self._runner = asyncio.Runner()
        self.agents = AgentProcess(function, **settings)

    def run(self, coroutine):
        return self._runner.run(coroutine)

    def play(self, *command, **settings):
        return self.run(self.agents.play(AgentSpec(command=command or None, **settings)))

    def call(self, *request, **settings):
        """Return the result of a function of this module."""
        return self.play(argument=request, **settings)

    def close(self):
        self.run(self.agents.close())
        self._runner.close()
