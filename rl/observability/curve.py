"""The learning curve of a run as a picture, drawn from its metrics file."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from rl.atomic_file import replacing
from rl.observability.metrics import read_metrics

logger = logging.getLogger(__name__)

REWARD, CORRECT, EVALUATION = "#8a94a6", "#2f6fbb", "#d1495b"
Points = tuple[list[float], list[float]]


def write_learning_curve(metrics_path: Path, png_path: Path) -> None:
    """Draw reward and correctness over steps, and the trainer's distance from the generator below.

    Raises:
        ValueError: the file has no step and no evaluation yet.
    """
    records = read_metrics(metrics_path)
    series = {
        name: _points(records, name)
        for name in ("reward/mean", "reward/correct", "eval/correct", "logprob_diff/mean", "logprob_diff/max")
    }
    if not any(steps for steps, _ in series.values()):
        raise ValueError(f"{metrics_path} has no steps to draw")

    # Not pyplot: its figures are global state, and this may run beside a notebook's.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.4, 1))
    _draw_learning(upper, series)
    _draw_difference(lower, series)
    figure.align_ylabels()
    with replacing(png_path) as file:
        figure.savefig(file, format="png")


def draw_learning_curve(metrics_path: Path, png_path: Path) -> None:
    """As `write_learning_curve`; a disk without room is a warning: the numbers are in the file."""
    try:
        write_learning_curve(metrics_path, png_path)
    except OSError as error:
        logger.warning("%s was not written: %s", png_path, error.strerror or error)


def _points(records: list[dict[str, float]], name: str) -> Points:
    pairs = [(record["step"], record[name]) for record in records if name in record and "step" in record]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _smoothed(values: list[float]) -> list[float]:
    """Mean over a window that grows to a twentieth of the run; a number that is not finite is left out."""
    width = max(1, len(values) // 20)
    means = []
    for end in range(1, len(values) + 1):
        window = [v for v in values[max(0, end - width) : end] if math.isfinite(v)]
        means.append(sum(window) / len(window) if window else math.nan)
    return means


def _draw_learning(axes: Any, series: dict[str, Points]) -> None:
    for name, label, color in (
        ("reward/mean", "reward, mean of the step", REWARD),
        ("reward/correct", "correct, share of the step's samples", CORRECT),
    ):
        steps, values = series[name]
        if steps:
            axes.plot(steps, values, color=color, alpha=0.28, linewidth=0.9)
            axes.plot(steps, _smoothed(values), color=color, linewidth=1.8, label=label)
    steps, values = series["eval/correct"]
    if steps:
        axes.plot(
            steps,
            values,
            color=EVALUATION,
            linewidth=1.4,
            marker="o",
            markersize=5,
            markeredgecolor="white",
            label="correct, held-out problems (greedy)",
            zorder=5,
        )
        axes.annotate(
            f"{values[-1]:.2f}",
            (steps[-1], values[-1]),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=EVALUATION,
            fontsize=9,
            fontweight="bold",
            annotation_clip=False,
        )
    axes.set_ylabel("reward, share correct")
    drawn = [v for name in ("reward/mean", "reward/correct", "eval/correct") for v in series[name][1]]
    if all(0 <= v <= 1 for v in drawn if math.isfinite(v)):
        axes.set_ylim(-0.02, 1.02)
    _finish(axes)


def _draw_difference(axes: Any, series: dict[str, Points]) -> None:
    drawn: list[float] = []
    for name, label, width, alpha in (
        ("logprob_diff/max", "max", 0.9, 0.4),
        ("logprob_diff/mean", "mean", 1.8, 1.0),
    ):
        steps, values = series[name]
        if steps:
            axes.plot(steps, values, color=CORRECT, alpha=alpha, linewidth=width, label=label)
        drawn += values
    if any(v > 0 and math.isfinite(v) for v in drawn):
        axes.set_yscale("log")
    elif drawn:
        axes.text(0.5, 0.6, "identical", transform=axes.transAxes, ha="center", color=CORRECT, fontsize=9)
    axes.set_ylabel("|trainer - generator|\nlogprob, nats")
    axes.set_xlabel("step")
    _finish(axes)


def _finish(axes: Any) -> None:
    axes.grid(True, color="#e6e8ec", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#9aa1ad")
    axes.tick_params(colors="#3c4250", labelsize=9)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", frameon=False, fontsize=9)
