"""Check of a ledger: does what was trained follow from what was sampled and rewarded?

Each rule (`rl.ledger.rules`) looks at one step and yields what does not hold; the first one ends
the check. Files that are missing or damaged do not end it: what is left is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from rl.config.json import get_value_at
from rl.ledger.files import FOREIGN, TINKER, LedgerError, LedgerFile, list_files, read
from rl.ledger.findings import Checked, Violation
from rl.ledger.rules import RULES
from rl.ledger.step import LedgerStep
from rl.ledger.tinker_rules import TINKER_RULES, check_saved
from rl.observability.metrics import read_metrics
from rl.observability.run_folder import CONFIG, LEDGER, METRICS, read_status
from rl.utils.files import read_json_object
from rl.utils.printing import truncate


def find_ledger(run: Path) -> Path:
    """Return the ledger in a run's folder; raise LedgerError if there is none."""
    folder = run / LEDGER
    if not run.is_dir():
        raise LedgerError(f"{run} is not a folder")
    if list_files(folder):
        return folder
    if list_files(run):
        raise LedgerError(f"{run} is a ledger: give the folder of its run, {run.parent}")
    if folder.exists() and not folder.is_dir():
        raise LedgerError(f"{folder} is not a folder")
    below = [one.parent.name for one in sorted(run.glob(f"*/{LEDGER}")) if list_files(one)]
    if below:
        raise LedgerError(
            f"{run} has no ledger, but those of its folders {truncate(', '.join(below))}: give one "
            "of these"
        )
    # Without a folder the run may have had no ledger, or none yet.
    if folder.exists() or _is_enabled(run) is True:
        raise LedgerError(
            f"{folder} has no file of a step: the run has done none, its loop is a script's own, "
            "which writes no ledger, or the files were removed"
        )
    raise LedgerError(
        f"{run} has no ledger: run with --ledger.enable True (ledger.enable in the config)"
    )


def _is_enabled(run: Path) -> bool | None:
    """Return whether a run's config has the ledger enabled; None if it cannot be read."""
    with suppress(OSError, ValueError):
        enabled = get_value_at(read_json_object(run / CONFIG).get("values", {}), "ledger.enable")
        return enabled if isinstance(enabled, bool) else None
    return None


def check_run(run: Path) -> Checked:
    """Check the ledger of a run's folder.

    The check ends at the first step that does not follow from what was sampled. Where a file is
    missing or damaged, it goes on with the others. Raises LedgerError if there is no ledger.
    """
    folder = find_ledger(run)
    checked = Checked(run=run)
    _check_files(folder, checked)
    # A removed last file leaves a chain that is whole.
    if checked.num_steps and not checked.is_ended:
        checked.violations += _check_end(run, checked)
    if checked.violation is None and (violation := check_saved(run, checked)) is not None:
        checked.violations.append(violation)
    return checked


def _check_end(run: Path, checked: Checked) -> Iterator[Violation]:
    """Yield the violation of a ledger that lacks its beginning, or ends before the metrics do."""
    metrics = run / METRICS
    # The writer removes old files too, and then says so in the next one.
    if checked.told_first < checked.first:
        yield Violation(
            step=checked.told_first,
            rule="order",
            where="",
            what="the ledger begins later than its last file says",
            expected=f"step {checked.told_first}",
            found=f"step {checked.first}",
        )
        return
    if checked.beginning:
        checked.note(checked.beginning)
    # Records of evaluations have no version of the weights.
    records = read_metrics(metrics) if metrics.exists() else []
    steps = [int(record["step"]) for record in records if "policy_version" in record]
    # A Tinker session has no metrics.
    if not any(steps) and checked.kind != TINKER:
        checked.note(f"{METRICS} has no steps: later ones than the ledger has may be missing")
    assert checked.previous is not None
    num_missing = max([0, *steps]) - checked.previous.step
    # A step is written while the next one goes on, and its metrics may be there first.
    if num_missing == 1 and read_status(run) == "running":
        checked.note(
            f"step {max(steps)}, the last one in {METRICS}: its file is not there; the run goes on "
            "or was killed"
        )
    elif num_missing > 0 and _is_enabled(run) is False:
        checked.note(f"steps after {checked.previous.step}: the ledger was turned off then")
    elif num_missing > 0:
        yield Violation(
            step=checked.previous.step + 1,
            rule="order",
            where="",
            what=f"the ledger ends before {METRICS}",
            expected=f"a file for each step up to {max(steps)}",
            found="none",
        )


def _check_files(folder: Path, checked: Checked) -> None:
    for file in list_files(folder):
        checked.first = checked.first or file.step
        try:
            step = LedgerStep(read(file))
            checked.violations += _check_place(step, file, checked)
            violation = _check_step(step, checked)
        except (OSError, *FOREIGN) as error:
            checked.violations.append(_describe_damage(file, error))
            checked.forget_before()
            # Its name has the digest that the next file has to have.
            checked.previous = file
            continue
        if violation is not None:
            checked.violations.append(violation)
            checked.is_ended = True
            return
        checked.previous = file
        checked.num_steps += 1
        checked.num_episodes += sum(len(group["members"]) for group in step.groups)
        checked.num_tokens += sum(m["num_tokens"] for m in step.facts["minibatches"])


def _describe_damage(file: LedgerFile, error: Exception) -> Violation:
    # Damaged; or whole, as its name says, but not written by a run.
    found = f"{type(error).__name__}: {error}"
    if isinstance(error, LedgerError):
        found = str(error)
    elif isinstance(error, OSError):
        found = error.strerror or str(error)
    return Violation(
        step=file.step,
        rule="file",
        where="",
        what=file.path.name,
        expected="the file that its name has the digest of, as a run writes it",
        found=found,
    )


def _check_place(step: LedgerStep, file: LedgerFile, checked: Checked) -> Iterator[Violation]:
    """Yield the violation of a file that does not follow the one before."""
    checked.told_first = int(step.facts["first"])
    previous = checked.previous
    follows = previous is not None and step.facts["previous"] == previous.digest
    if previous is None:
        if file.step > 1:
            why = (
                "older steps were removed (ledger.max_gigabytes)"
                if step.facts["previous"]
                else "it was enabled then, or the run began with another run's checkpoint"
            )
            checked.beginning = f"the ledger begins with step {file.step}: {why}"
    elif file.step != previous.step + 1:
        yield Violation(
            step=file.step,
            rule="order",
            where="",
            what=f"the file after {previous.path.name}",
            expected=f"step {previous.step + 1}",
            found=f"step {file.step}{', as the run has written them' if follows else ''}",
        )
        checked.forget_before()
    elif not follows:
        yield Violation(
            step=file.step,
            rule="chain",
            where="",
            what=f"digest of the file before, as {file.path.name} has it",
            expected=previous.digest,
            found=str(step.facts["previous"]),
        )


def _check_step(step: LedgerStep, checked: Checked) -> Violation | None:
    checked.kind = step.kind
    for rule in TINKER_RULES if step.kind == TINKER else RULES:
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
