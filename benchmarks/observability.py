"""Cost of observability: steps with everything on, with the timeline alone and with nothing.

    python -m benchmarks.observability [--quick] [--rounds 60] [--tokens 32]

The loop of every run with the tiny model, trainer and generator in this process, so that all
recording counts against one step. The sides alternate step by step, in an order that changes from
round to round:

    off        no spans, no records, no rollouts
    timeline   spans
    all        spans, metrics.jsonl, the console's lines and findings, rollouts.jsonl, TensorBoard,
               W&B (offline) and trackio
    control    off again: the noise between equal sides

A step ends when all of its output is written. `overhead` is the median over the rounds of a side's
time over the time of `off` in the same round, minus 1; `interval` is its bootstrapped 95% interval.
The last line is a JSON object; `ratio` is all over off.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from configs.sum_digits import tiny
from rl.local import LocalBackend
from rl.loop.loop import Loop
from rl.loop.setup import RolloutSetup
from rl.loop.state import StepCheckpoints
from rl.models.files.hf import write_random_model
from rl.models.files.tokenizer import open_tokenizer
from rl.models.qwen3 import model_registry
from rl.observability import spans
from rl.observability.loggers import TensorBoardConfig, TrackioConfig, WandbConfig
from rl.observability.metrics import MetricsWriter, Record, Sink
from rl.observability.recorder import Recorder, RecorderConfig
from rl.observability.sinks import RunSinks, SinksConfig, open_sinks
from rl.observability.timeline import read_spans
from rl.reporting.live import follow_run
from rl.rollouts.group import Group, RolloutId
from rl.rollouts.renderer import make_renderer
from rl.rollouts.rewards import RewardProcess
from rl.training.engine import TrainingEngine

SIDES = ("off", "timeline", "all", "control")
NUM_WARMUP_ROUNDS = 2
TARGETS = {"timeline": 0.01, "all": 0.03}
"""Largest acceptable overhead of each side."""
SINKS = SinksConfig(
    tensorboard=TensorBoardConfig(enable=True),
    wandb=WandbConfig(enable=True),
    trackio=TrackioConfig(enable=True),
)
CAUGHT_UP_S = 60.0
"""Longest wait for the loggers to write a step."""
NUM_DRAWS = 10_000


class SwitchedSpans(spans.SpanRecorder):
    """Span recorder that can be switched off; a span that began before the switch ends as it
    began.
    """

    is_on = True

    def begin(self, name: str, version: int | None) -> int:
        return super().begin(name, version) if self.is_on else -1

    def end(self, name: str, number: int, error: BaseException | None = None) -> None:
        if number >= 0:
            super().end(name, number, error)


class SwitchedRecorder(Recorder):
    """Recorder of rollouts that can be switched off."""

    is_on = True

    def choose_ids(self, groups: Sequence[Group]) -> list[RolloutId]:
        return super().choose_ids(groups) if self.is_on else []

    def step(self, *args: Any) -> None:
        if self.is_on:
            super().step(*args)


class Sides:
    """Sink that times the steps, and switches to the next side after each of them."""

    def __init__(
        self,
        *,
        recorded: SwitchedSpans,
        recorder: SwitchedRecorder,
        sinks: Sequence[Sink],
        told: RunSinks,
    ) -> None:
        self.times: dict[str, list[float]] = {side: [] for side in SIDES}
        self._recorded, self._recorder, self._sinks, self._told = recorded, recorder, sinks, told
        self._num_steps = 0
        self._begin()

    @property
    def _side(self) -> str:
        return order(self._num_steps // len(SIDES))[self._num_steps % len(SIDES)]

    def _begin(self) -> None:
        self._recorded.is_on = self._side in ("timeline", "all")
        self._recorder.is_on = self._side == "all"
        self._started = time.perf_counter()

    def write(self, record: Record) -> None:
        if self._side == "all":
            for sink in self._sinks:
                sink.write(record)
            self._await_loggers()
        took_s = time.perf_counter() - self._started
        if self._num_steps >= NUM_WARMUP_ROUNDS * len(SIDES):
            self.times[self._side].append(took_s)
            print(f"step {self._num_steps + 1}, {self._side}: {took_s:.3f} s", flush=True)
        self._num_steps += 1
        self._begin()

    def _await_loggers(self) -> None:
        until = time.monotonic() + CAUGHT_UP_S
        for thread in self._told.loggers:
            while thread.num_lost:
                assert time.monotonic() < until, (
                    f"{thread.name} has not written step {self._num_steps + 1}"
                )
                time.sleep(0.0005)


def open_all_sinks(folder: Path, *, num_steps: int) -> RunSinks:
    """Return the sinks of a run in which all are enabled, and findings are looked for."""
    return open_sinks(
        SINKS,
        folder=folder,
        title="observed",
        num_steps=num_steps,
        stream=io.StringIO(),
        follow=partial(follow_run, folder),
    )


async def measure(folder: Path, *, rounds: int, tokens: int) -> dict[str, list[float]]:
    """Return the seconds of each side's steps by round."""
    config, spec = tiny(), model_registry("tiny")
    assets = write_random_model(folder / "model", spec=spec, seed=0)
    tokenizer, ends = open_tokenizer(assets)
    num_steps = (NUM_WARMUP_ROUNDS + rounds) * len(SIDES)
    loop_config = config.loop
    loop_config.num_steps = loop_config.max_empty_steps = num_steps
    loop_config.sampling.max_tokens, loop_config.eval_every = tokens, 0
    loop_config.groups_per_batch, loop_config.group_size = 8, 4
    config.trainer.optimizer.lr = 0.0  # steps stay alike
    config.trainer.lr_scheduler.warmup_steps = 0
    config.trainer.checkpoint.enable = False
    engine = TrainingEngine.Config(
        optimizer=config.trainer.optimizer,
        lr_scheduler=config.trainer.lr_scheduler,
        training=config.trainer.training,
        loss=config.trainer.loss,
    )
    recorded = SwitchedSpans()
    spans.RECORDER = recorded
    recorded.start(folder / "logs", role="controller", rank=0, timeline=spans.TimelineConfig())
    recorder = SwitchedRecorder(folder / "rollouts.jsonl", config=RecorderConfig())
    metrics = MetricsWriter(folder / "metrics.jsonl")
    opened = open_all_sinks(folder, num_steps=num_steps)
    backend = LocalBackend(engine, spec=spec, hf_assets_path=str(assets), device="cpu")
    async with opened as told, backend as local:
        with told.show_attempt():
            sides = Sides(recorded=recorded, recorder=recorder, sinks=(metrics, told), told=told)
            task = config.task.build()
            rewards = RewardProcess(rubric=task.rubric(seed=0), time_limit_s=30.0)
            loop: Loop = loop_config.build(
                trainer=local,
                publisher=local,
                rollouts=RolloutSetup(
                    generator=local,
                    rewarder=rewards,
                    renderer=make_renderer(
                        config.renderer, tokenizer=tokenizer, stop_token_ids=ends
                    ),
                    task=task,
                    max_sequence_tokens=config.generator.max_model_len,
                    seed=config.seed,
                ),
                sinks=[sides],
                recorder=recorder,
                checkpoints=StepCheckpoints(
                    trainer=local,
                    config=config.trainer.checkpoint,
                    folder=str(folder / "checkpoints"),
                ),
            )
            await loop.run()
            await rewards.close()
    metrics.close()
    recorded.stop()
    return sides.times


