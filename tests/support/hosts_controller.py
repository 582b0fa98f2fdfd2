"""A controller with simulated hosts, to be ended somehow: `... -m tests.support.hosts_controller HOW HOSTS`.

It starts a role on two hosts and one on a third, prints one JSON line with the pids of everything below it
and with what the actors know of their place, then does HOW: `raise`, `wait` for a signal, or `die`: a trainer
process on the second host exits, and the error goes to stdout.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

from actors import launch, members, processes
from actors.calls import ActorCallError, ActorGroup, Timeouts
from actors.launch_config import LaunchConfig, SlurmConfig
from actors.placement import Processes, place
from tests.support.launch_controller import Holder

LAUNCHES = {
    "process": LaunchConfig(hosts="process", trainer_hosts=2),
    "slurm": LaunchConfig(
        hosts="slurm",
        trainer_hosts=2,
        gpus_per_host=0,
        controller_address="127.0.0.1",
        slurm=SlurmConfig(port=members.free_port(), log_folder=os.environ.get("LOG_FOLDER", "")),
    ),
}
ROLES = Processes(
    trainer=4, trainer_threads=3, num_replicas=1, tensor_parallel_degree=1, generator_threads=2, reward=1
)
TOLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "RELAY_ROLE", "A")


async def main(how: str, where: str) -> None:
    config = LAUNCHES[where]
    placement = place(config, ROLES, num_gpus=0)
    hosts = await launch.start_hosts(config, placement)
    trainer, generator = placement.trainer, placement.generators[0]
    meshes = await asyncio.gather(
        *(
            launch.spawn_role(
                at.role,
                num_procs=at.procs_per_host,
                threads=at.threads,
                env={"A": "b"},
                host=hosts[at.hosts or ""],
            )
            for at in (trainer, generator)
        )
    )
    await launch.setup_process_group_env(meshes[0])
    holders = [mesh.spawn("holder", Holder) for mesh in meshes]
    environments = [
        {name: env.get(name) for name in TOLD}
        for holder in holders
        for _, env in (await holder.environment.call()).items()
    ]
    held = [answer for holder in holders for _, answer in (await holder.hold.call()).items()]
    this = processes.identify(os.getpid())
    assert this is not None
    below = [process.pid for process in processes.with_descendants([this]) if process != this]
    run = {"pids": below, "files": [file for _, file in held], "environments": environments}
    run["actors"] = [pid for pids, _ in held for pid in pids]
    print(json.dumps(run), flush=True)
    if how == "raise":
        raise RuntimeError("as asked")
    if how == "die":
        on_second = ActorGroup(name="trainer", mesh=holders[0].slice(hosts=1, procs=0), timeouts=Timeouts())
        started = time.monotonic()
        try:
            await on_second.call("exit_now", limit="train_s")
        except ActorCallError as error:
            print(json.dumps([str(error), time.monotonic() - started]), flush=True)
        return
    await asyncio.sleep(600)


if __name__ == "__main__":
    launch.run(main(*sys.argv[1:]))
