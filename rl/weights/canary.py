"""Whether every generator holds what the trainer sent: checksums of both sides, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rl.types import BoxSum
from rl.weights.errors import WeightCanaryError

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and shape."""


@dataclass(kw_only=True, slots=True)
class _Copies:
    """What one side has of one tensor."""

    dtypes: set[str] = field(default_factory=set)
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    values: dict[Box, set[int]] = field(default_factory=dict)
    """Of each box; more than one where ranks that hold it differ."""

    def add(self, box: BoxSum) -> None:
        self.dtypes.add(box.dtype)
        self.shapes.add(box.global_shape)
        self.values.setdefault((box.offsets, box.shape), set()).add(box.value)


def check_sums(*, version: int, pushed: Sequence[BoxSum], pulled: Mapping[str, Sequence[BoxSum]]) -> None:
    """Compare the sums that all ranks of the trainer sent with those that each generator holds.

    Args:
        pushed: of all ranks; a box may come from several.
        pulled: of all ranks of each generator, by its name; each copy of what several hold is compared.

    Raises:
        WeightCanaryError: names generator, tensor and version, and what differs: a tensor that is missing,
            its dtype or shape, boxes that do not cover it, or its bits.
    """
    sent = _by_name(pushed)
    totals = {
        name: _total(copies, who="the trainer", name=name, version=version) for name, copies in sent.items()
    }
    for generator, boxes in pulled.items():
        held = _by_name(boxes)
        for name in sorted(sent.keys() ^ held.keys()):
            missing_on = f"generator {generator!r}" if name in sent else "the trainer"
            raise WeightCanaryError(f"version {version}: {missing_on} has no tensor {name!r}")
        for name, copies in held.items():
            _compare(sent[name], copies, name=name, generator=generator, version=version)
            who = f"generator {generator!r}"
            if _total(copies, who=who, name=name, version=version) != totals[name]:
                raise WeightCanaryError(
                    f"version {version}: {who} holds other bits in {name!r} than the trainer sent: a "
                    "shard was corrupted on its way, or is still of another version"
                )


def _by_name(boxes: Sequence[BoxSum]) -> dict[str, _Copies]:
    found: dict[str, _Copies] = {}
    for box in boxes:
        found.setdefault(box.name, _Copies()).add(box)
    return found


def _compare(sent: _Copies, held: _Copies, *, name: str, generator: str, version: int) -> None:
    for what, there, here in (("dtype", sent.dtypes, held.dtypes), ("shape", sent.shapes, held.shapes)):
        if there != here:
            raise WeightCanaryError(
                f"version {version}: {name!r} was sent with {what} {_listed(there)} and generator "
                f"{generator!r} holds it with {what} {_listed(here)}"
            )


def _total(copies: _Copies, *, who: str, name: str, version: int) -> int:
    """The sum of the whole tensor.

    A box that is the whole tensor counts by itself; the others together must be the tensor once more.
    """
    differing = next((box for box, values in copies.values.items() if len(values) > 1), None)
    if differing is not None:
        raise WeightCanaryError(
            f"version {version}: ranks of {who} hold different bits in {name!r}, in the box at "
            f"{differing[0]} of shape {differing[1]}"
        )
    (shape,) = copies.shapes
    values = {box: next(iter(found)) for box, found in copies.values.items()}
    whole = values.pop(((0,) * len(shape), shape), None)
    values = {box: value for box, value in values.items() if math.prod(box[1])}
    if whole is not None and not values:
        return whole
    covered = sum(math.prod(box_shape) for _, box_shape in values)
    if covered != math.prod(shape):
        raise WeightCanaryError(
            f"version {version}: the checksums of {who} cover {covered} of {math.prod(shape)} elements of "
            f"{name!r}"
        )
    total = sum(values.values()) % 2**64
    if whole is not None and whole != total:
        raise WeightCanaryError(f"version {version}: ranks of {who} hold different bits in {name!r}")
    return total


def _listed(values: set[str] | set[tuple[int, ...]]) -> str:
    return " and ".join(sorted(map(str, values)))
