"""Cost of observability: steps with everything on, with the timeline alone and with nothing.

    python -m benchmarks.observability [--quick] [--rounds 60] [--tokens 32]

One run of the tiny config with all its actors, on a random model whose replies mostly reach the token limit. The
sides alternate step by step, in an order that changes from round to round:

    off        no spans, no records, no rollouts, no comparison with limits
    timeline   every process records spans
    all        spans, metrics.jsonl, the console's lines, rollouts.jsonl, limits, TensorBoard, W&B (offline) and
               trackio
    control    off again: the noise between equal sides

A step ends when all of its output is written. `overhead` is the median over the rounds of a side's time over the
time of `off` in the same round, minus 1; `interval` is its bootstrapped 95% interval. The last line is a JSON
object; `ratio` is all over off.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from actors import launch
from actors.backend import GeneratorClient, RewardClient, TrainerClient
from actors.calls import Group
from actors.cluster import Cluster
from actors.controller import Controller
from actors.limits import run_limits
from actors.members import LogSettings, record_process
from actors.parity import ParityCheck
from actors.plan import Plan, make_plan
from benchmarks.observability_actors import (
    SIDES,
    ObservedGenerator,
    ObservedReward,
    ObservedTrainer,
    observe,
)
from configs.sum_digits import tiny
from rl.loop.loop import Loop, RolloutSetup
from rl.loop.state import StepCheckpoints
from rl.models.hf import write_random_model
from rl.observability.machine_limits import LimitSink
from rl.observability.metrics import MetricsWriter
from rl.observability.recorder import Recorder
from rl.observability.sinks import (
    RunSinks,
    SinksConfig,
    TensorBoardConfig,
    TrackioConfig,
    WandbConfig,
    open_sinks,
)
from rl.observability.span_reader import read_spans
from tests.support.clusters import start_cluster

NUM_WARMUP_ROUNDS = 2
TARGETS = {"timeline": 0.01, "all": 0.03}
"""Largest acceptable overhead of each side."""
SINKS = SinksConfig(
    tensorboard=TensorBoardConfig(enable=True),
    wandb=WandbConfig(enable=True),
    trackio=TrackioConfig(enable=True),
)
CAUGHT_UP_S = 60.0
"""Longest wait for the sinks to write a step."""
NUM_DRAWS = 10_000


def settings(folder: Path, *, tokens: int, num_steps: int, threads: int) -> Controller.Config:
    """Return the tiny config with actors whose observation can be switched."""
    config = tiny()
    config.dump_folder = str(folder)
    config.hf_assets_path = str(write_random_model(folder / "model", spec=config.model, seed=0))
    config.warmup = None
    config.trainer = ObservedTrainer.Config(**_values(config.trainer))
    config.generator = ObservedGenerator.Config(**_values(config.generator))
    config.reward = ObservedReward.Config(**_values(config.reward))
    config.trainer.num_threads = config.generator.num_threads = threads
    config.trainer.optimizer.lr = 0.0  # steps stay alike
    config.trainer.lr_scheduler.warmup_steps = 0
    config.trainer.checkpoint.enable = False
    config.recovery.max_restarts = 0
    config.loop.sampling.max_tokens = tokens
    config.loop.eval_every = 0
    config.loop.num_steps = config.loop.max_empty_steps = num_steps
    return config


def _values(config: Any) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in fields(config)}


class Observed:
    """A run whose steps are observed in different ways."""

    def __init__(self, config: Controller.Config, fleet: Cluster, plan: Plan, folder: Path) -> None:
        assert fleet.reward is not None
        self._fleet, self._reward = fleet, fleet.reward
        self._folder = folder
        self._metrics = MetricsWriter(folder / "metrics.jsonl")
        self._recorder = Recorder(folder / "rollouts.jsonl", config=config.recorder)
        trainer = TrainerClient(fleet.trainer)
        self._loop: Loop = config.loop.build(
            trainer=trainer,
            publisher=fleet.pool,
            rollouts=RolloutSetup(
                generator=GeneratorClient(fleet.pool.members[0]),
                rewarder=RewardClient(self._reward, num_procs=config.reward.num_procs),
                renderer=plan.renderer,
                task=plan.task,
                max_sequence_tokens=config.generator.max_model_len,
                seed=config.seed,
                thread=plan.environments.thread,
            ),
            sinks=(),
            checkpoints=StepCheckpoints(
                trainer=trainer, config=config.trainer.checkpoint, folder=str(folder / "checkpoints")
            ),
        )
        self._num_steps = 0

    async def start(self, config: Controller.Config, plan: Plan) -> None:
        """Serve the first weights, measure the machine, and open the sinks."""
        limits = await run_limits(config, self._fleet, spec=plan.start.spec)
        assert limits is not None, "the machine was not measured"
        self._told: RunSinks = open_sinks(
            SINKS,
            folder=self._folder,
            title="observed",
            num_steps=config.loop.num_steps,
            stream=io.StringIO(),
        )
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self._told.attempt())
        self._sinks = [LimitSink(limits=limits, sinks=[self._metrics, self._told])]
        await self._loop._sync.begin()
        published = await self._loop._sync.served()
        self._loop._progress.step_of_version[published.policy_version] = 0

    async def step(self, side: str) -> float:
        """Return the seconds of one step, including all that it writes."""
        reward = await self._reward.current()
        groups: Sequence[Group] = (self._fleet.trainer, *self._fleet.pool.members, reward)
        await asyncio.gather(*(group.call("observe", side) for group in groups))
        observe(side)
        self._loop.sinks = self._sinks if side == "all" else ()
        self._loop.recorder = self._recorder if side == "all" else None
        self._num_steps += 1
        started = time.perf_counter()
        await self._loop._step(self._num_steps)
        await self._loop._writer.finish()
        if side == "all":
            await self._caught_up()
        return time.perf_counter() - started

    async def _caught_up(self) -> None:
        """Wait until every sink has this step."""
        until = time.monotonic() + CAUGHT_UP_S
        for thread in self._told.threads:
            while not thread.is_idle:
                assert not thread.num_lost, f"{thread.name} takes nothing"
                assert time.monotonic() < until, f"{thread.name} lacks step {self._num_steps}"
                await asyncio.sleep(0.0005)

    async def close(self) -> None:
        observe("off")
        await self._loop._writer.close()
        await self._loop._producer.close()
        await self._loop._sync.close()
        self._stack.close()
        await self._told.close()
        self._metrics.close()
        await self._fleet.close()


async def measure(
    config: Controller.Config, plan: Plan, folder: Path, *, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of each side's steps by round."""
    logs = folder / "logs"
    record_process(logs, role="controller", rank=0)
    fleet = await start_cluster(
        config,
        store=config.weights.build(dtype=config.generator.dtype),
        check=ParityCheck(plan.parity),
        model_spec=plan.start.spec,
        hf_assets_path=str(plan.start.folder),
        rubric=plan.task.rubric(seed=config.seed),
        failure_folder=folder,
        logs=LogSettings(folder=logs, console_level="ERROR"),
    )
    observed = Observed(config, fleet, plan, folder)
    await observed.start(config, plan)
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(NUM_WARMUP_ROUNDS + rounds):
        for side in order(number):
            took_s = await observed.step(side)
            if number >= NUM_WARMUP_ROUNDS:
                times[side].append(took_s)
        if number >= NUM_WARMUP_ROUNDS:
            took = ", ".join(f"{side} {times[side][-1]:.3f} s" for side in SIDES)
            print(f"round {number - NUM_WARMUP_ROUNDS + 1}: {took}", flush=True)
    await observed.close()
    return times


