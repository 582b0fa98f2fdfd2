"""Tokens per second of whole training steps: this engine against transformers with padding.

    python -m benchmarks.train_step [--quick]
    python -m benchmarks.train_step --flavor 1.7B --compile

Both train Qwen3 on the same batch of sequences of different lengths: forward, cross-entropy of
every target token, backward, clipping and a step of fused AdamW, from the same seeded weights, in
the same dtype, on the same number of threads, in micro-batches of at most as many tokens. Three
sides take turns, each in a process of its own:

    relay                this engine: sequences packed on one axis, no padding
    transformers         Qwen3ForCausalLM (sdpa), padded to the longest of each micro-batch, sequences
                         in the order given: what `ratio` compares with
    transformers_sorted  the same, longest sequences first, so that little is padded: `ratio_sorted`

Tokens are those of the sequences; padding is no token. Peak memory is what a step needs at most:
allocated on the GPU, or resident on a CPU above what imports alone take. Model FLOPs utilisation
(on a GPU) is 6 N a token + 12 layers x heads x head size x length, over what the device can do;
`mfu_causal` counts half of the second term. Losses of the first step must agree. It needs torch,
transformers, safetensors and numpy. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.train_step_figures import (
    FLAVORS,
    Facts,
    Turn,
    Workload,
    figures,
    loss_differences,
    loss_tolerance,
)

NAMES = ("relay", "transformers", "transformers_sorted")
NUM_WARMUP_STEPS = 2
"""Not measured: the first steps allocate and compile."""
ANSWER_TIMEOUT_S = 1800
ROOT = Path(__file__).resolve().parent.parent

TakeTurn = Callable[[int], Turn]
"""A side's next steps, as many as it is given."""


def main(arguments: list[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    if args.worker:
        serve(args.worker, Workload(**json.loads(args.workload)), threads=args.threads)
        return
    try:
        workload = workload_of(args)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    repeats, steps = (2, 1) if args.quick else (args.repeats, args.steps)
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(name, workload, threads=args.threads)) for name in NAMES}
        result = compare(
            workload,
            facts=workers["relay"].describe(),
            sides={name: worker.turn for name, worker in workers.items()},
            repeats=repeats,
            steps=steps,
            threads=args.threads,
        )
    print(json.dumps(result))


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--quick", action="store_true", help="a small batch, two steps of each side")
    options.add_argument("--flavor", choices=tuple(FLAVORS), help="small on a CPU, 0.6B on a GPU")
    options.add_argument("--device", choices=("cpu", "cuda"), help="the GPU where there is one")
    options.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="float32 on a CPU, bfloat16 on a GPU"
    )
    lengths = options.add_mutually_exclusive_group()
    lengths.add_argument("--sequence-length", type=int, metavar="N", help="of each; 4096 on a GPU")
    lengths.add_argument("--lengths", type=int, nargs=2, metavar=("LO", "HI"), help="16 256 on a CPU")
    options.add_argument("--tokens", type=int, help="of a step, at least; 8192 on a CPU, 65536 on a GPU")
    options.add_argument(
        "--microbatch-tokens", type=int, help="at most, padding counted; 4096 on a CPU, 8192 on a GPU"
    )
    options.add_argument("--logits-chunk-tokens", type=int, help="of the engine's head; not chunked")
    options.add_argument("--compile", action="store_true", help="torch.compile blocks and loss, on all sides")
    options.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options.add_argument("--repeats", type=int, default=5, help="turns of each side; 5")
    options.add_argument("--steps", type=int, default=2, help="steps of a turn; 2")
    options.add_argument("--seed", type=int, default=0, help="of weights and batch")
    options.add_argument("--worker", choices=NAMES, help=argparse.SUPPRESS)
    options.add_argument("--workload", help=argparse.SUPPRESS)
    return options


