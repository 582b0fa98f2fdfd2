"""Controller that ends in a given way: `python -m tests.support.launch_controller HOW [HOSTS]`.

It starts roles, prints one JSON line with the pids and shared-memory files of the run, and does
HOW. On this machine: `hear` a first signal and save for ever, `hear and save` (the same, and be
done with it), `stuck` (waiting, with an actor that blocks), or `break`: an actor process is killed,
so that its child has no parent, a third role does not come up, and the run raises an error. With
`start` it only prints "starting" and starts a role that never comes up.

On HOSTS, `process` or `slurm`, a role has two hosts and another a third, and the line also says
what the actors know of their place. HOW is `wait` for a signal, or `die`: a trainer process on the
second host exits, and the error goes to stdout.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from monarch.actor import Actor, endpoint

from actors.cluster.group import ActorGroup
from actors.config import LaunchConfig, SlurmConfig, Timeouts
from actors.launch import launcher as launch
from actors.launch.calls import ActorCallError
from actors.launch.cleanup import free_port, list_with_descendants
from actors.launch.placement import Placement
from rl.loop.stop_request import StopRequest
from rl.utils import processes
from rl.utils.errors import StopRequestedError
from tests.support.placed import placed

TOLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "RELAY_ROLE", "A")


class Holder(Actor):
    """Actor that holds a child process and a shared-memory file, which must not be left behind."""

    @endpoint
    async def hold(self) -> tuple[list[int], str]:
        file = Path(f"/dev/shm/relay-test-{os.getpid()}")
        descriptor = os.open(file, os.O_CREAT | os.O_RDWR)
        os.ftruncate(descriptor, mmap.PAGESIZE)
        self.memory = mmap.mmap(descriptor, mmap.PAGESIZE)
        self.child = subprocess.Popen(["sleep", "600"])
        return [os.getpid(), self.child.pid], str(file)

    @endpoint
    async def block(self) -> None:
        time.sleep(600)

    @endpoint
    async def environment(self) -> dict[str, str]:
        return dict(os.environ)

    @endpoint
    async def exit_now(self) -> None:
        os._exit(3)


async def here(how: str, stop: StopRequest, launcher: launch.Launcher) -> None:
    if how == "start":
        print("starting", flush=True)
        # Python runs this module first of all.
        folders = [os.environ["SLOW_START"], os.environ.get("PYTHONPATH", os.getcwd())]
        env = {"PYTHONPATH": os.pathsep.join(folders)}
        await launcher.spawn_role(Placement(role="slow", num_procs=2), env=env)
    roles = await asyncio.gather(
        *(launcher.spawn_role(Placement(role=name, num_procs=1)) for name in ("first", "second"))
    )
    meshes = [role.mesh for role in roles]
    held = [await mesh.spawn("holder", Holder).hold.call_one() for mesh in meshes]
    pids = [pid for pids, _ in held for pid in pids]
    print(json.dumps({"pids": pids, "files": [file for _, file in held]}), flush=True)
    if how == "break":
        crashed = processes.identify(pids[0])
        assert crashed is not None
        processes.kill(crashed)
        while processes.is_alive(crashed):
            await asyncio.sleep(0.01)
        # The memory mappings of a dead process are unknown.
        Path(held[0][1]).unlink()
        third = launcher.spawn_role(
            Placement(role="third", num_procs=1), env={"PYTHONHOME": "/nowhere"}
        )
        failures = await asyncio.gather(third, return_exceptions=True)
        assert "starting role 'third'" in str(failures[0])
        raise RuntimeError("as asked")
    if how == "stuck":
        await meshes[0].spawn("stuck", Holder).block.call()
    if how in ("hear", "hear and save"):
        await train(stop, save_s=600 if how == "hear" else 0)


async def train(stop: StopRequest, *, save_s: float) -> None:
    """Behave like a loop that is stopped while it waits for a batch."""
    try:
        with stop.listen(lambda: "saving"):
            print("training", flush=True)
            await stop.run_until_stop(asyncio.sleep(600))
    except StopRequestedError:
        # The kernel gives a second signal to another thread.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        print("saves", flush=True)
        await asyncio.sleep(save_s)
        print("saved", flush=True)
        raise


async def on_hosts(how: str, hosts: str, launcher: launch.Launcher) -> None:
    if hosts == "process":
        config = LaunchConfig(hosts="process", trainer_hosts=2)
    else:
        config = LaunchConfig(
            hosts="slurm",
            trainer_hosts=2,
            gpus_per_host=0,
            controller_address="127.0.0.1",
            slurm=SlurmConfig(port=free_port(), log_folder=os.environ["LOG_FOLDER"]),
        )
    placement = placed(config, trainer=4, trainer_threads=3, generator_threads=2)
    await launcher.start_hosts(config, placement)
    roles = await asyncio.gather(
        *(
            launcher.spawn_role(at, env={"A": "b"})
            for at in (placement.trainer, placement.generators[0])
        )
    )
    await launch.setup_process_group_env(roles[0])
    holders = [role.mesh.spawn("holder", Holder) for role in roles]
    environments = [
        {name: env.get(name) for name in TOLD}
        for holder in holders
        for _, env in (await holder.environment.call()).items()
    ]
    held = [answer for holder in holders for _, answer in (await holder.hold.call()).items()]
    this = processes.identify(os.getpid())
    assert this is not None
    below = [process.pid for process in list_with_descendants([this]) if process != this]
    run = {"pids": below, "files": [file for _, file in held], "environments": environments}
    run["actors"] = [pid for pids, _ in held for pid in pids]
    print(json.dumps(run), flush=True)
    if how == "die":
        on_second = ActorGroup(
            name="trainer", mesh=holders[0].slice(hosts=1, procs=0), timeouts=Timeouts()
        )
        started = time.monotonic()
        try:
            await on_second.call("exit_now", timeout="train_s")
        except ActorCallError as error:
            print(json.dumps([str(error), time.monotonic() - started]), flush=True)
        return
    await asyncio.sleep(600)


if __name__ == "__main__":
    how, *hosts = sys.argv[1:]
    if hosts:
        launch.run(partial(on_hosts, how, hosts[0]))
    else:
        request = StopRequest()
        launch.run(partial(here, how, request), stop=request)
