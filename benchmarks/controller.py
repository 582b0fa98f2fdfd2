"""CPU time of the controller by the number of samples of a step, and how long it blocks.

    python -m benchmarks.controller [--quick] [--repeats 3] [--tokens 64]

The loop of every run, with actors that answer at once: they cost nothing, so that what is left is
the controller's own work from problems to samples, metrics and recordings. Groups of 16 samples
arrive one by one, up to one step ahead of training. Half of the runs have a straggler: one group of
each step that arrives after all others.

    us_per_sample   CPU time of the process over the samples trained on, microseconds; median
    loop            the part of it in the event loop's thread
    pause_ms        longest time without a turn of the event loop, milliseconds of CPU, to about 5

A second part lets 1,280 calls of actors wait for five seconds: `waiting_calls` is the share of a
core that they take.

CPU time is not what other processes take, but a busy machine makes caches cold: compare within one
run. The last line is a JSON object; `ratio` has the CPU time a sample of the largest step over that
of the smallest one, with and without a straggler.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from actors.cluster.group import ActorGroup
from actors.config import Timeouts
from rl.loop.loop import Loop
from rl.loop.setup import RolloutSetup
from rl.loop.state import StepCheckpoints
from rl.observability import spans
from rl.observability.metrics import MetricsWriter
from rl.observability.recorder import Recorder, RecorderConfig
from rl.rollouts.environment import SingleTurn
from rl.rollouts.renderer import RendererConfig, make_renderer
from rl.trainer_types import (
    ForwardBackwardResult,
    OptimParams,
    OptimStepResult,
    TrainedTokens,
)
from rl.training.checkpoints.config import CheckpointConfig
from rl.types import Completion, Problem, PullResult, Rollout, SamplingParams, Score, TrainingSample
from rl.utils.processes import ProcessId, disable_collections, identify, reduce_collections
from tests.support.fakes import ByteTokenizer

GROUP_SIZE = 16
SIZES = (1_024, 4_096, 16_384, 65_536)
"""Samples of a step."""
SAMPLES_OF_A_RUN = 32_768
"""Samples of a run of small steps; large steps have at least `NUM_STEPS`."""
NUM_STEPS = 3
BEAT_S = 0.005
TARGET_US = 60.0
"""Largest acceptable CPU time of a sample, in microseconds."""
NUM_WAITING = 1_280
WAIT_S = 5.0
PROMPT_TOKENS = 16
SCORES = [
    Score(reward=float(right), correct=right, parts={"answer": float(right)})
    for right in (True, False)
] * (GROUP_SIZE // 2)


class QuickTokenizer(ByteTokenizer):
    """Byte tokenizer that decodes at once."""

    def decode(self, token_ids: list[int], **options: bool) -> str:
        return bytes(token_ids[:-1]).decode()


RENDERER = make_renderer(
    RendererConfig(), tokenizer=QuickTokenizer(), stop_token_ids=(QuickTokenizer.eos_token_id,)
)


class Answers:
    """The answers of one rank, as Monarch gives them."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def items(self) -> list[tuple[int, Any]]:
        return [(0, self._value)]


@dataclass(eq=False)
class Endpoint:
    """An endpoint whose answers arrive later, one in each turn of the event loop, the last
    straggler at the end.
    """

    answer: Any
    waiting: deque[tuple[asyncio.Future[Answers], Any]] = field(default_factory=deque)
    late: list[tuple[asyncio.Future[Answers], Any]] = field(default_factory=list)
    _delivery: asyncio.Task[None] | None = None

    def call(self, *args: Any, late: bool = False) -> Awaitable[Answers]:
        future: asyncio.Future[Answers] = asyncio.get_running_loop().create_future()
        (self.late if late else self.waiting).append((future, args))
        if self._delivery is None or self._delivery.done():
            self._delivery = asyncio.ensure_future(self._deliver())
        return future

    async def _deliver(self) -> None:
        while self.waiting or self.late:
            await asyncio.sleep(0)
            future, args = self.waiting.popleft() if self.waiting else self.late.pop(0)
            if not future.done():
                future.set_result(Answers(self.answer(*args)))


