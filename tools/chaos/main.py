"""Kill a process in each phase of a run, and see that the run gets over it: `make chaos`.

An undisturbed run comes first. Then each case is a run of its own, in which one process is killed at one
moment; it has to finish by itself (after the loss of its controller: with --resume), with the same numbers
and the same rollouts trained on. The last line is a JSON object. Exit status: 0 all did, 1 one did not, 2
the undisturbed run failed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from actors.fault_injection import VICTIMS
from rl.observability.run_folder import read_status
from tools.chaos.cases import PHASES, Case, all_cases, fixed_cases, random_cases
from tools.chaos.findings import Findings, look_at
from tools.chaos.runs import Ended, struck, undisturbed

REFERENCE = "undisturbed"
HEAD = ("phase", "victim", "recovered", "after s", "more s", "lost", "doubled", "equal", "what was seen")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    case: Case
    ended: Ended
    findings: Findings
    more_s: float
    """That the whole took longer than the undisturbed run."""

    @property
    def is_good(self) -> bool:
        return self.findings.is_good and self.ended.statuses[-1:] == (0,)

    @property
    def row(self) -> tuple[str, ...]:
        """Of the table."""
        findings = self.findings
        after_s = findings.recovered_after_s
        return (
            self.case.fault.phase,
            self.case.fault.victim,
            "yes" if findings.finished and self.ended.statuses[-1:] == (0,) else "NO",
            "" if after_s is None else f"{after_s:.1f}",
            f"{self.more_s:.1f}",
            str(findings.num_lost),
            str(findings.num_doubled),
            "NO" if findings.differences else "yes",
            self.seen,
        )

    @property
    def seen(self) -> str:
        """What is to be said of it beside its figures."""
        if not self.findings.struck:
            return "the moment never came"
        if self.ended.timed_out:
            return "it had not ended in time"
        if self.ended.statuses[-1] != 0:
            return f"exit status {self.ended.statuses[-1]}"
        return "; ".join(self.findings.differences[:1])


def table(outcomes: Sequence[Outcome]) -> str:
    """In Markdown, a row a case."""
    rows = [HEAD, ("---",) * len(HEAD), *(outcome.row for outcome in outcomes)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def summary(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Of all cases, for programs."""
    slowest: dict[str, float] = {}
    for outcome in outcomes:
        victim, after_s = outcome.case.fault.victim, outcome.findings.recovered_after_s
        if after_s is not None:
            slowest[victim] = round(max(after_s, slowest.get(victim, 0.0)), 1)
    return {
        "cases": len(outcomes),
        "good": sum(outcome.is_good for outcome in outcomes),
        "lost": sum(outcome.findings.num_lost for outcome in outcomes),
        "doubled": sum(outcome.findings.num_doubled for outcome in outcomes),
        "unequal": sum(bool(outcome.findings.differences) for outcome in outcomes),
        "slowest_recovery_s": slowest,
        "bad": [asdict(outcome.case.fault) for outcome in outcomes if not outcome.is_good],
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    folder = Path(options.folder).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    cases = _chosen(options)
    # As Ctrl-C does: what is left of a run is ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    reference = folder / f"{REFERENCE}-{options.config}"
    print(f"{len(cases)} cases, in {folder}; first the undisturbed run", flush=True)
    base = undisturbed(reference, config=options.config, limit_s=options.limit_s)
    if base.statuses != (0,) or read_status(reference) != "finished":
        print(f"error: the undisturbed run failed, see {reference}.log", file=sys.stderr)
        return 2
    print(f"undisturbed: {base.run_s:.1f} s", flush=True)
    outcomes = []
    for case in cases:
        place = folder / case.name
        ended = struck(case, place, config=options.config, limit_s=options.limit_s)
        findings = look_at(place, reference=reference, same_numbers=options.config == "chaos")
        outcomes.append(Outcome(case=case, ended=ended, findings=findings, more_s=ended.run_s - base.run_s))
        print(f"{case.name}: {' '.join(outcomes[-1].row[2:])}", flush=True)
    print(f"\n{table(outcomes)}\n")
    print(json.dumps(summary(outcomes)), flush=True)
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


def _chosen(options: argparse.Namespace) -> list[Case]:
    if options.cases == "fixed":
        return fixed_cases()
    if options.cases == "all":
        return all_cases(options.phases, options.victims)
    return random_cases(options.runs, seed=options.seed, phases=options.phases, victims=options.victims)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.chaos.main", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases", choices=("fixed", "all", "random"), default="all",
        help="four, every victim in every phase, or --runs drawn by chance",
    )  # fmt: skip
    parser.add_argument("--runs", type=int, default=20, help="of random cases")
    parser.add_argument("--seed", type=int, default=0, help="of random cases")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=list(VICTIMS))
    parser.add_argument("--config", choices=("chaos", "chaos_async"), default="chaos")
    parser.add_argument(
        "--folder", default="outputs/chaos", help="of the runs; replaced where they are there"
    )
    parser.add_argument("--limit_s", type=float, default=400.0, help="for one run")
    options = parser.parse_args(argv)
    if options.runs < 1 or not options.limit_s > 0:
        parser.error(f"--runs {options.runs}, --limit_s {options.limit_s}: at least 1, and above 0")
    return options


if __name__ == "__main__":
    sys.exit(main())
