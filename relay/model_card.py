"""Model card of a trained model: README.md with metadata for the Hugging Face hub.

The card holds the base model, the settings that differ from the config's defaults, the learning
curve and the evaluations before and after training. Paths of this machine are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.config.json import LOCATION, get_value_at, walk_leaves

CURVE = "learning_curve.png"
SETTINGS = (
    "loop.num_steps",
    "loop.groups_per_batch",
    "loop.group_size",
    "loop.sampling.max_tokens",
    "loop.sampling.temperature",
    "trainer.optimizer.lr",
    "seed",
)
"""Options that every card shows."""
NOT_SHOWN = (*LOCATION, "description", "hf_assets_path", "print_config", "console_level")
NOT_SHOWN_BELOW = ("launch.", "timeouts.", "sinks.", "recorder.", "timeline.", "limits.")
"""Prefixes of options that tell about the machine, and not about the model."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")

Records = Sequence[Mapping[str, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class CardFacts:
    """Parts of a run that its card is made of."""

    repository: str
    """owner/name on the hub."""
    config: Mapping[str, Any]
    """config.json of the run."""
    defaults: Mapping[str, Any]
    """Values of the config function without options."""
    records: Records
    """Lines of metrics.jsonl."""
    is_adapter: bool
    has_curve: bool
    license: str | None
    """Identifier of the license, such as apache-2.0."""


def find_base_model(config: Mapping[str, Any]) -> str | None:
    """Return the base model's name on the hub; None if it came from elsewhere."""
    name = get_value_at(config.get("values") or {}, "hf_assets_path")
    if not isinstance(name, str) or not _HUB_NAME.fullmatch(name) or Path(name).exists():
        return None
    return None if name.endswith(".gguf") else name


def make_card(facts: CardFacts) -> str:
    """Return the text of the card."""
    parts = [
        _make_metadata(facts),
        f"# {facts.repository.partition('/')[2]}",
        _describe(facts),
        f"## Use\n\n```python\n{_make_example(facts)}\n```",
    ]
    evaluation = _make_evaluation_table(facts.records)
    if evaluation:
        parts.append(f"## Evaluation\n\n{evaluation}")
    if facts.has_curve:
        parts.append(f"## Training\n\n![reward and share of right replies over steps]({CURVE})")
    settings = _make_settings_table(facts)
    if settings:
        parts.append(f"## Settings\n\n{settings}")
    return "\n\n".join(parts) + "\n"


def _make_metadata(facts: CardFacts) -> str:
    import yaml

    # In the order in which the hub shows them.
    values: dict[str, Any] = {}
    if facts.license is not None:
        values["license"] = facts.license
    base = find_base_model(facts.config)
    if base is not None:
        values["base_model"] = base
        values["base_model_relation"] = "adapter" if facts.is_adapter else "finetune"
    values["library_name"] = "peft" if facts.is_adapter else "transformers"
    values["pipeline_tag"] = "text-generation"
    values["tags"] = ["relay", "reinforcement-learning"]
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---"


def _describe(facts: CardFacts) -> str:
    """Return a sentence: which model it is, and how it was trained."""
    given = get_value_at(facts.config["values"], "hf_assets_path")
    base = find_base_model(facts.config)
    if base is not None:
        model = f"[{base}](https://huggingface.co/{base})"
    else:
        model = "A small model made from scratch" if given is None else f"`{_hide_folder(given)}`"
    if facts.is_adapter:
        model = f"LoRA adapters of {model}"
    origin = ".".join(str(facts.config[key]) for key in ("module", "config") if key in facts.config)
    num_steps = max((int(record["step"]) for record in facts.records), default=0)
    return (
        f"{model}, trained by reinforcement learning with relay: {num_steps} steps of the config "
        f"`{origin or 'unknown'}`."
    )


def _make_example(facts: CardFacts) -> str:
    name, tokenizer, model_class = facts.repository, facts.repository, "AutoModelForCausalLM"
    imports = f"from transformers import {model_class}, AutoTokenizer"
    if facts.is_adapter:
        model_class = "AutoPeftModelForCausalLM"
        imports = f"from peft import {model_class}\nfrom transformers import AutoTokenizer"
        # A PEFT folder has no tokenizer.
        tokenizer = find_base_model(facts.config) or "the base model"
    return (
        f"{imports}\n\n"
        f'model = {model_class}.from_pretrained("{name}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{tokenizer}")'
    )


def _make_evaluation_table(records: Records) -> str:
    """Return the first and the last evaluation as a table; empty without evaluations."""
    evaluations = [record for record in records if "eval/correct" in record]
    if not evaluations:
        return ""
    first, last = evaluations[0], evaluations[-1]
    # A run without training steps has one evaluation, which is the first and the last.
    lines = [f"| metric | step {first['step']:.0f} | step {last['step']:.0f} |", "|---|---|---|"]
    if len(evaluations) == 1:
        lines = [f"| metric | step {last['step']:.0f} |", "|---|---|"]
    for name in last:
        # Counts of problems and failures say nothing about the model.
        if not name.startswith("eval/") or "/num_" in name or name.endswith("/turns_mean"):
            continue
        cells = [first.get(name), last[name]] if len(evaluations) > 1 else [last[name]]
        texts = [_format_number(value) for value in cells]
        lines.append(f"| `{name}` | {' | '.join(texts)} |")
    num_problems = last.get("eval/num_problems")
    if num_problems is not None:
        lines += ["", f"Of {num_problems:.0f} held-out problems, with greedy replies."]
    return "\n".join(lines)


def _format_number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.4g}"


def _make_settings_table(facts: CardFacts) -> str:
    values = dict(walk_leaves(facts.config["values"]))
    defaults = dict(walk_leaves(facts.defaults))
    lines = []
    for path, value in values.items():
        # Without the defaults it is unknown what was changed.
        is_changed = bool(facts.defaults) and defaults.get(path, ...) != value
        if path in NOT_SHOWN or path.startswith(NOT_SHOWN_BELOW):
            continue
        if is_changed or path in SETTINGS:
            lines.append(f"| `{path}` | {_format_value(value)} |")
    return "\n".join(["| option | value |", "|---|---|", *lines]) if lines else ""


def _format_value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_format_value, value)) or "none"
    if isinstance(value, str):
        return f"`{_hide_folder(value)}`".replace("|", "\\|").replace("\n", " ")
    return str(value).replace("|", "\\|")


def _hide_folder(text: str) -> str:
    """Return a path without its folder, which tells about a person's machine; other texts whole."""
    return Path(text).name if text.startswith(("/", "~")) else text
