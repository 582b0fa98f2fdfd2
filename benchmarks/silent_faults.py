"""SilentBench: are the one-line faults that cost others weeks noticed in a run of two steps?

    python -m benchmarks.silent_faults [--quick] [-k TEXT] [--clean 50] [--first 0]
                                       [--keep FOLDER]

Each row of `silent_faults.tsv` is a fault from the public history of RL systems, with its issue. It
is planted into a copy of the tree, which then trains two steps with all actors
(`silent_configs.py`); of this tree are the checks afterwards. A fault counts as caught by

    error      the run ended with an error that is not a crash of Python's, such as a TypeError
    parity     the same, by a comparison of weights or logprobs
    finding    a finding of `python -m rl.report`
    ledger     a violation of `python -m rl.ledger`, with its rule
    replay     a difference of `python -m rl.ledger --replay`

Nothing tells these what to look for. Clean runs differ in config and seed; whatever is counted for
a fault is an alarm there. The last line is a JSON object; the ratio is the share of faults that
were caught within two steps.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import ROOT, open_runs_folder, prepare_start
from benchmarks.silent_configs import CLEAN, STOPPED
from rl.ledger.__main__ import main as run_ledger
from rl.ledger.check import check_run
from rl.ledger.files import LedgerError, list_files
from rl.observability.metrics import read_metrics
from rl.observability.run_folder import LEDGER, METRICS
from rl.reporting.data import read_run
from rl.reporting.findings import find
from tools.mutants.__main__ import copy_tree

MODULE = "benchmarks.silent_configs"
TIMEOUT_S = 300.0
QUICK_FAULTS, QUICK_CLEAN = 3, 2
NUM_CLEAN = 50
SOON = 2
"""Steps within which a fault should be noticed."""
STOP_AFTER = 2
"""Steps after which a run that is resumed is stopped."""
CRASH = re.compile(
    r"\b(TypeError|AttributeError|NameError|KeyError|IndexError|AssertionError|ImportError)\b"
)
PARITY = re.compile(
    r"parity|logprobs of trainer and generator differ|holds other bits", re.IGNORECASE
)
IN_STEP = re.compile(r"\bstep (\d+)\b")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault: a fragment of a file, which occurs once, and what replaces it."""

    name: str
    issue: str
    """Repository and number of the issue or pull request that it comes from."""
    file: str
    original: str
    faulty: str
    config: str
    """Function of `silent_configs` whose run the fault needs."""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """Something that was noticed in a run."""

    by: str
    step: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a run."""

    alarms: tuple[Alarm, ...]
    first_step: int
    """Step of the run in which the fault could show first."""
    seconds: float
    crash: str = ""
    """Error of a run that ended for another reason, such as a fault that does not run at all."""

    @property
    def num_steps(self) -> int | None:
        """Steps until the first alarm; None if there is none."""
        if not self.alarms:
            return None
        return max(1, min(alarm.step for alarm in self.alarms) - self.first_step + 1)


def read_faults(file: Path) -> tuple[Fault, ...]:
    """Return the rows of a table; its fields are separated by tabs, and \\n is a line's end."""
    header, *lines = file.read_text().splitlines()
    names = header.split("\t")
    faults = []
    for line in lines:
        values = [value.replace("\\n", "\n") for value in line.split("\t")]
        faults.append(Fault(**dict(zip(names, values, strict=True))))
    return tuple(faults)


FAULTS = read_faults(Path(__file__).with_suffix(".tsv"))


