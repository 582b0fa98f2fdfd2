"""Kill a process in each phase of a run and check that the run recovers: `make chaos`.

An undisturbed run comes first. Then each case is a run in which one process is killed once (several
in the short version); the run must finish by itself (after the loss of its controller: with
--resume) with the same metrics and trained rollouts, and with a ledger that closes and is the same.
The last line is a JSON object; exit status 1: a case failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.launch.cleanup import find_by_environment
from rl.ledger.check import check_run
from rl.ledger.compare import compare_ledgers
from rl.observability.events import read_events
from rl.observability.run_folder import EVENTS, LEDGER, ROLLOUTS
from rl.utils.processes import kill
from tools.fault_injection import VICTIMS, Fault, environment

ROOT = Path(__file__).resolve().parent.parent
OWNER = "RELAY_CHAOS"
"""Environment variable that marks every process of a run."""
PHASES = ("setup", "generate", "score", "forward_backward", "optim_step", "push", "pull", "save")
COUNTS = {"setup": 1, "generate": 12, "score": 10}
"""Number of the call in which the process dies; 2 in other phases."""
FIXED = (
    (("generate", "generator"), ("optim_step", "trainer"), ("save", "controller")),
    (("setup", "trainer"), ("pull", "host")),
)
"""Cases of the short version, each with the faults of one run."""
NOT_COMPARED = ("time/", "perf/", "limit/")


def run(
    command: Sequence[str], *, log: Path, faults: Sequence[Fault], limit_s: float
) -> int | None:
    """Return the exit status, or None after `limit_s`; no process of the run is left."""
    owner = f"{os.getpid()}-{log.stem}"
    variables = os.environ | {OWNER: owner} | (environment(*faults) if faults else {})
    with log.open("a") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "rl.train", *command],
            cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        for left in find_by_environment(OWNER, owner):
            kill(left)
        process.wait()


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics that must be equal in every run."""
    records = read_lines(folder / "metrics.jsonl")
    return [
        {k: v for k, v in record.items() if not k.startswith(NOT_COMPARED)} for record in records
    ]


def trained(folder: Path) -> Counter[Any]:
    lines = [line for name in reversed(ROLLOUTS) for line in read_lines(folder / name)]
    return Counter((r["step"], r["problem"], r["sample"]) for r in lines if r["kind"] == "train")


def check(folder: Path, reference: Path, *, faults: Sequence[Fault]) -> list[str]:
    """Return what is wrong with a finished run."""
    wrong = [f"no {f.victim} was killed" for f in faults if not f.marker(folder / "logs").exists()]
    if numbers(folder) != numbers(reference):
        wrong.append("its metrics differ from the undisturbed run's")
    if trained(folder) != trained(reference):
        wrong.append("it trained on other rollouts than the undisturbed run")
    checked = check_run(folder)
    if checked.violation is not None:
        wrong.append(f"its ledger: {checked.violation}")
    parting = compare_ledgers(folder / LEDGER, reference / LEDGER).parting
    if parting is not None:
        wrong.append(f"its ledger parts from the undisturbed run's at {parting}")
    return wrong


def recovery_s(folder: Path, faults: Sequence[Fault]) -> float:
    """Return the seconds from the first kill to the last recovery."""
    killed_at = min(
        json.loads(fault.marker(folder / "logs").read_text())["time"] for fault in faults
    )
    done = [
        e["time"] for e in read_events(folder / EVENTS) if e["event"] in ("recovered", "went_back")
    ]
    return round(max((at - killed_at for at in done if at > killed_at), default=0.0), 1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", choices=("all", "fixed"), default="all")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=VICTIMS)
    parser.add_argument("--folder", type=Path, default=Path("outputs/chaos"))
    parser.add_argument("--limit_s", type=float, default=300.0)
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    start = ["--module", "tests.support.faulty_configs", "--config", "chaos"]
    start += ["--dump_folder", str(args.folder), "--overwrite", "true", "--name"]
    log = args.folder / "undisturbed.log"
    if run([*start, "undisturbed"], log=log, faults=(), limit_s=args.limit_s) != 0:
        print(f"the undisturbed run failed: {log}")
        return 1
    every = [(pair,) for pair in itertools.product(args.phases, args.victims)]
    failed, times_s = [], {}
    for case in FIXED if args.cases == "fixed" else every:
        faults = [
            Fault(phase=phase, victim=victim, count=COUNTS.get(phase, 2)) for phase, victim in case
        ]
        victims = [fault.victim for fault in faults]
        name = "_".join(f"{fault.phase}-{fault.victim}" for fault in faults)
        folder, log = args.folder / name, args.folder / f"{name}.log"
        hosts = ["--launch.hosts", "process"] if "host" in victims else []
        status = run([*start, name, *hosts], log=log, faults=faults, limit_s=args.limit_s)
        if status == -signal.SIGKILL and "controller" in victims:
            status = run(["--resume", str(folder)], log=log, faults=faults, limit_s=args.limit_s)
        wrong = [f"exit status {status}"]
        if status == 0:
            wrong = check(folder, args.folder / "undisturbed", faults=faults)
        if wrong:
            failed.append(name)
        else:
            times_s[name] = recovery_s(folder, faults)
        print(f"{name}: {'; '.join(wrong) or f'recovered after {times_s[name]} s'}", flush=True)
    print(json.dumps({"failed": failed, "recovery_s": times_s}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
