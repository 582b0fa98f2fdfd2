"""Time to recover a lost process: `python -m benchmarks.recovery [--quick] [--cases ...] [--repeats 3]`.

The actors of the tiny config (a trainer and a generator of two threads each, a reward process) with a random
model. An idle process is killed by SIGKILL; measured are the seconds until

    generator, generator_host    the generator serves the weights that it served before
    reward                       a score has arrived
    trainer, trainer_host        the checkpoint is loaded and its weights are served

`_host` kills the process that simulates a host, and with it all actors there. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from actors import launch
from actors.backend import RewardClient, TrainerClient
from actors.cluster import Cluster
from actors.config import LaunchConfig, RecoveryConfig
from actors.members import LogSettings
from actors.parity import ParityText
from configs.sum_digits import tiny
from rl.models.hf import write_random_model
from rl.utils.errors import RunError
from rl.utils.processes import kill
from tests.support.scored import replied

CASES = ("generator", "reward", "trainer", "generator_host", "trainer_host")
LIMIT_S = 300.0
TOKENS = np.arange(2, 18, dtype=np.int32)


class Room:
    """The actors of a run, and what the run does with them after a loss."""

    def __init__(self, fleet: Cluster, folder: Path) -> None:
        self.fleet = fleet
        self.checkpoint = str(folder / "checkpoint")
        assert fleet.reward is not None
        self.rewarder = RewardClient(fleet.reward, num_procs=1)

    async def publish(self) -> None:
        await self.fleet.pool.serve(await self.fleet.pool.push())

    async def generator(self) -> None:
        while self.fleet.pool.up():
            await asyncio.sleep(0.01)
        await self.fleet.pool.wait_until_one_is_up()

    async def reward(self) -> None:
        ((score,),) = await self.rewarder.score([[replied("[ANSWER] 42")]])
        assert score.failure is None

    async def trainer(self) -> None:
        sample = self.fleet.pool.parity
        assert sample is not None
        try:
            await TrainerClient(self.fleet.trainer).compute_logprobs([sample.sample])
        except RunError as error:
            await self.fleet.restart_trainer(error)
        await TrainerClient(self.fleet.trainer).load_checkpoint(self.checkpoint)
        await self.publish()

    def kill(self, case: str) -> None:
        launcher = self.fleet.launcher
        role = "generator" if case.startswith("generator") else case.removesuffix("_host")
        if case.endswith("_host"):
            assert launcher.hosts is not None
            victims = launcher.hosts.processes["generator0" if role == "generator" else role]
        else:
            victims = [p for at in launcher.roles if at.name == role for p in at.local.values()]
        for victim in victims:
            kill(victim)


async def measure(case: str, repeats: int, folder: Path, launcher: launch.Launcher) -> list[float]:
    config = tiny()
    fleet_config = replace(
        config,
        recovery=RecoveryConfig(max_restarts=repeats, pause_s=0.0),
        launch=LaunchConfig(hosts="process" if case.endswith("_host") else "this"),
    )
    spec = replace(config.model, batch_invariant=True)
    assets = write_random_model(folder / "assets", spec=spec, seed=0)
    fleet = Cluster(
        fleet_config,
        launcher=launcher,
        store=config.weights.build(dtype="float32"),
        parity=ParityText(token_ids=TOKENS, max_diff=0.0),
        model_spec=spec,
        hf_assets_path=str(assets),
        rubric=config.task.build().rubric(seed=0),
        trainer_arguments={"model_spec": spec, "failure_folder": str(folder)},
        logs=LogSettings(folder=folder / "logs", console_level="ERROR"),
    )
    await fleet.start()
    room = Room(fleet, folder)
    await TrainerClient(fleet.trainer).save_checkpoint(room.checkpoint)
    await room.publish()
    recover = {"reward": room.reward, "trainer": room.trainer, "trainer_host": room.trainer}
    times_s = []
    for _ in range(repeats):
        room.kill(case)
        started = time.monotonic()
        await asyncio.wait_for(recover.get(case, room.generator)(), LIMIT_S)
        times_s.append(round(time.monotonic() - started, 2))
    await room.fleet.close()
    return times_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one repeat of a generator and a reward process")
    options = parser.parse_args()
    if options.quick:
        options.cases, options.repeats = ("generator", "reward"), 1
    found: dict[str, list[float]] = {}
    for case in options.cases:
        with tempfile.TemporaryDirectory() as folder:
            found[case] = launch.run(partial(measure, case, options.repeats, Path(folder)))
        print(f"{case}: {', '.join(f'{s:.1f}' for s in found[case])} s", flush=True)
    print(json.dumps({"benchmark": "recovery", "repeats": options.repeats, "recovery_s": found}))


if __name__ == "__main__":
    main()
