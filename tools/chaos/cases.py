"""Who is killed, and when."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from actors.fault_injection import VICTIMS, Fault

PHASES = ("generate", "score", "forward_backward", "optim_step", "push", "pull", "save")
COUNTS = {"generate": 12, "score": 10}
"""Of the phases that come once for each group: in the second step. The others' second one is there too."""
OTHERS_COUNT = 2
STEPS = 3
"""A phase of a random case is in one of the first three steps; in the fourth there is nothing after it."""
MAX_DELAY_S = 0.3
FIXED = (("generate", "generator"), ("optim_step", "trainer"), ("pull", "host"), ("save", "controller"))
"""The short version, for CI."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run, and what is done to it."""

    number: int
    fault: Fault

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.number:03d}-{self.fault.phase}-{self.fault.victim}"

    @property
    def options(self) -> tuple[str, ...]:
        """Of its command line."""
        # There is a host to be killed only where hosts are simulated.
        return ("--launch.hosts", "process") if self.fault.victim == "host" else ()


def _case(number: int, phase: str, victim: str) -> Case:
    fault = Fault(phase=phase, victim=victim, count=COUNTS.get(phase, OTHERS_COUNT))
    return Case(number=number, fault=fault)


def fixed_cases() -> list[Case]:
    return [_case(number, phase, victim) for number, (phase, victim) in enumerate(FIXED, start=1)]


def all_cases(phases: Sequence[str] = PHASES, victims: Sequence[str] = VICTIMS) -> list[Case]:
    """Every victim in every phase."""
    pairs = enumerate(itertools.product(phases, victims), start=1)
    return [_case(number, phase, victim) for number, (phase, victim) in pairs]


def random_cases(
    num_cases: int, *, seed: int, phases: Sequence[str] = PHASES, victims: Sequence[str] = VICTIMS
) -> list[Case]:
    """Any victim at any moment; the same ones for the same seed."""
    draw = random.Random(seed)
    cases = []
    for number in range(1, num_cases + 1):
        phase, victim = draw.choice(phases), draw.choice(victims)
        most = COUNTS.get(phase, OTHERS_COUNT) * STEPS // 2
        delay_s = round(draw.uniform(0.0, MAX_DELAY_S), 3)
        fault = Fault(phase=phase, victim=victim, count=draw.randint(1, most), delay_s=delay_s)
        cases.append(Case(number=number, fault=fault))
    return cases