class SilentEndpoint:
    """An endpoint that never answers."""

    def call(self) -> Awaitable[Answers]:
        return asyncio.get_running_loop().create_future()


class FakeMesh:
    """Mesh of one rank with the endpoints of a generator and a rewarder."""

    def __init__(self, *, tokens: int) -> None:
        self.version = 0
        self._tokens = tokens
        self._drawn: dict[int, list[Completion]] = {}
        self.generate = Endpoint(self._draw)
        self.score = Endpoint(lambda num: [SCORES[:GROUP_SIZE]] * num)
        self.never = SilentEndpoint()

    def _draw(self, num_prompts: int) -> list[list[Completion]]:
        """Return the same completions to all prompts, so that drawing them takes no time."""
        if self.version not in self._drawn:
            self._drawn[self.version] = [
                completion_of(self._tokens, self.version) for _ in range(GROUP_SIZE)
            ]
        return [self._drawn[self.version]] * num_prompts

    def size(self) -> int:
        return 1


def completion_of(num_tokens: int, version: int) -> Completion:
    token_ids = np.full(num_tokens, ord("7"), dtype=np.int32)
    token_ids[-1] = 0
    return Completion(
        token_ids=token_ids,
        logprobs=np.full(num_tokens, -1.0, dtype=np.float32),
        policy_versions=np.full(num_tokens, version, dtype=np.int32),
        finish_reason="stop",
    )


class FakeActors:
    """Generator, rewarder, trainer and publisher of a loop, all of which answer without work."""

    def __init__(self, *, tokens: int, groups_per_batch: int, straggler: bool) -> None:
        self._mesh = FakeMesh(tokens=tokens)
        self._group = ActorGroup(
            name="generator", mesh=self._mesh, timeouts=Timeouts(), processes=processes(os.getpid())
        )
        self._groups_per_batch = groups_per_batch
        self._straggler = straggler
        self._num_calls = 0
        self._version = 0

    async def generate(
        self, prompts: Sequence[np.ndarray], *, sampling: SamplingParams, session: str | None = None
    ) -> list[list[Completion]]:
        late = self._straggler and self._num_calls % self._groups_per_batch == 0
        self._num_calls += 1
        (answer,) = await self._group.call(
            "generate", len(prompts), late=late, timeout="generate_s"
        )
        return list(answer)

    async def score(
        self, groups: Sequence[Sequence[Rollout]], *, alone: bool = False
    ) -> list[list[Score]]:
        (scores,) = await self._group.call("score", len(groups), timeout="score_s")
        return list(scores)

    async def forward_backward(
        self,
        samples: Sequence[TrainingSample],
        *,
        return_trained: bool | Sequence[int] = False,
        **_: Any,
    ) -> ForwardBackwardResult:
        await asyncio.sleep(0)
        places = () if isinstance(return_trained, bool) else return_trained
        read = [np.zeros(len(samples[i].token_ids), dtype=np.float32) for i in places]
        return ForwardBackwardResult(
            loss_sum=-1.0,
            denominator=1.0,
            num_samples=len(samples),
            num_tokens=len(samples),
            num_valid_tokens=len(samples),
            ratio_mean=1.0,
            clipped_fraction=0.0,
            entropy_mean=0.5,
            logprob_diff_mean=0.0,
            logprob_diff_max=0.0,
            logprobs_identical=True,
            trained=tuple(TrainedTokens(logprobs=zeros, advantages=zeros) for zeros in read)
            or None,
        )

    async def optim_step(
        self, params: OptimParams | None = None, *, allow_empty: bool = False
    ) -> OptimStepResult:
        self._version += 1
        return OptimStepResult(grad_norm=1.0, lr=1e-3, policy_version=self._version)

    async def push(self) -> int:
        await asyncio.sleep(0)
        return self._version

    async def pull(self, policy_version: int) -> PullResult:
        await asyncio.sleep(0)
        self._mesh.version = policy_version
        return PullResult()


