"""What a pull reads from where: the stored boxes cut to the reader's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from torch import Tensor

from rl.weights.copying import Copy
from rl.weights.errors import WeightMismatchError
from rl.weights.monarch_compat import TensorSlice, get_slice_intersection
from rl.weights.shards import Part, num_elements, within_box
from rl.weights.volumes import Stored


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """A box to fetch, and where it goes."""

    name: str
    stored: Stored
    """What it is a part of."""
    box: TensorSlice
    destination: Tensor

    def copy_from(self, source: Tensor) -> Copy:
        """Of `source`, which holds the box."""
        return copy_of(self.box, source=source, destination=self.destination)

    def within(self, stored: Tensor) -> Tensor:
        """Where the box lies in a tensor that holds the stored one."""
        return within_box(stored, self.stored.box, self.box)


def copy_of(box: TensorSlice, *, source: Tensor, destination: Tensor) -> Copy:
    return Copy(
        source=source,
        destination=destination,
        global_shape=tuple(box.global_shape),
        offsets=tuple(box.offsets),
    )


def plan_reads(
    version: int, parts: Sequence[Part], stored: Mapping[str, Sequence[Stored]]
) -> dict[str, list[Read]]:
    """What fills the parts, by volume; `stored` goes by name.

    Raises:
        WeightMismatchError: other names, another shape, or boxes that do not cover a part.
    """
    check_names(version, stored=stored.keys(), wanted={part.name for part in parts})
    reads: dict[str, list[Read]] = {}
    for part in parts:
        for read in _reads_of(part, stored[part.name]):
            reads.setdefault(read.stored.volume_id, []).append(read)
    return reads


def check_names(version: int, *, stored: Set[str], wanted: Set[str]) -> None:
    """Raise WeightMismatchError unless the tensors of a version are those asked for."""
    if stored != wanted:
        raise WeightMismatchError(
            f"version {version} holds other tensors than asked for: "
            f"missing {_few(wanted - stored)}, not asked for {_few(stored - wanted)}"
        )


def _reads_of(part: Part, stored: Sequence[Stored]) -> Iterator[Read]:
    num_covered = 0
    for source in stored:
        if source.box.global_shape != part.box.global_shape:
            raise WeightMismatchError(
                f"{part.name!r} has shape {tuple(source.box.global_shape)} in the store "
                f"and {tuple(part.box.global_shape)} here"
            )
        common = get_slice_intersection(source.box, part.box)
        if common is not None:
            num_covered += num_elements(common)
            destination = within_box(part.local, part.box, common)
            yield Read(name=part.name, stored=source, box=common, destination=destination)
    if num_covered != num_elements(part.box):
        raise WeightMismatchError(
            f"{part.name!r}: the store covers {num_covered} of the {num_elements(part.box)} elements here"
        )


def _few(names: Iterable[str]) -> str:
    listed = sorted(names)
    return (
        ", ".join(map(repr, listed[:5])) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
        or "none"
    )
