"""Controller with simulated hosts that ends in a given way: `... -m tests.support.hosts_controller HOW
HOSTS`.

It starts a role on two hosts and one on a third, prints one JSON line with the pids of everything below it
and with what the actors know of their place, then does HOW: `wait` for a signal, or `die`: a trainer process
on the second host exits, and the error goes to stdout.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from functools import partial

from actors import launch
from actors.calls import ActorCallError, ActorGroup
from actors.config import LaunchConfig, SlurmConfig, Timeouts
from actors.processes import free_port, with_descendants
from rl.utils import processes
from tests.support.launch_controller import Holder
from tests.support.placed import placed

LAUNCHES = {
    "process": LaunchConfig(hosts="process", trainer_hosts=2),
    "slurm": LaunchConfig(
        hosts="slurm",
        trainer_hosts=2,
        gpus_per_host=0,
        controller_address="127.0.0.1",
        slurm=SlurmConfig(port=free_port(), log_folder=os.environ.get("LOG_FOLDER", "")),
    ),
}
ROLES = {"trainer": 4, "trainer_threads": 3, "generator_threads": 2}
TOLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "RELAY_ROLE", "A")


async def main(how: str, where: str, launcher: launch.Launcher) -> None:
    config = LAUNCHES[where]
    placement = placed(config, **ROLES)
    await launcher.start_hosts(config, placement)
    roles = await asyncio.gather(
        *(launcher.spawn_role(at, env={"A": "b"}) for at in (placement.trainer, placement.generators[0]))
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
    below = [process.pid for process in with_descendants([this]) if process != this]
    run = {"pids": below, "files": [file for _, file in held], "environments": environments}
    run["actors"] = [pid for pids, _ in held for pid in pids]
    print(json.dumps(run), flush=True)
    if how == "die":
        on_second = ActorGroup(name="trainer", mesh=holders[0].slice(hosts=1, procs=0), timeouts=Timeouts())
        started = time.monotonic()
        try:
            await on_second.call("exit_now")
        except ActorCallError as error:
            print(json.dumps([str(error), time.monotonic() - started]), flush=True)
        return
    await asyncio.sleep(600)


if __name__ == "__main__":
    launch.run(partial(main, sys.argv[1], sys.argv[2]))
