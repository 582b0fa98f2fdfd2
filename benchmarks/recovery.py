"""How long a run is without what it has lost: `python -m benchmarks.recovery [--cases ...] [--repeats 3]`.

The actors of the tiny config (a trainer and a generator of two threads each, a reward process) with a model
that is not warmed up. A process is killed by SIGKILL when nothing is asked of it; seconds from then until

    generator, spare, generator_host    the generator serves again what it served before; `spare`: from a
                                        process that was started before
    reward                              a score is there
    trainer, trainer_host               the checkpoint is loaded, and its weights are served

`_host` kills the process that simulates a host, and with it all actors there. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from actors import hosts, launch
from actors.backend import ActorLearner, ActorPublisher, ActorScorer
from actors.canary import LogprobCanary
from actors.fleet import Fleet, close_fleet, start_fleet
from actors.launch_config import LaunchConfig
from actors.processes import kill
from actors.revive import revive_trainer
from actors.roles import LogSettings
from actors.supervision import RecoveryConfig
from actors.sync_check import SyncCheck
from configs.sum_digits import tiny
from rl.errors import RunError
from rl.models.starting_point import write_random_model
from rl.tasks.sum_digits import make_problem
from rl.types import Completion, Prompt, Rollout, Turn

CASES = ("generator", "spare", "reward", "trainer", "generator_host", "trainer_host")
LIMIT_S = 300.0
TOKENS = np.arange(2, 18, dtype=np.int32)


def rollout() -> Rollout:
    completion = Completion(
        token_ids=TOKENS,
        logprobs=np.zeros(len(TOKENS), dtype=np.float32),
        policy_versions=np.zeros(len(TOKENS), dtype=np.int32),
        finish_reason="stop",
    )
    prompt = Prompt(problem=make_problem([12, 30]), token_ids=TOKENS)
    turn = Turn(messages=(), prompt_ids=TOKENS, completion=completion, text="[ANSWER] 42")
    return Rollout(prompt=prompt, sample=0, turns=(turn,))


class Room:
    """The actors, and what a run does with them after a loss."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self.fleet = fleet
        self.checkpoint = str(folder / "checkpoint")
        self.scorer = ActorScorer(fleet.reward, num_procs=1)

    async def publish(self) -> None:
        fleet = self.fleet
        publisher = ActorPublisher(
            trainer=fleet.trainer,
            generators=fleet.generators,
            store=fleet.store,
            check=fleet.check,
            pool=fleet.pool,
        )
        await publisher.serve(await publisher.push())

    async def generator(self) -> None:
        pool = self.fleet.pool
        assert pool is not None
        while pool.up():
            await asyncio.sleep(0.01)
        await pool.one_up()

    async def reward(self) -> None:
        ((score,),) = await self.scorer.score([[rollout()]])
        assert score.failure is None

    async def trainer(self) -> None:
        sample = self.fleet.check.canary
        assert sample is not None
        try:
            await ActorLearner(self.fleet.trainer).compute_logprobs([sample.sample])
        except RunError as error:
            self.fleet = await revive_trainer(self.fleet, error)
        await ActorLearner(self.fleet.trainer).load_checkpoint(self.checkpoint)
        await self.publish()

    def kill(self, case: str) -> None:
        recovery = self.fleet.recovery
        assert recovery is not None
        if case.endswith("_host"):
            victims = hosts.processes_of("trainer" if case == "trainer_host" else "generator0")
        elif case == "trainer":
            victims = list(recovery.trainer.processes.values())
        elif case == "reward":
            victims = launch.role_processes("reward")
        else:
            victims = launch.role_processes("generator")
        for victim in victims:
            kill(victim)


async def measure(case: str, repeats: int, folder: Path) -> list[float]:
    config = tiny()
    fleet_config = replace(
        config.fleet,
        recovery=RecoveryConfig(max_restarts=repeats, pause_s=0.0, spare_generators=int(case == "spare")),
        launch=LaunchConfig(hosts="process" if case.endswith("_host") else "this"),
    )
    spec = replace(config.model, batch_invariant=True)
    assets = write_random_model(folder / "assets", spec=spec, seed=0)
    fleet = await start_fleet(
        fleet_config,
        store=config.weights.build(dtype="float32"),
        check=SyncCheck(LogprobCanary(token_ids=TOKENS, max_diff=0.0)),
        model_spec=spec,
        hf_assets_path=str(assets),
        rubric=config.task.build().rubric(seed=0),
        failure_folder=folder,
        logs=LogSettings(folder=folder / "logs", console_level="ERROR"),
    )
    room = Room(fleet, folder)
    await ActorLearner(fleet.trainer).save_checkpoint(room.checkpoint)
    await room.publish()
    recover = {"reward": room.reward, "trainer": room.trainer, "trainer_host": room.trainer}
    times_s = []
    for _ in range(repeats):
        if case == "spare":
            assert fleet.recovery is not None
            await fleet.recovery.spares.ready()
        room.kill(case)
        started = time.monotonic()
        await asyncio.wait_for(recover.get(case, room.generator)(), LIMIT_S)
        times_s.append(round(time.monotonic() - started, 2))
    await close_fleet(room.fleet)
    return times_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[float]] = {}
    for case in options.cases:
        with tempfile.TemporaryDirectory() as folder:
            found[case] = launch.run(measure(case, options.repeats, Path(folder)))
        print(f"{case}: {', '.join(f'{s:.1f}' for s in found[case])} s", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
