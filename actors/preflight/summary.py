"""An explanation in twelve lines: what a run would be, and whether it could start here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MAX_NAMED = 3
"""Most changed values that the summary names."""
MAX_VALUE_CHARS = 40


def summarize(explanation: Mapping[str, Any]) -> str:
    """Return the lines of an explanation that answer the first questions about a run.

    Example:
        config       sum_digits.tiny; --explain full has every value
        model        qwen3 tiny, 779 thousand parameters
    """
    lines = {
        "config": f"{explanation['config']}; --explain full has every value",
        "model": f"{explanation['model']}, {_count(explanation['parameters'])} parameters",
        "devices": explanation["devices"],
        "processes": _describe_processes(explanation["layout"]),
        "step": _describe_step(explanation["step"], explanation["staleness"]),
        "tokens": _describe_tokens(explanation["step"], explanation["values"]),
        "run": _describe_run(explanation["step"], explanation["values"]),
        "data": explanation["data"],
        "memory": _describe_memory(explanation["memory"]),
        "changed": _describe_changes(
            explanation["changes"], idle=explanation["options"]["set_without_effect"]
        ),
        "not checked": "; ".join(explanation["not_checked"]) or "nothing",
        "refused": _describe_refusals(explanation["options"]),
    }
    return "\n".join(f"{name:<12} {text}" for name, text in lines.items())


def _describe_processes(layout: Mapping[str, Any] | str) -> str:
    if isinstance(layout, str):
        return layout
    mesh = " x ".join(f"{axis} {size}" for axis, size in layout["trainer_mesh"].items())
    texts = [f"trainer {layout['trainer']['num_procs']}{f' ({mesh})' if mesh else ''}"]
    generators = [place for role, place in layout.items() if role.startswith("generator")]
    ranks = generators[0]["num_procs"]
    texts.append(f"generators {len(generators)}{f' of {ranks} each' if ranks > 1 else ''}")
    for role in ("reward", "agents"):
        if role in layout:
            texts.append(f"{role} {layout[role]['num_procs']}")
    gpus: set[int] = set()
    for place in (layout["trainer"], *generators):
        gpus.update(place["gpus"] or ())
    if gpus:
        first, last = min(gpus), max(gpus)
        texts.append(f"on GPUs {first} to {last}" if first < last else f"on GPU {first}")
    return ", ".join(texts)


def _describe_step(step: Mapping[str, int], staleness: Mapping[str, int]) -> str:
    optimizer_steps = _number(step["optimizer_steps"], "optimizer step")
    text = f"{step['groups']} prompts x {step['group_size']} = {step['samples']:,} samples"
    off_policy = _number(staleness["steps_most"], "step")
    return f"{text}, {optimizer_steps}, at most {off_policy} off-policy"


def _describe_tokens(step: Mapping[str, int], values: Mapping[str, Any]) -> str:
    return (
        f"at most {values['loop.sampling.max_tokens']:,} in a reply, "
        f"{values['generator.max_model_len']:,} with its prompt, "
        f"{step['trained_tokens_most']:,} trained in a step"
    )


def _describe_run(step: Mapping[str, int], values: Mapping[str, Any]) -> str:
    texts = [f"{values['loop.num_steps']:,} steps, {step['samples_of_run']:,} samples"]
    eval_every = values["loop.eval_every"]
    texts.append(f"evaluated every {eval_every} steps" if eval_every else "never evaluated")
    if values["trainer.checkpoint.enable"]:
        texts.append(f"saved every {values['trainer.checkpoint.interval']} and at the end")
    return ", ".join(texts)


def _describe_memory(memory: Mapping[str, Any]) -> str:
    trainer, generator = memory["trainer_rank"], memory["generator_rank"]
    if isinstance(trainer, str):
        return trainer
    text = (
        f"trainer {trainer['peak_gb']} GB a process, generator {generator['weights_gb']} GB and "
        f"{generator['cache_gb']} GB of cache, of "
        f"{memory['available_gb']} GB"
    )
    too_large = [
        role for role, rank in (("trainer", trainer), ("generator", generator)) if not rank["fits"]
    ]
    return f"{text}: too little for the {' and the '.join(too_large)}" if too_large else text


def _describe_changes(changes: Mapping[str, Mapping[str, Any]], *, idle: Sequence[str]) -> str:
    texts = []
    for path, change in changes.items():
        value, registry = _shorten(change["value"]), _shorten(change["registry"])
        texts.append(f"{path} {value} instead of {registry}")
    return f"{_list(texts)}; without effect: {_list(idle)}" if idle else _list(texts)


def _describe_refusals(options: Mapping[str, Sequence[str]]) -> str:
    refused, here = len(options["refused"]), len(options["refused_here"])
    if not refused and not here:
        return "nothing: this run can start here"
    texts = []
    if refused:
        texts.append(f"anywhere for {_number(refused, 'reason')}")
    if here:
        texts.append(f"here for {_number(here, 'reason')}")
    return f"{' and '.join(texts)}, below"


def _list(texts: Sequence[str]) -> str:
    """Return the first texts and the number of the others, or nothing."""
    more = len(texts) - MAX_NAMED
    named = ", ".join(texts[:MAX_NAMED])
    return f"{named} and {more} more" if more > 0 else named or "nothing"


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 3]}..."


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _count(number: int) -> str:
    """Return a large number with three digits and its unit in words."""
    for size, word in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return str(number)