def order(number: int) -> list[str]:
    """Return the order of sides in a round; over all rounds every side takes every place equally
    often.
    """
    turned = [*SIDES[number % len(SIDES) :], *SIDES[: number % len(SIDES)]]
    return turned[::-1] if number // len(SIDES) % 2 else turned


def figures(times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return medians and overheads by round."""
    by_round = {
        side: np.divide(of_side, times["off"]) - 1.0
        for side, of_side in times.items()
        if side != "off"
    }
    overhead = {side: float(np.median(rounds)) for side, rounds in by_round.items()}
    return {
        "step_s": {side: statistics.median(of_side) for side, of_side in times.items()},
        "overhead": overhead,
        "interval": {side: interval(rounds) for side, rounds in by_round.items()},
        "targets": TARGETS,
        "met": {side: overhead[side] < target for side, target in TARGETS.items()},
        "compared": "time of a step: everything recorded over nothing",
        "ratio": 1.0 + overhead["all"],
    }


def interval(rounds: np.ndarray) -> tuple[float, float]:
    """Return the bootstrapped 95% interval of the median over rounds."""
    drawn = np.random.default_rng(0).choice(rounds, size=(NUM_DRAWS, len(rounds)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="four rounds")
    parser.add_argument("--rounds", type=int, help="of a step of each side; 60")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens")
    args = parser.parse_args(arguments)
    rounds = args.rounds or (4 if args.quick else 60)
    if rounds < 1:
        raise SystemExit(f"--rounds {rounds}: must be at least 1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["TRACKIO_DIR"] = str(folder / "trackio")
        times = asyncio.run(measure(folder, rounds=rounds, tokens=args.tokens))
        num_spans = len(read_spans(folder / "logs"))
    spans_per_step = round(num_spans / (2 * (NUM_WARMUP_ROUNDS + rounds)))
    told = {
        "tokens": args.tokens,
        "rounds": rounds,
        "spans_per_step": spans_per_step,
        **figures(times),
    }
    print(json.dumps({"benchmark": "observability", **told}))


if __name__ == "__main__":
    main()