class Bench:
    """Runs of planted and of clean trees, each in a folder below one."""

    def __init__(self, folder: Path, *, tree: Path, assets: str) -> None:
        self._folder = folder
        self._tree = tree
        self._assets = assets

    def try_fault(self, fault: Fault) -> Outcome:
        """Plant one fault in the copy, run it, take it out again, and check its run."""
        file = self._tree / fault.file
        text = file.read_text()
        assert text.count(fault.original) == 1, f"{fault.name} does not fit {fault.file}"
        self._write(file, text.replace(fault.original, fault.faulty))
        name = fault.name.replace(" ", "-")
        try:
            return self._try(name, fault.config, tree=self._tree, seed=0)
        finally:
            self._write(file, text)

    def _write(self, file: Path, text: str) -> None:
        file.write_text(text)
        # A compiled file may outlive a fault that was written within the same second.
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            compiled.unlink()

    def try_clean(self, number: int) -> Outcome:
        """Run a config of the clean tree, with a seed of its own."""
        config = CLEAN[number % len(CLEAN)]
        return self._try(f"clean-{number}-{config}", config, tree=ROOT, seed=number)

    def _try(self, name: str, config: str, *, tree: Path, seed: int) -> Outcome:
        started = time.monotonic()
        run = self._folder / name
        options = ["--module", MODULE, "--config", config, "--hf_assets_path", self._assets]
        options += ["--dump_folder", str(self._folder), "--name", name, "--seed", str(seed)]
        stops = config in STOPPED
        status, printed = self._run(options, run, tree=tree, stops=stops)
        first_step = 1
        if stops and status and list_files(run / LEDGER):
            # A fault of a resume shows in the steps after it.
            first_step = list_files(run / LEDGER)[-1].step + 1
            last_step = str(first_step + SOON - 1)
            options = ["--resume", str(run), "--loop.num_steps", last_step]
            status, printed = self._run(options, run, tree=tree, stops=False)
        alarms, crash = list_alarms(run, status=status, printed=printed, first_step=first_step)
        return Outcome(
            alarms=tuple(alarms),
            first_step=first_step,
            seconds=time.monotonic() - started,
            crash=crash,
        )

    def _run(
        self, options: Sequence[str], run: Path, *, tree: Path, stops: bool
    ) -> tuple[int, str]:
        """Run training to its end, or to a stop after some steps; return status and output."""
        environment = os.environ | {"PYTHONPATH": str(tree)}
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "rl.train", *options],
                cwd=tree,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                if stops:
                    _wait_for_steps(process, run / METRICS)
                    process.send_signal(signal.SIGTERM)
                status = process.wait(TIMEOUT_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            return status, output.read()


def _wait_for_steps(process: subprocess.Popen[bytes], metrics: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and len(read_metrics(metrics)) >= STOP_AFTER:
            return
        time.sleep(0.05)


def list_alarms(
    run: Path, *, status: int, printed: str, first_step: int
) -> tuple[list[Alarm], str]:
    """Return what was noticed in a run that has ended, and the error of a run that has crashed."""
    alarms: list[Alarm] = []
    crash = ""
    if status:
        error = _find_error(printed)
        if CRASH.search(error) or not error:
            crash = error or printed[-500:]
        else:
            by = "parity" if PARITY.search(error) else "error"
            found = IN_STEP.search(error)
            alarms.append(Alarm(by=by, step=int(found[1]) if found else first_step, text=error))
    if not (run / METRICS).parent.is_dir():
        return alarms, crash
    with contextlib.suppress(ValueError):
        for finding in find(read_run(run)):
            # The same error once more, in the report's words.
            if not (status and finding.sentence.startswith("The run stopped")):
                text = f"{finding.kind}: {finding.sentence}"
                alarms.append(Alarm(by="finding", step=finding.since_step, text=text))
    with contextlib.suppress(LedgerError):
        violation = check_run(run).violation
        if violation is not None:
            text = str(violation)
            alarms.append(Alarm(by=f"ledger ({violation.rule})", step=violation.step, text=text))
    # Once something was noticed nobody needs a second look.
    if not alarms:
        alarms += _replay(run, first_step=first_step)
    return alarms, crash


def _replay(run: Path, *, first_step: int) -> list[Alarm]:
    """Train the steps of a run again, up to the first that differs."""
    for file in list_files(run / LEDGER):
        if file.step < first_step:
            continue
        told = io.StringIO()
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            status = run_ledger([str(run), "--replay", str(file.step)])
        if status:
            lines = [line for line in told.getvalue().splitlines() if line.startswith("differs")]
            text = lines[0] if lines else told.getvalue()[-300:].strip()
            return [Alarm(by="replay", step=file.step, text=text)]
    return []


def _find_error(printed: str) -> str:
    """Return what a run said of its error, from "error:" on; empty if nothing."""
    place = printed.rfind("\nerror:")
    return " ".join(printed[place:].split())[:1000] if place >= 0 else ""


def describe(name: str, outcome: Outcome) -> str:
    """Return a row of the table."""
    steps = outcome.num_steps
    by = ", ".join(dict.fromkeys(alarm.by for alarm in outcome.alarms)) or "nothing"
    if not outcome.alarms and outcome.crash:
        by = "CRASHED"
    why = outcome.alarms[0].text if outcome.alarms else outcome.crash
    return f"{name:36} {by:30} {steps or '-':>3} {outcome.seconds:6.1f} s  {why[:240]}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three faults and two clean runs")
    parser.add_argument("-k", default="", help="only faults with this text in a field")
    parser.add_argument("--clean", type=int, help="number of clean runs; 50")
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first clean run, also its seed; 0"
    )
    parser.add_argument("--keep", type=Path, help="folder that keeps the runs")
    args = parser.parse_args(arguments)
    faults = [fault for fault in FAULTS if args.k in " ".join(vars(fault).values())]
    num_clean = args.clean
    if args.quick:
        faults = faults[:QUICK_FAULTS]
        num_clean = QUICK_CLEAN if num_clean is None else num_clean
    num_clean = NUM_CLEAN if num_clean is None else num_clean

    with open_runs_folder() as folder, tempfile.TemporaryDirectory(prefix="silent-") as name:
        tree = Path(name)
        copy_tree(tree)
        runs = args.keep or folder
        runs.mkdir(parents=True, exist_ok=True)
        assets = str(Path(prepare_start(folder, seed=0)).resolve())
        bench = Bench(runs.resolve(), tree=tree, assets=assets)
        outcomes: dict[str, Outcome] = {}
        for fault in faults:
            outcomes[fault.name] = bench.try_fault(fault)
            print(describe(fault.name, outcomes[fault.name]), flush=True)
        clean: list[Outcome] = []
        for number in range(args.first, args.first + num_clean):
            clean.append(bench.try_clean(number))
            print(describe(f"clean run {number}", clean[-1]), flush=True)
    return _summarize(outcomes, clean)


def _summarize(outcomes: dict[str, Outcome], clean: Sequence[Outcome]) -> int:
    """Print the JSON object, and return the exit status."""
    caught = [name for name, outcome in outcomes.items() if outcome.alarms]
    soon = [name for name in caught if (outcomes[name].num_steps or 0) <= SOON]
    alarms = [outcome for outcome in clean if outcome.alarms or outcome.crash]
    seconds = [outcome.seconds for outcome in (*outcomes.values(), *clean)]
    figures = {
        "benchmark": "silent_faults",
        "compared": "faults that were caught within two steps over all faults",
        "ratio": len(soon) / len(outcomes) if outcomes else 1.0,
        "caught": len(caught),
        "caught_within_two_steps": len(soon),
        "of": len(outcomes),
        "escaped": [name for name in outcomes if name not in caught],
        "clean_runs": len(clean),
        "false_alarms": len(alarms),
        "seconds_of_a_run": round(sum(seconds) / len(seconds), 1) if seconds else 0.0,
    }
    print(json.dumps(figures))
    return int(bool(alarms) or len(soon) < 0.95 * len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