def processes(pid: int) -> dict[int, ProcessId]:
    """Return the process that every call of a group watches."""
    process = identify(pid)
    assert process is not None
    return {0: process}


@dataclass(kw_only=True)
class Questions:
    """Task with short questions of one length."""

    def train_problems(self, *, seed: int) -> Iterator[Problem]:
        questions = (f"{n:0{PROMPT_TOKENS - 2}d}" for n in count())
        return (Problem(id=question, question=question, answer="7") for question in questions)

    def warmup_problems(self, *, seed: int) -> Iterator[Problem]:
        return self.train_problems(seed=seed)

    def eval_sets(self) -> dict[str, Sequence[Problem]]:
        return {}

    def environment(self, problem: Problem) -> SingleTurn:
        return SingleTurn.of(problem)

    def rubric(self, *, seed: int) -> Any:
        raise NotImplementedError


class Pauses:
    """Longest CPU time of this thread between two turns of the event loop."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self) -> None:
        last_s = time.thread_time()
        while True:
            await asyncio.sleep(BEAT_S)
            now_s = time.thread_time()
            self.longest_s = max(self.longest_s, now_s - last_s)
            last_s = now_s


@dataclass(frozen=True, kw_only=True)
class Cost:
    """CPU time of one run."""

    us_per_sample: float
    loop: float
    """Microseconds a sample of the event loop's thread alone."""
    pause_ms: float


