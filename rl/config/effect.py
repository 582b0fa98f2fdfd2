"""Which fields of a config change nothing as it is, and why: said beside the fields.

    num_tokens: int = field(default=32, metadata=only_if("enable", True))
    evaluation: Evaluation = field(default_factory=Evaluation, metadata=unless("eval_every", 0))
    export_dtype: Dtype = field(default="float32", metadata=all_of(only_if("enable", True), unless("a", 0)))

The names are those of fields beside the one that is declared, or below these ("generator.num_replicas").
Nothing is checked here: a field that is set and changes nothing is no error, only something to be told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from rl.config.tree import children

EFFECT = "effect"


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """What another field must be, or must not be, for a field to change anything."""

    field: str
    """Dotted, from the config that has both."""
    values: tuple[Any, ...]
    wanted: bool
    """Whether these are the values with which there is an effect, or those without."""

    def holds(self, value: Any) -> bool:
        return (value in self.values) == self.wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class Idle:
    """A field, or a component with all of its fields, that changes nothing."""

    path: str
    """Dotted, from the root."""
    why: str
    """The other field with its value."""


def only_if(field: str, *values: Any) -> Mapping[str, Any]:
    """Metadata of a field that has an effect only where `field` is one of these."""
    return {EFFECT: (Condition(field=field, values=values, wanted=True),)}


def unless(field: str, *values: Any) -> Mapping[str, Any]:
    """Metadata of a field that has no effect where `field` is one of these."""
    return {EFFECT: (Condition(field=field, values=values, wanted=False),)}


def all_of(*metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """All of these conditions must hold."""
    return {EFFECT: tuple(condition for one in metadata for condition in one[EFFECT])}


def idle_fields(config: Any, *, prefix: str = "") -> Iterator[Idle]:
    """Those of a config that its other fields leave without effect, in order; of a component that as a whole
    has none, the component alone."""
    conditions = (
        {} if isinstance(config, list | tuple) else {f.name: conditions_of(f) for f in fields(config)}
    )
    for entry in children(config, prefix=prefix):
        failed = next((c for c in conditions.get(entry.name, ()) if not c.holds(_at(config, c.field))), None)
        if failed is not None:
            yield Idle(path=entry.path, why=f"{prefix}{failed.field}={_at(config, failed.field)!r}")
        elif entry.kind == "node":
            yield from idle_fields(entry.value, prefix=f"{entry.path}.")


def conditions_of(field: Any) -> tuple[Condition, ...]:
    """Of a dataclass's field."""
    found: tuple[Condition, ...] = field.metadata.get(EFFECT, ())
    return found


def _at(config: Any, path: str) -> Any:
    """The value at a dotted path; None where a component on the way is None."""
    for name in path.split("."):
        if config is None:
            return None
        config = getattr(config, name)
    return config
