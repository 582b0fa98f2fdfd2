"""What the batch-invariant mode costs: the tiny model's generator, trainer and whole step, on against off.

    python -m benchmarks.batch_invariant [--quick]

Each side is a process of its own with a vLLM engine and a training engine on the same weights, as
in `configs.sum_digits.tiny`; they take turns, so that what else the machine does meets both. A turn
generates 32 x 8 completions of 32 tokens, trains on them (forward, backward, optimizer) and copies
the new weights into the generator. Tokens are the generated ones, and those that the trainer takes.
Medians. The last line is a JSON object; `cost` is the step's time with the mode over that without,
minus 1, and `processor_cost` the same of processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
NUM_PROMPTS, PROMPT_TOKENS = 32, 14
SIDES = ("off", "on")
START_TIMEOUT_S = 300.0
"""A worker that has not said that it is ready by then is stuck: nobody waits longer for its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One step's times and tokens."""

    generate_s: float
    train_s: float
    step_s: float
    processor_s: float
    """Of the whole process, all threads: what a busy machine leaves comparable."""
    num_generated: int
    num_trained: int
    logprob_diff_max: float


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three turns instead of fifteen")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.worker:
        asyncio.run(serve(batch_invariant=args.worker == "on", threads=args.threads))
        return
    with ExitStack() as stack:
        workers = {side: stack.enter_context(Worker(side, args.threads)) for side in SIDES}
        turns: dict[str, list[Turn]] = {side: [] for side in SIDES}
        for worker in workers.values():
            worker.turn()  # allocates, compiles
        for i in range(3 if args.quick else 15):
            for side in SIDES if i % 2 == 0 else SIDES[::-1]:
                turns[side].append(workers[side].turn())
    print(json.dumps(figures(turns, threads=args.threads)))


def figures(turns: dict[str, list[Turn]], *, threads: int) -> dict[str, Any]:
    """Medians of each side, and the cost."""
    sides = {
        side: {
            "generator_tokens_s": round(statistics.median(t.num_generated / t.generate_s for t in taken)),
            "trainer_tokens_s": round(statistics.median(t.num_trained / t.train_s for t in taken)),
            "step_s": round(statistics.median(t.step_s for t in taken), 4),
            "processor_s": round(statistics.median(t.processor_s for t in taken), 4),
            "logprob_diff_max": max(t.logprob_diff_max for t in taken),
        }
        for side, taken in turns.items()
    }
    costs = {
        name: round(sides["on"][of] / sides["off"][of] - 1, 4)
        for name, of in (("cost", "step_s"), ("processor_cost", "processor_s"))
    }
    return {"threads": threads, "turns": len(turns["on"]), **sides, **costs}


class Worker:
    """One side in a process of its own."""

    def __init__(self, side: str, threads: int) -> None:
        command = [sys.executable, "-m", "benchmarks.batch_invariant", "--worker", side]
        self._process = subprocess.Popen(
            [*command, "--threads", str(threads)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def turn(self) -> Turn:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the worker ended with status {self._process.wait(START_TIMEOUT_S)}")
        return Turn(**json.loads(line))

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()


async def serve(*, batch_invariant: bool, threads: int) -> None:
    """Take a turn for each line of standard input."""
    with tempfile.TemporaryDirectory() as folder:
        take_turn = await prepare(Path(folder), batch_invariant=batch_invariant, threads=threads)
        # vLLM prints here too.
        answers, sys.stdout = sys.stdout, sys.stderr
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(asdict(await take_turn())), file=answers, flush=True)


async def prepare(folder: Path, *, batch_invariant: bool, threads: int) -> Callable[[], Awaitable[Turn]]:
    from actors.vllm.engine import GeneratorEngine
    from configs.sum_digits import tiny
    from rl.distributed.process_group import World
    from rl.distributed.threads import use_threads
    from rl.models.starting_point import write_random_model
    from rl.training.engine import TrainingEngine

    config = tiny()
    spec = replace(config.model, batch_invariant=batch_invariant)
    write_random_model(folder / "model", spec=spec, seed=0)
    use_threads(threads)
    trainer = TrainingEngine(
        config=config.trainer, model_spec=spec, hf_assets_path=str(folder / "model"), world=World()
    )
    generator_config = replace(config.generator, num_threads=threads)
    generator = GeneratorEngine(
        config=generator_config, model_spec=spec, hf_assets_path=str(folder / "model"), world=World()
    )
    await generator.start()
    rng = np.random.default_rng(0)
    vocab_size: int = spec.model.vocab_size  # type: ignore[attr-defined]
    prompts = [rng.integers(0, vocab_size, PROMPT_TOKENS).astype(np.int32) for _ in range(NUM_PROMPTS)]

    async def copy_weights(targets: dict[str, Tensor]) -> None:
        for name, value in trainer.model_state_dict().items():
            targets[name].copy_(value)

    async def take_turn() -> Turn:
        started, processor_started = time.perf_counter(), time.process_time()
        await generator.update_weights(copy_weights, version=trainer.policy_version)
        samples = await _samples(generator, prompts, seed=trainer.policy_version)
        generated = time.perf_counter()
        result = trainer.forward_backward(samples)
        trainer.optim_step()
        ended = time.perf_counter()
        return Turn(
            generate_s=generated - started,
            train_s=ended - generated,
            step_s=ended - started,
            processor_s=time.process_time() - processor_started,
            num_generated=sum(int(s.mask.sum()) for s in samples),
            num_trained=result.num_tokens,
            logprob_diff_max=result.logprob_diff_max,
        )

    return take_turn


async def _samples(generator: Any, prompts: list[np.ndarray], *, seed: int) -> list[Any]:
    """Completions as training samples, with advantages 1 and -1 in turn."""
    from rl.types import SamplingParams, TrainingSample

    sampling = SamplingParams(max_tokens=32, num_samples=8, seed=seed)
    completions = await generator.generate(prompts, sampling=sampling)
    samples = []
    for prompt, of_prompt in zip(prompts, completions, strict=True):
        for i, completion in enumerate(of_prompt):
            num_prompt, num_tokens = len(prompt), len(prompt) + len(completion.token_ids)
            is_new = np.arange(num_tokens) >= num_prompt
            logprobs = np.full(num_tokens, np.nan, dtype=np.float32)
            logprobs[num_prompt:] = completion.logprobs
            samples.append(
                TrainingSample(
                    token_ids=np.concatenate((prompt, completion.token_ids)),
                    mask=is_new,
                    generator_logprobs=logprobs,
                    policy_versions=np.zeros(num_tokens, dtype=np.int32),
                    advantages=np.full(num_tokens, 1.0 if i % 2 else -1.0, dtype=np.float32),
                    temperature=1.0,
                )
            )
    return samples


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