async def measure_run(folder: Path, *, samples: int, straggler: bool, tokens: int) -> Cost:
    """Run the loop with steps of so many samples and return its CPU time."""
    num_steps = max(NUM_STEPS, SAMPLES_OF_A_RUN // samples)
    groups = samples // GROUP_SIZE
    actors: Any = FakeActors(tokens=tokens, groups_per_batch=groups, straggler=straggler)
    config = Loop.Config(
        num_steps=num_steps,
        groups_per_batch=groups,
        group_size=GROUP_SIZE,
        max_off_policy_steps=1,
        eval_every=0,
    )
    config.sampling.max_tokens = tokens
    metrics = MetricsWriter(folder / "metrics.jsonl")
    loop: Loop = config.build(
        trainer=actors,
        publisher=actors,
        rollouts=RolloutSetup(
            generator=actors,
            rewarder=actors,
            renderer=RENDERER,
            task=Questions(),
            max_sequence_tokens=PROMPT_TOKENS + tokens,
            seed=0,
        ),
        sinks=[metrics],
        recorder=Recorder(folder / "rollouts.jsonl", config=RecorderConfig()),
        checkpoints=StepCheckpoints(
            trainer=actors,
            config=CheckpointConfig(enable=False),
            folder=str(folder / "checkpoints"),
        ),
    )
    pauses = Pauses()
    watch = asyncio.create_task(pauses.watch())
    gc.collect()
    process_s, thread_s = time.process_time(), time.thread_time()
    await loop.run()
    process_s, thread_s = time.process_time() - process_s, time.thread_time() - thread_s
    watch.cancel()
    metrics.close()
    to_us = 1e6 / (samples * num_steps)
    return Cost(
        us_per_sample=process_s * to_us, loop=thread_s * to_us, pause_ms=pauses.longest_s * 1e3
    )


async def measure_waiting(num: int) -> float:
    """Return the share of a core that so many waiting calls of actors take."""
    mesh = FakeMesh(tokens=1)
    with contextlib.ExitStack() as stack:
        sleepers = [stack.enter_context(subprocess.Popen(["sleep", "600"])) for _ in range(8)]
        for sleeper in sleepers:
            stack.callback(sleeper.kill)
        groups = [
            ActorGroup(
                name="generator", mesh=mesh, timeouts=Timeouts(), processes=processes(sleeper.pid)
            )
            for sleeper in sleepers
        ]
        calls = [
            asyncio.ensure_future(groups[i % 8].call("never", timeout="train_s"))
            for i in range(num)
        ]
        await asyncio.sleep(1.0)
        before_s, started = time.process_time(), time.monotonic()
        await asyncio.sleep(WAIT_S)
        share = (time.process_time() - before_s) / (time.monotonic() - started)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    return share


def measure(
    *, sizes: Sequence[int], repeats: int, tokens: int
) -> dict[tuple[int, bool], list[Cost]]:
    """Return the costs of all repeats by samples of a step, without and with a straggler."""
    costs: dict[tuple[int, bool], list[Cost]] = {}
    for repeat in range(repeats):
        for samples in sizes:
            for straggler in (False, True):
                with tempfile.TemporaryDirectory() as name, recording(Path(name) / "logs"):
                    cost = asyncio.run(
                        measure_run(Path(name), samples=samples, straggler=straggler, tokens=tokens)
                    )
                costs.setdefault((samples, straggler), []).append(cost)
                print(
                    f"repeat {repeat + 1}, {samples} samples, straggler {straggler}: {cost}",
                    flush=True,
                )
    return costs


@contextlib.contextmanager
def recording(logs: Path) -> Iterator[None]:
    """Record the spans of this process as a run does."""
    spans.RECORDER.start(logs, role="controller", rank=0, timeline=spans.TimelineConfig())
    try:
        yield
    finally:
        spans.RECORDER.stop()


def figures(costs: dict[tuple[int, bool], list[Cost]], *, waiting_calls: float) -> dict[str, Any]:
    """Return the medians by samples of a step, and the ratio of the largest step to the smallest
    one.
    """
    rows = []
    for (samples, straggler), repeats in costs.items():
        medians = {
            name: round(statistics.median(getattr(cost, name) for cost in repeats), 2)
            for name in ("us_per_sample", "loop", "pause_ms")
        }
        rows.append({"samples": samples, "straggler": straggler, **medians})
    ratio = {}
    for straggler in (False, True):
        of_side = [row for row in rows if row["straggler"] == straggler]
        ratio["straggler" if straggler else "even"] = round(
            of_side[-1]["us_per_sample"] / of_side[0]["us_per_sample"], 3
        )
    return {
        "rows": rows,
        "waiting_calls": round(waiting_calls, 4),
        "target_us": TARGET_US,
        "met": all(row["us_per_sample"] <= TARGET_US for row in rows),
        "compared": "controller's CPU time a sample: largest step over smallest",
        "ratio": ratio,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two sizes, once")
    parser.add_argument("--repeats", type=int, help="of each run; 3")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of a sample")
    parser.add_argument("--sizes", type=int, nargs="+", help="samples of a step, multiples of 16")
    args = parser.parse_args(arguments)
    repeats = args.repeats or (1 if args.quick else 3)
    sizes = args.sizes or (SIZES[:3:2] if args.quick else SIZES)
    if (
        repeats < 1
        or args.tokens < 1
        or any(size < GROUP_SIZE or size % GROUP_SIZE for size in sizes)
    ):
        raise SystemExit("--repeats and --tokens must be at least 1, --sizes multiples of 16")
    with disable_collections():  # like a run, which imports everything within it
        gc.collect()
    with reduce_collections():
        costs = measure(sizes=sizes, repeats=repeats, tokens=args.tokens)
    result = figures(costs, waiting_calls=asyncio.run(measure_waiting(NUM_WAITING)))
    for row in result["rows"]:
        print(
            f"{row['samples']:>7} samples, {'a straggler' if row['straggler'] else 'all even   '}: "
            f"{row['us_per_sample']:7.1f} us a sample, {row['loop']:7.1f} in the loop, "
            f"longest pause {row['pause_ms']:8.1f} ms"
        )
    print(
        json.dumps({"benchmark": "controller", "tokens": args.tokens, "repeats": repeats, **result})
    )


if __name__ == "__main__":
    main()
