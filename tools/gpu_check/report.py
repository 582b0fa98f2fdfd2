"""Results of one check: faults, slow figures, and figures to keep."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

from torch import Tensor

OK, SLOW, FAILED, NOT_HERE = "ok", "slow", "failed", "not here"


def is_installed(package: str) -> bool:
    """Return whether there is a package of this name, without importing it."""
    return find_spec(package) is not None


@dataclass(kw_only=True, slots=True)
class Report:
    """What a check found; results of kernels and speeds are judged only if `numbers` is True."""

    numbers: bool = True
    figures: dict[str, float] = field(default_factory=dict)
    judged: list[str] = field(default_factory=list)
    """Names of the figures that are better when larger."""
    faults: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    not_here: str | None = None
    """What this machine lacks for the check, such as "needs 5 GPUs"."""

    def require(self, holds: bool, fault: str) -> None:
        if not holds:
            self.faults.append(fault)

    def has_package(self, package: str, *, part: str) -> bool:
        """Return whether a package is installed; if not, note which part of the check needs it."""
        if is_installed(package):
            return True
        self.notes.append(f"{part}: not checked, because {package} is not installed")
        return False

    def figure(self, name: str, value: float, *, at_least: float | None = None) -> None:
        """Keep a figure; below `at_least` it is slow."""
        self.figures[name] = round(float(value), 4)
        if at_least is None:
            return
        self.judged.append(name)
        if self.numbers and not value >= at_least:
            self.slow.append(f"{name} {value:.3g} is below {at_least:.3g}")

    def close(self, name: str, got: Tensor, wanted: Tensor, *, atol: float) -> None:
        """Fail unless the shapes are equal and no number differs by more than `atol`."""
        if got.shape != wanted.shape:
            self.faults.append(
                f"{name} has the shape {tuple(got.shape)} instead of {tuple(wanted.shape)}"
            )
            return
        difference = (
            (got.detach().double().cpu() - wanted.detach().double().cpu()).abs().max().item()
        )
        self.same(name, difference, atol=atol)

    def same(self, name: str, difference: float, *, atol: float) -> None:
        """Fail if a difference is NaN or above `atol`."""
        if self.numbers:
            self.figures[f"{name} differs by"] = float(f"{difference:.3g}")
            self.require(
                difference <= atol, f"{name} differs by {difference:.3g}, more than {atol:g}"
            )

    @property
    def result(self) -> str:
        if self.not_here is not None:
            return NOT_HERE
        return FAILED if self.faults else SLOW if self.slow else OK

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self) | {"result": self.result}), encoding="utf-8")