def workload_of(args: argparse.Namespace) -> Workload:
    """What is not given depends on the device. Raises ValueError for a size out of range."""
    device = args.device
    if device is None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    on_cpu = device == "cpu"
    for name in ("threads", "repeats", "steps"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name}={getattr(args, name)}: must be at least 1")
    fallback: dict[str, Any] = {
        "flavor": "small" if on_cpu else "0.6B",
        "dtype": "float32" if on_cpu else "bfloat16",
        "tokens": (2048 if args.quick else 8192) if on_cpu else (16_384 if args.quick else 65_536),
        "microbatch_tokens": 4096 if on_cpu else 8192,
    }
    given = {name: getattr(args, name) for name in fallback if getattr(args, name) is not None}
    lengths = args.lengths or ((16, 256) if on_cpu else (4096, 4096))
    if args.sequence_length is not None:
        lengths = (args.sequence_length, args.sequence_length)
    return Workload(
        device=device,
        min_length=lengths[0],
        max_length=lengths[1],
        logits_chunk_tokens=args.logits_chunk_tokens,
        compile=args.compile,
        seed=args.seed,
        **(fallback | given),
    )


def compare(
    workload: Workload,
    *,
    facts: Facts,
    sides: Mapping[str, TakeTurn],
    repeats: int,
    steps: int,
    threads: int,
) -> dict[str, Any]:
    """Warm all sides up, check that they compute the same, let them take turns; the figures.

    Raises:
        LossesDifferError: their first losses differ.
    """
    losses = {name: list(turn(NUM_WARMUP_STEPS).losses) for name, turn in sides.items()}
    loss_differences(losses, tolerance=loss_tolerance(workload))
    num_tokens = sum(workload.lengths())
    turns: dict[str, list[Turn]] = {name: [] for name in sides}
    for repeat in range(repeats):
        for name, turn in sides.items():
            measured = turn(steps)
            turns[name].append(measured)
            losses[name].extend(measured.losses)
            print(
                f"repeat {repeat + 1}: {name} {num_tokens / measured.step_s:.0f} tokens/s, "
                f"{measured.peak_memory_bytes / 2**30:.2f} GiB",
                flush=True,
            )
    differences = loss_differences(losses, tolerance=loss_tolerance(workload))
    return figures(workload, facts=facts, turns=turns, differences=differences, threads=threads)


class Worker:
    """A side in a process of its own, which answers each line with a line."""

    def __init__(self, name: str, workload: Workload, *, threads: int) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, closed with the process
        command = [sys.executable, "-m", "benchmarks.train_step", "--worker", name]
        self._process = subprocess.Popen(
            [*command, "--workload", json.dumps(asdict(workload)), "--threads", str(threads)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            assert pipe is not None
            pipe.close()

    def describe(self) -> Facts:
        return Facts(**self._ask("describe"))

    def turn(self, num_steps: int) -> Turn:
        return Turn(**self._ask(str(num_steps)))

    def _ask(self, question: str) -> dict[str, Any]:
        """One line for another.

        Raises:
            TimeoutError: no answer within `ANSWER_TIMEOUT_S`.
            RuntimeError: the process ended; with the last that it wrote.
        """
        questions, answers = self._process.stdin, self._process.stdout
        assert questions is not None
        assert answers is not None
        answer = b""
        try:
            questions.write(f"{question}\n".encode())
            if not select.select([answers], [], [], ANSWER_TIMEOUT_S)[0]:
                raise TimeoutError(f"{self.name}: no answer to {question!r} within {ANSWER_TIMEOUT_S} s")
            answer = answers.readline()
        except BrokenPipeError:
            pass
        if not answer:
            self._process.wait()
            self._errors.seek(0)
            written = self._errors.read().decode(errors="replace")
            raise RuntimeError(f"{self.name} ended with {self._process.returncode}:\n{written[-4000:]}")
        return json.loads(answer)


def serve(name: str, workload: Workload, *, threads: int) -> None:
    """What a worker process does, until its questions end."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What libraries print is no answer.
    import torch

    from benchmarks.train_step_sides import Runner, describe

    torch.set_num_threads(threads)
    runner = None
    for line in sys.stdin:
        question = line.strip()
        if question == "describe":
            answer = asdict(describe(workload))
        else:
            runner = runner or Runner(name, workload)
            answer = asdict(runner.turn(int(question)))
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
