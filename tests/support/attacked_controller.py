"""A controller with one actor, and an attacker of it: `python -m tests.support.attacked_controller
ROLE ...`.

`controller ISOLATE PORT` prints a JSON line about itself once its actor runs, and ends when stdin
closes. Both connect to PORT, where the test listens on loopback. `attacker USER NAME ...` becomes
USER, attaches to Monarch's sockets of these names and tries to run code; it prints "refused" if
there is no such socket for it, or the user of the code.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys

from monarch.actor import Actor, attach_to_workers, endpoint

from actors.config import LaunchConfig
from actors.launch.launcher import Launcher, run
from actors.launch.placement import Placement
from tests.support.placed import placed

ATTACK_S = 60.0


def connects(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Victim(Actor):
    @endpoint
    async def look(self, port: int) -> dict[str, object]:
        return {
            "actor": os.getpid(),
            "actor_connects": connects(port),
            "secret": os.environ.get("A_TEST_TOKEN"),
        }


class Intruder(Actor):
    @endpoint
    async def user(self) -> int:
        return os.getuid()


async def control(launcher: Launcher, *, isolate: bool | None, port: int) -> None:
    launch = LaunchConfig(isolate_network=isolate)
    print(await launcher.start_hosts(launch, placed(launch)), flush=True)
    role = await launcher.spawn_role(Placement(role="victim", num_procs=1))
    seen = await role.mesh.spawn("victim", Victim).look.call_one(port)
    here = {"pid": os.getpid(), "user": os.getuid(), "connects": connects(port)}
    print(json.dumps(here | seen), flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def attack(names: list[str]) -> int:
    host = attach_to_workers(ca="trust_all_connections", workers=[f"ipc://@{names[0]}"])
    mesh = host.spawn_procs(per_host={"procs": 1}, name="intruders")
    user: int = await mesh.spawn("intruder", Intruder).user.call_one()
    return user


def attacker(user: int, names: list[str]) -> str:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    reached = []
    for name in names:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(f"\0{name}") == 0:
                reached.append(name)
    if not reached:
        return "refused"
    for name in reached:
        try:
            return str(asyncio.run(asyncio.wait_for(attack([name]), ATTACK_S / len(reached))))
        except Exception as error:  # noqa: BLE001  (the next socket may be the right one)
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
    return "reached"


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    if what == "attacker":
        print(attacker(int(arguments[0]), arguments[1:]), flush=True)
        os._exit(0)
    isolate, port = {"None": None, "True": True, "False": False}[arguments[0]], int(arguments[1])
    run(lambda launcher: control(launcher, isolate=isolate, port=port))
