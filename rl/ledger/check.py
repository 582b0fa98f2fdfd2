"""Check of a ledger: does what was trained follow from what was sampled and rewarded?

Each rule (`rl.ledger.rules`) looks at one step and yields what does not hold; the first one ends
the check.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rl.ledger.files import LedgerError, LedgerFile, list_files, read
from rl.ledger.rules import RULES, Checked, Violation
from rl.ledger.step import LedgerStep
from rl.observability.metrics import read_metrics
from rl.observability.run_folder import LEDGER, METRICS, read_status
from rl.utils.printing import truncate


def find_ledger(run: Path) -> Path:
    """Return the ledger in a run's folder; raise LedgerError if there is none."""
    folder = run / LEDGER
    if not run.is_dir():
        raise LedgerError(f"{run} is not a folder")
    if not list_files(folder):
        raise LedgerError(
            f"{run} has no ledger: run with --ledger.enable True (ledger.enable in the config)"
        )
    return folder


def check_run(run: Path) -> Checked:
    """Check the ledger of a run's folder up to the first violation.

    Raises LedgerError if there is none.
    """
    folder = find_ledger(run)
    checked = Checked()
    checked.violation = _check_files(folder, checked)
    # A removed last file leaves a chain that is whole.
    if checked.violation is None:
        checked.violation = _check_end(run, checked)
    return checked


def _check_end(run: Path, checked: Checked) -> Violation | None:
    """Return the violation of a ledger that lacks its beginning, or ends before the metrics do."""
    metrics = run / METRICS
    # The writer removes old files too, and then says so in the next one.
    if checked.told_first != checked.first:
        return Violation(
            step=checked.told_first,
            rule="order",
            where="",
            what="the ledger begins later than its last file says",
            expected=f"step {checked.told_first}",
            found=f"step {checked.first}",
        )
    steps = [0]
    # Records of evaluations have no version of the weights.
    if metrics.exists():
        steps += [int(r["step"]) for r in read_metrics(metrics) if "policy_version" in r]
    assert checked.previous is not None
    num_missing = max(steps) - checked.previous.step
    if num_missing <= 0:
        return None
    # A step is written while the next one goes on, and its metrics may be there first.
    if num_missing == 1 and read_status(run) == "running":
        checked.note(
            f"step {max(steps)}, the last one in {METRICS}: its file is not there; the run goes on "
            "or was killed"
        )
        return None
    return Violation(
        step=checked.previous.step + 1,
        rule="order",
        where="",
        what="the ledger ends before metrics.jsonl",
        expected=f"a file for each step up to {max(steps)}",
        found="none",
    )


def _check_files(folder: Path, checked: Checked) -> Violation | None:
    for file in list_files(folder):
        violation = _check_order(file, checked)
        if violation is not None:
            return violation
        try:
            step = LedgerStep(read(file))
            violation = _check_chain(step, file, checked) or _check_step(step, checked)
        except (LedgerError, LookupError, TypeError) as error:
            # Damaged; or whole, as its name says, but not written by a run.
            is_known = isinstance(error, LedgerError)
            return Violation(
                step=file.step,
                rule="file",
                where="",
                what=file.path.name,
                expected="the file that its name has the digest of, as a run writes it",
                found=str(error) if is_known else f"{type(error).__name__}: {error}",
            )
        if violation is not None:
            return violation
        checked.previous = file
        checked.num_steps += 1
        checked.num_episodes += sum(len(group["members"]) for group in step.groups)
        checked.num_tokens += sum(m["num_tokens"] for m in step.facts["minibatches"])
    return None


def _check_order(file: LedgerFile, checked: Checked) -> Violation | None:
    previous = checked.previous
    if previous is None or file.step == previous.step + 1:
        return None
    return Violation(
        step=file.step,
        rule="order",
        where="",
        what=f"the file after {previous.path.name}",
        expected=f"step {previous.step + 1}",
        found=f"step {file.step}",
    )


def _check_chain(step: LedgerStep, file: LedgerFile, checked: Checked) -> Violation | None:
    """Return the violation of a file that does not follow the one before."""
    checked.told_first = int(step.facts["first"])
    previous = checked.previous
    if previous is None:
        checked.first = file.step
        if file.step > 1:
            why = (
                "older steps were removed (ledger.max_gigabytes)"
                if step.facts["previous"]
                else "it was enabled then, or the run began with another run's checkpoint"
            )
            checked.note(f"the ledger begins with step {file.step}: {why}")
        return None
    if step.facts["previous"] == previous.digest:
        return None
    return Violation(
        step=file.step,
        rule="chain",
        where="",
        what=f"digest of the file before, as {file.path.name} has it",
        expected=previous.digest,
        found=str(step.facts["previous"]),
    )


def _check_step(step: LedgerStep, checked: Checked) -> Violation | None:
    for rule in RULES:
        for found in rule(step, checked):
            return Violation(
                step=step.number,
                rule=found.rule,
                where=step.describe(found.place),
                what=found.what,
                expected=_show(found.expected),
                found=_show(found.found),
            )
    return None


def _show(value: Any) -> str:
    if isinstance(value, float | np.floating):
        return f"{float(value):.9g}"
    return truncate(str(value), most=200)
