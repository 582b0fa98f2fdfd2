"""Actors that do nothing while others work: by the spans of each process, and by what the loop waited for."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import median

from rl.observability.spans import Span
from rl.reporting.evidence import Finding, metric_evidence
from rl.reporting.run_data import RunData
from rl.reporting.series import Series, first_lasting, last_level

STEP = re.compile(r"step (\d+)")
"""The name of the controller's activity during a step."""
OF_PEERS, BUSY = 0.1, 0.1
"""Share of what its like do that an idle process does, and of a step that they are busy."""
WAITS, SCORING = 0.85, 0.5
"""Shares of a step: that a role waits for another though they overlap; that all wait for rewards."""
MIN_STEPS = 5

Interval = tuple[float, float]


def find_idle_actors(run: RunData) -> list[Finding]:
    """One for each process that has no share in the work of its like; else one for a role that waits."""
    return [*_idle_processes(run.spans), *_idle_roles(run)]


# One process beside others of its role


def _idle_processes(spans: Sequence[Span]) -> list[Finding]:
    windows = _steps(spans)
    if len(windows) < MIN_STEPS:
        return []
    found = []
    for role, processes in _peers(spans).items():
        shares = {name: _busy_shares(busy, windows) for name, busy in processes.items()}
        for name, mine in shares.items():
            others = [share for other, share in shares.items() if other != name]
            usual = [median(of_step) for of_step in zip(*others, strict=True)]
            flags = [u >= BUSY and m <= OF_PEERS * u for m, u in zip(mine, usual, strict=True)]
            place = first_lasting(flags, hold=MIN_STEPS)
            if place is not None:
                found.append(_idle_process(role, name, list(windows), mine, usual, place))
    return found


def _idle_process(
    role: str, name: str, steps: list[int], mine: list[float], usual: list[float], place: int
) -> Finding:
    since = steps[place]
    series = Series(name=f"busy share of each step, {name}", steps=steps, values=mine)
    others = Series(name=f"busy share of each step, median of the other {role}s", steps=steps, values=usual)
    return Finding(
        kind="idle_actor",
        title=f"{name} does nothing",
        since_step=since,
        sentence=(
            f"Since step {since} {name} is busy for {last_level(mine[place:]):.1%} of a step, the others "
            f"of its kind for {last_level(usual[place:]):.0%}."
        ),
        advice=(
            "Its log says whether it hangs; `make doctor` whether it lives. A router that keeps sessions "
            "together (router sticky) with few prompts, or fewer problems than processes, also leaves some "
            "without work."
        ),
        evidence=(metric_evidence(series), metric_evidence(others)),
    )


def _steps(spans: Iterable[Span]) -> dict[int, Interval]:
    """When each step was; of one that was done again, the last time."""
    windows: dict[int, Interval] = {}
    for span in spans:
        if span.role == "controller" and (match := STEP.fullmatch(span.name)) and span.end_s > span.start_s:
            windows[int(match[1])] = (span.start_s, span.end_s)
    return dict(sorted(windows.items()))


def _peers(spans: Iterable[Span]) -> dict[str, dict[str, list[Interval]]]:
    """What generators and reward processes worked at, by role and process, where there are several. The ranks
    of a generator are one: they work together."""
    by_process: dict[str, dict[str, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        role = span.role.partition("_")[0]
        if role in ("generator", "reward") and span.kind != "wait":
            process = span.role if role == "generator" else f"{span.role}[{span.rank}]"
            by_process[role][process].append((span.start_s, span.end_s))
    return {role: dict(processes) for role, processes in by_process.items() if len(processes) > 1}


def _busy_shares(busy: Sequence[Interval], windows: Mapping[int, Interval]) -> list[float]:
    """Of each window, in which at least one of the intervals was."""
    merged: list[Interval] = []
    for start, end in sorted(busy):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    starts = [start for start, _ in merged]
    totals = list(accumulate((end - start for start, end in merged), initial=0.0))

    def until(moment: float) -> float:
        """Busy seconds before it."""
        place = bisect_right(starts, moment)
        return totals[place] - (max(0.0, merged[place - 1][1] - moment) if place else 0.0)

    return [(until(end) - until(start)) / (end - start) for start, end in windows.values()]


# A role beside the others


def _idle_roles(run: RunData) -> list[Finding]:
    found = []
    scoring = _share(run, "time/score_s")
    overlaps = run.setting("loop.max_policy_age", 0) > 0
    if finding := _waiting(
        scoring,
        SCORING,
        title="Trainer and generators wait for rewards",
        advice="More processes (reward.num_procs), async functions (docs/rewards.md), or a faster one.",
    ):
        found.append(finding)
    if overlaps and not found:
        for role, title, advice in _OVERLAPPING:
            if finding := _waiting(_share(run, f"time/{role}_idle_s"), WAITS, title=title, advice=advice):
                found.append(finding)
    return found


_OVERLAPPING = (
    (
        "trainer",
        "The trainer waits for rollouts",
        "More generators (generator.num_replicas), or fewer devices for the trainer: generation is the "
        "limit.",
    ),
    (
        "generator",
        "Generators wait for the trainer",
        "More devices for the trainer, or fewer generators: training is the limit. A higher "
        "loop.max_policy_age does not help.",
    ),
)


def _share(run: RunData, name: str) -> Series:
    """Of each step's time."""
    pairs = [
        (int(r["step"]), r[name] / r["time/step_s"])
        for r in run.steps
        if name in r and r.get("time/step_s", 0.0) > 0
    ]
    return Series(name=f"{name} / time/step_s", steps=[s for s, _ in pairs], values=[v for _, v in pairs])


def _waiting(series: Series, least: float, *, title: str, advice: str) -> Finding | None:
    place = first_lasting([value >= least for value in series.values], hold=MIN_STEPS)
    if place is None or len(series) - place < MIN_STEPS:
        return None
    since = series.steps[place]
    return Finding(
        kind="idle_actor",
        title=title,
        since_step=since,
        sentence=f"Since step {since} that takes {last_level(series.since(since).values):.0%} of a step.",
        advice=advice,
        evidence=(metric_evidence(series),),
    )
