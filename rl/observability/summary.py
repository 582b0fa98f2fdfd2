"""Results of a finished run: its summary in a few lines, and its learning curve."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.observability.bottleneck import bottleneck, typical
from rl.observability.metrics import read_metrics
from rl.observability.run_folder import RunFolder
from rl.utils.errors import optional_write
from rl.utils.files import atomic_write

REWARD, CORRECT, EVALUATION = "#8a94a6", "#2f6fbb", "#d1495b"


def summary(
    records: Sequence[Mapping[str, float]],
    *,
    folder: RunFolder,
    run_s: float,
    config: Mapping[str, Any] | None = None,
) -> str:
    """Return the last lines of a run: steps, time, evaluations, results and the bottleneck.

    finished: 80 steps in 0:04:12
      evaluation      correct 0.375 -> 0.979 of 512 problems
      checkpoint      outputs/x/checkpoints/step-80
      Hugging Face    outputs/x/checkpoints/hf
      LoRA adapter    outputs/x/checkpoints/adapter
      learning curve  outputs/x/learning_curve.png
      report          python -m rl.report outputs/x
      bottleneck      generation takes 61% of a step and reaches 8% of what the machine can do: ...
      would move it   --loop.max_off_policy_steps 1
    """
    num_steps = round(max((record["step"] for record in records), default=0))
    lines = [f"finished: {num_steps} steps in {datetime.timedelta(seconds=round(run_s))}"]
    if evaluations := [record for record in records if "eval/correct" in record]:
        first, last = evaluations[0], evaluations[-1]
        start = f"{first['eval/correct']:.3f} -> " if len(evaluations) > 1 else ""
        found = f"{last['eval/correct']:.3f} of {last['eval/num_problems']:.0f} problems"
        lines.append(f"  evaluation      correct {start}{found}")
    results = {
        "checkpoint": folder.checkpoints / f"step-{num_steps}",
        "Hugging Face": folder.checkpoints / "hf",
        "LoRA adapter": folder.checkpoints / "adapter",
        "learning curve": folder.learning_curve,
    }
    lines += [f"  {title:<14}  {path}" for title, path in results.items() if path.exists()]
    if num_steps:
        lines.append(f"  report          python -m rl.report {folder.path}")
    if (limit := bottleneck(typical(records), config)) is not None:
        lines += [f"  bottleneck      {limit.sentence}", f"  would move it   {limit.setting}"]
    return "\n".join(lines)


def draw_learning_curve(metrics_path: Path, png_path: Path) -> None:
    """Draw reward and correctness over steps; a full disk is a warning."""
    # pyplot would share its global state with a notebook.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = read_metrics(metrics_path)
    figure = Figure(figsize=(8, 4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, label, color in (
        ("reward/mean", "reward, mean of the step", REWARD),
        ("reward/correct", "correct, share of the step's samples", CORRECT),
    ):
        steps, values = _points(records, name)
        axes.plot(steps, values, color=color, alpha=0.28, linewidth=0.9)
        axes.plot(steps, _smoothed(values), color=color, linewidth=1.8, label=label)
    steps, values = _points(records, "eval/correct")
    if steps:
        label = f"correct, held-out problems (greedy), last {values[-1]:.2f}"
        axes.plot(
            steps, values, color=EVALUATION, linewidth=1.4, marker="o", markersize=5, label=label
        )
    axes.set_ylabel("reward, share correct")
    axes.set_xlabel("step")
    axes.grid(True, color="#e6e8ec", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="best", frameon=False, fontsize=9)
    with optional_write(png_path), atomic_write(png_path) as file:
        figure.savefig(file, format="png")


def _points(records: Sequence[Mapping[str, float]], name: str) -> tuple[list[float], list[float]]:
    pairs = [
        (record["step"], record[name])
        for record in records
        if math.isfinite(record.get(name, math.nan))
    ]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _smoothed(values: Sequence[float]) -> list[float]:
    """Return running means over a window of up to a twentieth of the run."""
    width = max(1, len(values) // 20)
    return [
        statistics.fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)
    ]
