"""What HTTP costs: one Tinker loop with the in-process client, and with the official one against a server.

    python -m benchmarks.tinker_overhead [--quick]

Both sides have the same backend config (the tiny model, one thread for training and one for sampling), the
server in a process of its own. A step of the loop:

    snapshot   save_weights_and_get_sampling_client
    sample     16 prompts x 4 samples of 24 tokens, all requests sent before the first answer is waited for
    train      forward_backward (importance_sampling) of the 64 and optim_step, sent together

The sides take turns of a few steps each, so that what else the machine does meets both. Seconds are medians
over all steps; `ratio` is HTTP to in-process. The losses of both must agree. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tinker import types

ROOT = Path(__file__).resolve().parent.parent
NUM_PROMPTS, NUM_SAMPLES, PROMPT_LENGTH, NEW_TOKENS = 16, 4, 32, 24
PARTS = ("snapshot", "sample", "train")
START_TIMEOUT_S, CALL_TIMEOUT_S, END_TIMEOUT_S = 180.0, 120.0, 60.0
SERVING = "serving the Tinker API at "


@dataclass(kw_only=True, slots=True, eq=False)
class Side:
    """One client's model, and what its steps took."""

    training: Any
    prompts: list[list[int]]
    seconds: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    losses: list[float] = field(default_factory=list)

    def step(self) -> None:
        marks = [time.perf_counter()]
        sampler = self.training.save_weights_and_get_sampling_client().result(CALL_TIMEOUT_S)
        marks.append(time.perf_counter())
        data = self._sample(sampler)
        marks.append(time.perf_counter())
        gradient = self.training.forward_backward(data, "importance_sampling")
        update = self.training.optim_step(types.AdamParams(learning_rate=1e-5))
        self.losses.append(gradient.result(CALL_TIMEOUT_S).metrics["loss:sum"])
        update.result(CALL_TIMEOUT_S)
        marks.append(time.perf_counter())
        for part, began, ended in zip(PARTS, marks, marks[1:], strict=False):
            self.seconds[part].append(ended - began)

    def _sample(self, sampler: Any) -> list[types.Datum]:
        number = len(self.losses)
        futures = [
            sampler.sample(
                types.ModelInput.from_ints(prompt),
                NUM_SAMPLES,
                # Without a stop every sample has the same length.
                types.SamplingParams(max_tokens=NEW_TOKENS, seed=NUM_PROMPTS * number + i, stop=[]),
            )
            for i, prompt in enumerate(self.prompts)
        ]
        return [
            _datum(prompt, sequence, advantage=1.0 if i % 2 else -1.0)
            for prompt, future in zip(self.prompts, futures, strict=True)
            for i, sequence in enumerate(future.result(CALL_TIMEOUT_S).sequences)
        ]

    def step_s(self) -> list[float]:
        return [sum(parts) for parts in zip(*self.seconds.values(), strict=True)]


def _datum(prompt: list[int], sequence: Any, *, advantage: float) -> types.Datum:
    tokens, before = prompt + sequence.tokens, [0.0] * (len(prompt) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": before + sequence.logprobs,
            "advantages": before + [advantage] * len(sequence.tokens),
        },
    )


def side_of(service: Any) -> Side:
    random = np.random.default_rng(0)
    prompts = random.integers(97, 123, (NUM_PROMPTS, PROMPT_LENGTH)).tolist()  # lower-case letters
    training = service.create_lora_training_client("tiny", rank=16, seed=0).result(CALL_TIMEOUT_S)
    return Side(training=training, prompts=prompts)


@contextlib.contextmanager
def in_process(folder: Path) -> Iterator[Side]:
    import rl.tinker as tinker

    with tinker.ServiceClient(backend="tiny", storage_folder=folder, progress=False) as service:
        yield side_of(service)


@contextlib.contextmanager
def over_http(folder: Path) -> Iterator[Side]:
    import tinker

    os.environ["TINKER_TELEMETRY"] = "0"
    with (
        serving(folder) as url,
        tinker.ServiceClient(base_url=url, api_key="tml-benchmark") as service,
    ):
        yield side_of(service)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The URL of a server in a process of its own."""
    command = [sys.executable, "-m", "rl.tinker.server", "--config", "tiny", "--port", "0"]
    log = folder.with_suffix(".log")
    with log.open("w") as errors:
        server = subprocess.Popen(
            [*command, "--storage_folder", str(folder)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            yield _url(server, log)
        finally:
            server.terminate()
            try:
                server.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _url(server: subprocess.Popen[str], log: Path) -> str:
    """Raises RuntimeError if the server says none in time."""
    assert server.stdout is not None
    deadline = time.monotonic() + START_TIMEOUT_S
    while (left_s := deadline - time.monotonic()) > 0:
        if select.select([server.stdout], [], [], left_s)[0]:
            line = server.stdout.readline()
            if line.startswith(SERVING):
                return line.removeprefix(SERVING).strip()
            if not line:
                break
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-4000:]}")


def compare(sides: dict[str, Side], *, turns: int, steps: int) -> dict[str, Any]:
    """Turns of both, the first of which does not count: it compiles.

    Raises:
        RuntimeError: the losses differ, so that what was timed is not the same work.
    """
    for turn in range(turns + 1):
        for side in sides.values():
            for _ in range(steps):
                side.step()
            if turn == 0:
                side.seconds = {part: [] for part in PARTS}
    one, other = (side.losses for side in sides.values())
    if not all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-3) for a, b in zip(one, other, strict=True)):
        raise RuntimeError(f"the losses differ: {one} and {other}")
    return {"benchmark": "tinker_overhead", **figures(sides), "turns": turns, "steps": steps}


def figures(sides: dict[str, Side]) -> dict[str, Any]:
    step_s = {name: statistics.median(side.step_s()) for name, side in sides.items()}
    parts_s = {
        name: {part: round(statistics.median(values), 4) for part, values in side.seconds.items()}
        for name, side in sides.items()
    }
    return {
        "ratio": round(step_s["http"] / step_s["in_process"], 3),
        "step_s": {name: round(seconds, 4) for name, seconds in step_s.items()},
        "parts_s": parts_s,
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few turns")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        sides = {
            "in_process": stack.enter_context(in_process(folder / "in_process")),
            "http": stack.enter_context(over_http(folder / "http")),
        }
        result = compare(sides, turns=3 if args.quick else 10, steps=2)
    for side, seconds in result["step_s"].items():
        parts = ", ".join(f"{part} {s * 1e3:.0f} ms" for part, s in result["parts_s"][side].items())
        print(f"{side:>10}: {seconds * 1e3:.0f} ms a step; {parts}")
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
