"""From Enter to the first step: how long a person waits before anything has happened.

    python -m benchmarks.startup [--quick] [--cases step tinker help mistake]

    step       `python -m rl.simple_grpo_sum_digits` until the first step's metrics are written, and
               until the program has ended after that step; the starting point exists
    trl        a program with TRL's GRPOTrainer on the same model and prompts, until its first step
               has ended, and until it has ended
    tinker     a program that samples one token from `ServiceClient(backend="tiny")`
    help       `--help` of a config
    mistake    a mistyped option

Each is a fresh process, started as a user does, the sides in turn; the figures are medians. Memory
is the largest sum of the proportional set sizes (PSS) of the program and its processes, looked at
four times a second. The last line is a JSON object; the ratio is TRL's seconds over relay's.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from benchmarks.processes import (
    ROOT,
    open_runs_folder,
    prepare_start,
    step_options,
    tiny_assets,
)

CASES = ("step", "trl", "tinker", "help", "mistake")
TIMEOUT_S = 600.0
LOOK_EVERY_S = 0.25
RUN = [sys.executable, "-m", "rl.simple_grpo_sum_digits"]
ONE_STEP = ["--loop.num_steps", "1", "--loop.eval_every", "0"]
FIRST_STEP = "first step"
"""What TRL's program prints after its first step."""
TRL_PROGRAM = """
import sys
from benchmarks.startup import run_trl
run_trl(sys.argv[1])
"""
TINKER_PROGRAM = """
from rl.tinker import ServiceClient
from tinker import types

service = ServiceClient(backend="tiny")
sampler = service.create_sampling_client(base_model="tiny")
answer = sampler.sample(
    prompt=types.ModelInput.from_ints([1, 2, 3]),
    num_samples=1,
    sampling_params=types.SamplingParams(max_tokens=1),
).result()
assert len(answer.sequences[0].tokens) == 1
print("sampled", flush=True)
"""


def main() -> None:
    options = step_options(__doc__)
    options.add_argument(
        "--cases", nargs="+", choices=CASES, help=f"{' '.join(CASES)}, with --quick step trl"
    )
    options.add_argument("--repeats", type=int, help="of each case; 3")
    args = options.parse_args()
    repeats = args.repeats or (1 if args.quick else 3)
    args.cases = args.cases or list(CASES[:2] if args.quick else CASES)

    figures: dict[str, list[dict[str, float]]] = {case: [] for case in args.cases}
    with open_runs_folder() as folder:
        if "step" in args.cases:
            prepare_start(folder, seed=0)
            if not args.quick:
                measure_step(folder, "warm")  # The system has the files in its cache from here on.
        workload = write_workload(folder)
        cases: dict[str, Callable[[int], dict[str, float]]] = {
            "step": lambda repeat: measure_step(folder, f"run-{repeat}"),
            "trl": lambda repeat: measure(
                [sys.executable, "-c", TRL_PROGRAM, workload], until=FIRST_STEP
            ),
            "tinker": lambda repeat: measure(
                [sys.executable, "-c", TINKER_PROGRAM], until="sampled"
            ),
            "help": lambda repeat: measure([*RUN, "--help"]),
            "mistake": lambda repeat: measure([*RUN, "--loop.num_stpes", "1"], status=2),
        }
        for repeat in range(repeats):
            for case in args.cases:
                figures[case].append(cases[case](repeat))
                seconds = ", ".join(f"{n} {v:.4g}" for n, v in figures[case][-1].items())
                print(f"repeat {repeat + 1}, {case}: {seconds}", flush=True)

    medians = {
        case: {name: statistics.median(one[name] for one in of) for name in of[0]}
        for case, of in figures.items()
    }
    ratio = {}
    if {"step", "trl"} <= medians.keys():
        for name in ("first_s", "end_s"):
            ratio[name] = medians["trl"][name] / medians["step"][name]
    print(
        json.dumps(
            {
                "benchmark": "startup",
                "cores": os.cpu_count(),
                "repeats": repeats,
                "figures": medians,
                "compared": "seconds from Enter: TRL over relay",
                "ratio": ratio,
            }
        )
    )


def measure_step(folder: Path, name: str) -> dict[str, float]:
    """Run one step of `tiny`, and return the seconds until its metrics are there."""
    metrics = folder / name / "metrics.jsonl"
    command = [*RUN, *ONE_STEP, "--dump_folder", str(folder), "--name", name]
    return measure(command, is_there=lambda: metrics.exists() and b"\n" in metrics.read_bytes())


def measure(
    command: Sequence[str],
    *,
    until: str | None = None,
    is_there: Callable[[], bool] | None = None,
    status: int = 0,
) -> dict[str, float]:
    """Run a program; return its seconds until the first result and until its end, and its memory.

    Args:
        until: text of the line that shows the first result.
        is_there: returns True when the first result is there.
        status: exit status that the program has to end with.
    """
    started = time.perf_counter()
    program = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    first_s: list[float] = []

    def read() -> None:
        assert program.stdout is not None
        for line in program.stdout:
            lines.append(line)
            if until is not None and until in line:
                first_s.append(time.perf_counter() - started)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    peak = 0
    try:
        next_look = started
        while program.poll() is None:
            now = time.perf_counter()
            if now - started > TIMEOUT_S:
                raise TimeoutError(f"{command} did not end within {TIMEOUT_S:g} s")
            if is_there is not None and not first_s and is_there():
                first_s.append(now - started)
            if now >= next_look:
                peak = max(peak, _sum_memory(program.pid))
                next_look = now + LOOK_EVERY_S
            time.sleep(0.02)
    finally:
        program.kill()
    end_s = time.perf_counter() - started
    reading.join(timeout=10)
    if program.returncode != status:
        raise RuntimeError(f"{command} ended with {program.returncode}:\n{''.join(lines)[-4000:]}")
    figures = {"first_s": first_s[0] if first_s else end_s, "end_s": end_s}
    return figures | {"memory_gb": peak / 1e9}


def _sum_memory(pid: int) -> int:
    """Return the bytes of a program and its processes; memory that they share counts once."""
    total = 0
    try:
        program = psutil.Process(pid)
        processes = [program, *program.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def write_workload(folder: Path) -> str:
    """Write the weights, prompts and sizes of a step of `tiny` for TRL; return the file."""
    # Here and not in TRL's program, which imports only what it needs.
    from benchmarks.grpo_vs_trl import tiny_prompts
    from configs.sum_digits import tiny

    config, assets = tiny(), tiny_assets(folder)
    loop = config.loop
    workload = {
        "assets": assets,
        "prompts": list(tiny_prompts(assets, num_prompts=loop.groups_per_batch)),
        "groups_per_batch": loop.groups_per_batch,
        "group_size": loop.group_size,
        "tokens": loop.sampling.max_tokens,
        "num_steps": 1,
        "num_threads": config.trainer.num_threads,
    }
    file = folder / "workload.json"
    file.write_text(json.dumps(workload))
    return str(file)


def run_trl(file: str) -> None:
    """Make one step of TRL's trainer."""
    from benchmarks.trl_sides import Workload, trl_steps

    def reward(completion: str, answer: str) -> float:
        return float(completion.rstrip().endswith(f"[ANSWER] {answer}"))

    work = Workload(**json.loads(Path(file).read_text()), reward=reward)
    micro_batch = work.groups_per_batch * work.group_size
    trl_steps(work, dtype="float32", autocast=False, vllm=False, micro_batch=micro_batch)
    print(FIRST_STEP, flush=True)


if __name__ == "__main__":
    main()