def order(number: int) -> list[str]:
    """Return the order of sides in a round; over all rounds every side takes every place equally often."""
    turned = [*SIDES[number % len(SIDES) :], *SIDES[: number % len(SIDES)]]
    return turned[::-1] if number // len(SIDES) % 2 else turned


def figures(times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return medians and overheads by round."""
    by_round = {
        side: np.divide(of_side, times["off"]) - 1.0 for side, of_side in times.items() if side != "off"
    }
    overhead = {side: float(np.median(rounds)) for side, rounds in by_round.items()}
    return {
        "step_s": {side: statistics.median(of_side) for side, of_side in times.items()},
        "overhead": overhead,
        "interval": {side: interval(rounds) for side, rounds in by_round.items()},
        "targets": TARGETS,
        "met": {side: overhead[side] < target for side, target in TARGETS.items()},
        "ratio": 1.0 + overhead["all"],
    }


def interval(rounds: np.ndarray) -> tuple[float, float]:
    """Return the bootstrapped 95% interval of the median over rounds."""
    drawn = np.random.default_rng(0).choice(rounds, size=(NUM_DRAWS, len(rounds)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="eight rounds")
    parser.add_argument("--rounds", type=int, help="of a step of each side; 60")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(arguments)
    rounds = args.rounds or (8 if args.quick else 60)
    if rounds < 1:
        raise SystemExit(f"--rounds {rounds}: must be at least 1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["TRACKIO_DIR"] = str(folder / "trackio")
        num_steps = (NUM_WARMUP_ROUNDS + rounds) * len(SIDES)
        config = settings(folder, tokens=args.tokens, num_steps=num_steps, threads=args.threads)
        plan = make_plan(config)
        times = launch.run(measure(config, plan, folder, rounds=rounds))
        spans = read_spans(folder / "logs")
    print(
        json.dumps(
            {
                "benchmark": "observability",
                "tokens": args.tokens,
                "threads": args.threads,
                "rounds": rounds,
                "spans_per_step": round(len(spans) / (num_steps * 2 / len(SIDES))),
                **figures(times),
            }
        )
    )


if __name__ == "__main__":
    main()
