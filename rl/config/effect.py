"""Options that change nothing in a config, and options that are refused.

    num_tokens: int = field(default=32, metadata=only_if("enable", True))
    evaluation: Evaluation = field(default_factory=Evaluation, metadata=unless("eval_every", 0))
    export_dtype: Dtype = field(default="float32", metadata=all_of(only_if("enable", True), unless("a", 0)))
    compiled_autograd: bool = field(default=False, metadata=refused("it does not follow FSDP's hooks"))

Conditions name a field of the same config, or a field below one ("generator.num_replicas"). They are shown and never
enforced: to set an option without effect is no error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

from rl.config.tree import children

EFFECT, REFUSED = "effect", "refused"


def only_if(field: str, *values: Any) -> Mapping[str, Any]:
    """Return metadata of a field that has an effect only if `field` has one of the values."""
    return {EFFECT: ((field, values, True),)}


def unless(field: str, *values: Any) -> Mapping[str, Any]:
    """Return metadata of a field that has no effect if `field` has one of the values."""
    return {EFFECT: ((field, values, False),)}


def all_of(*metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return metadata of a field that has an effect only if all conditions hold."""
    return {EFFECT: tuple(condition for one in metadata for condition in one[EFFECT])}


def refused(reason: str) -> Mapping[str, Any]:
    """Return metadata of a field that other trainers have and this project refuses, with the reason."""
    return {REFUSED: reason}


def check_refused(config: Any) -> None:
    """Raise ValueError for a field of `refused` that has another value than its default."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if REFUSED in f.metadata and value != f.default:
            raise ValueError(f"{f.name}={value!r}: must be {f.default!r}: {f.metadata[REFUSED]}")


def idle_options(config: Any, *, prefix: str = "") -> Iterator[str]:
    """Yield the paths of options without effect; a component without effect is yielded without its fields."""
    is_sequence = isinstance(config, list | tuple)
    conditions = (
        {} if is_sequence else {f.name: f.metadata.get(EFFECT, ()) for f in dataclasses.fields(config)}
    )
    for entry in children(config, prefix=prefix):
        if any(
            (_at(config, path) in values) != wanted for path, values, wanted in conditions.get(entry.name, ())
        ):
            yield entry.path
        elif entry.kind == "node":
            yield from idle_options(entry.value, prefix=f"{entry.path}.")


def _at(config: Any, path: str) -> Any:
    """Return the value at a dotted path, or None if a component on the way is None."""
    return reduce(lambda node, name: None if node is None else getattr(node, name), path.split("."), config)
