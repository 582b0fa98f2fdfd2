"""What a run came to, in the few lines that it ends with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl.observability.limits import bottleneck, typical
from rl.observability.run_folder import RunFolder


def summary(
    records: Sequence[Mapping[str, float]],
    *,
    folder: RunFolder,
    run_s: float,
    config: Mapping[str, Any] | None = None,
) -> str:
    """Steps, time, first and last evaluation, where the results are, and what took the time, as far as there
    is any of it.

    finished: 80 steps in 4 min 12 s
      evaluation      correct 0.375 -> 0.979 of 512 problems
      checkpoint      outputs/x/checkpoints/step-80
      Hugging Face    outputs/x/checkpoints/hf
      LoRA adapter    outputs/x/checkpoints/adapter
      learning curve  outputs/x/learning_curve.png
      timeline        outputs/x/timeline.json
      report          python -m rl.report outputs/x
      bottleneck      generation takes 61% of a step and reaches 8% of what the machine can do: ...
      would move it   --loop.max_policy_age 1

    Args:
        records: of metrics.jsonl.
        config: `values` of config.json.
    """
    num_steps = round(max((record["step"] for record in records), default=0))
    lines = [f"finished: {num_steps} steps in {duration(run_s)}"]
    if text := _evaluations([record for record in records if "eval/correct" in record]):
        lines.append(f"  evaluation      {text}")
    results = {
        "checkpoint": folder.checkpoints / f"step-{num_steps}",
        "Hugging Face": folder.checkpoints / "hf",
        "LoRA adapter": folder.checkpoints / "adapter",
        "learning curve": folder.learning_curve,
        "timeline": folder.timeline,
    }
    lines += [f"  {title:<14}  {path}" for title, path in results.items() if path.exists()]
    if num_steps:
        lines.append(f"  report          python -m rl.report {folder.path}")
    if (found := bottleneck(typical(records), config)) is not None:
        lines += [f"  bottleneck      {found.sentence}", f"  would move it   {found.setting}"]
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """With the two largest of its units: 48 s, 4 min 12 s, 2 h 5 min."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _evaluations(records: Sequence[Mapping[str, float]]) -> str:
    if not records:
        return ""
    first, last = records[0], records[-1]
    start = f"{first['eval/correct']:.3f} -> " if len(records) > 1 else ""
    return f"correct {start}{last['eval/correct']:.3f} of {last['eval/num_problems']:.0f} problems"
