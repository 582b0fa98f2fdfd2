"""Where two runs part: the first step, minibatch, sample and token that differ in their ledgers.

A step's parts are compared in the order in which they follow from each other: prompts, sampled
tokens and their logprobs, rewards, advantages, what the trainer has read, its logprobs, its sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from rl.ledger.files import TINKER, LedgerError, LedgerFile, list_files, read
from rl.ledger.step import LedgerStep, Place

OF_GENERATION = (("token_ids", "sampled token"), ("logprobs", "logprob at sampling"))
OF_INPUTS = (
    ("advantages", "advantage"),
    ("mask", "mask"),
    ("reference_logprobs", "logprob of the reference policy"),
    ("proximal_logprobs", "logprob before the first minibatch"),
)
OF_TRAINING = (
    ("trainer_advantages", "advantage that the loss has read"),
    ("trainer_logprobs", "logprob of the trainer"),
)
SUMS = (
    "num_tokens", "num_episodes", "advantage_sum", "loss_sum", "denominator", "grad_norm", "lr",
    "policy_version",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Parting:
    """The first thing that differs between two runs."""

    step: int
    where: str
    """Minibatch, problem, sample, turn and token, as far as they are known."""
    what: str
    values: tuple[str, str]

    def __str__(self) -> str:
        one, other = self.values
        where = f", {self.where}" if self.where else ""
        return f"step {self.step}{where}: {self.what}: {one} and {other}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What two ledgers have in common."""

    num_steps: int
    """Steps that are equal."""
    parting: Parting | None
    settings: tuple[str, ...] = ()
    """Lines of settings that differ in the step at which the runs part."""


def compare_ledgers(folder: Path, other: Path) -> Comparison:
    """Compare two ledgers up to the first difference; raises LedgerError for a damaged file."""
    num_steps = 0
    for file, other_file in zip_longest(list_files(folder), list_files(other)):
        if file is None or other_file is None or file.step != other_file.step:
            steps = [f"step {f.step}" if f else "none" for f in (file, other_file)]
            number = min(f.step for f in (file, other_file) if f)
            parting = Parting(
                step=number, where="", what="next step of the ledger", values=(steps[0], steps[1])
            )
            return Comparison(num_steps=num_steps, parting=parting)
        ours, theirs = _read_step(file), _read_step(other_file)
        for parting in _compare(ours, theirs):
            settings = tuple(_compare_settings(ours.settings, theirs.settings))
            return Comparison(num_steps=num_steps, parting=parting, settings=settings)
        num_steps += 1
    return Comparison(num_steps=num_steps, parting=None)


def _read_step(file: LedgerFile) -> LedgerStep:
    try:
        return LedgerStep(read(file))
    except LedgerError as error:
        raise LedgerError(f"{file.path.parent}: {error}") from None


def _compare(ours: LedgerStep, theirs: LedgerStep) -> Iterator[Parting]:
    # In the order of causes: what differs later may follow from what differs earlier.
    yield from _compare_groups(ours, theirs)
    yield from _compare_generation(ours, theirs)
    yield from _compare_rewards(ours, theirs)
    yield from _compare_inputs(ours, theirs)
    yield from _compare_training(ours, theirs)


def _part(step: LedgerStep, place: Place, what: str, one: Any, other: Any) -> Parting:
    return Parting(
        step=step.number, where=step.describe(place), what=what, values=(_show(one), _show(other))
    )


def _show(value: Any) -> str:
    return f"{float(value):.9g}" if isinstance(value, float | np.floating) else str(value)


def _compare_groups(ours: LedgerStep, theirs: LedgerStep) -> Iterator[Parting]:
    for p, (group, other) in enumerate(zip_longest(ours.groups, theirs.groups)):
        # A call of a Tinker client has a number in place of a problem.
        kind, key = ("call", "number") if ours.kind == TINKER else ("group", "problem")
        names = [None if g is None else g.get(key) for g in (group, other)]
        if names[0] != names[1]:
            what = f"{key} of {kind} {p}"
            yield _part(ours, Place(), what, *(name or "none" for name in names))
        sizes = [len(g["members"]) for g in (group, other)]
        if sizes[0] != sizes[1]:
            yield _part(ours, Place(group=p), "number of scored rollouts", *sizes)


def _compare_generation(ours: LedgerStep, theirs: LedgerStep) -> Iterator[Parting]:
    for n in range(min(ours.num_turns, theirs.num_turns)):
        place, other_place = ours.place_turn(n), theirs.place_turn(n)
        if place != other_place:
            yield _part(
                ours, place, "next turn", f"turn {place.turn}", theirs.describe(other_place)
            )
        # The prompt of a turn follows from the replies before it, so turn by turn.
        if ours.turns["prompt_ids"][n] != theirs.turns["prompt_ids"][n]:
            t, one, other = _find_first(ours.read_prompt(n), theirs.read_prompt(n))
            yield _part(ours, place, f"token {t} of the prompt", one, other)
        for name, what in OF_GENERATION:
            t, one, other = _find_first(ours.of_turn(n, name), theirs.of_turn(n, name))
            if t is not None:
                yield _part(ours, _at(place, t), what, one, other)
    if ours.num_turns != theirs.num_turns:
        yield _part(ours, Place(), "number of turns", ours.num_turns, theirs.num_turns)


def _at(place: Place, token: int) -> Place:
    return Place(group=place.group, member=place.member, turn=place.turn, token=token)


def _find_first(ours: np.ndarray, theirs: np.ndarray) -> tuple[int | None, Any, Any]:
    """Return the first place at which two arrays differ in a bit, and both values; None if none."""
    num = min(len(ours), len(theirs))
    # Bits, so that NaN equals NaN and -0.0 differs from 0.0.
    bits = [np.ascontiguousarray(a[:num]).view(f"u{a.dtype.itemsize}") for a in (ours, theirs)]
    differs = np.flatnonzero(bits[0] != bits[1])
    if len(differs):
        t = int(differs[0])
        return t, ours[t], theirs[t]
    if len(ours) != len(theirs):
        values = [array[num] if len(array) > num else "the end" for array in (ours, theirs)]
        return num, values[0], values[1]
    return None, None, None


def _compare_rewards(ours: LedgerStep, theirs: LedgerStep) -> Iterator[Parting]:
    for p, (group, other) in enumerate(zip(ours.groups, theirs.groups, strict=True)):
        for g, (member, twin) in enumerate(zip(group["members"], other["members"], strict=True)):
            for name in ("reward", "overlong", "end", "truncated"):
                # A datum of a Tinker client has none of these.
                if member.get(name) != twin.get(name):
                    yield _part(ours, Place(group=p, member=g), name, member[name], twin[name])


def _compare_inputs(ours: LedgerStep, theirs: LedgerStep) -> Iterator[Parting]:
    # Generation is equal here, so that turns and tokens of both have the same places.
    for name in ("minibatch", "row"):
        n, one, other = _find_first(ours.turns[name], theirs.turns[name])
        if n is not None:
            yield _part(ours, ours.place_turn(n), name, one, other)
    for name, what in OF_INPUTS:
        if name in ours.tokens and name in theirs.tokens:
            t, one, other = _find_first(ours.tokens[name], theirs.tokens[name])
            if t is not None:
                yield _in_minibatch(ours, t, _part(ours, ours.place_token(t), what, one, other))


def _in_minibatch(step: LedgerStep, t: int, parting: Parting) -> Parting:
    """Return what differs at a token, with the token's minibatch."""
    minibatch = int(step.turns["minibatch"][step.turn_of_token[t]])
    return replace(parting, where=f"minibatch {minibatch}, {parting.where}")


def _compare_training(ours: LedgerStep, theirs: LedgerStep) -> Iterator[Parting]:
    # One minibatch after the other: the weights of a later one follow from the sums of the earlier.
    minibatch_T = ours.turns["minibatch"][ours.turn_of_token]
    pairs = zip_longest(ours.facts["minibatches"], theirs.facts["minibatches"])
    for number, (told, other_told) in enumerate(pairs):
        if told is None or other_told is None:
            sizes = [len(step.facts["minibatches"]) for step in (ours, theirs)]
            yield _part(ours, Place(), "number of minibatches", *sizes)
            return
        tokens = np.flatnonzero(minibatch_T == number)
        for name, what in OF_TRAINING:
            i, one, other = _find_first(ours.tokens[name][tokens], theirs.tokens[name][tokens])
            if i is not None:
                t = int(tokens[i])
                yield _in_minibatch(ours, t, _part(ours, ours.place_token(t), what, one, other))
        for name in SUMS:
            if told.get(name) != other_told.get(name):
                parting = _part(ours, Place(), name, told.get(name), other_told.get(name))
                yield replace(parting, where=f"minibatch {number}")
    # Of a Tinker session, whose steps have several calls.
    update, other_update = (step.facts.get("optim_step", {}) for step in (ours, theirs))
    for name in update:
        if update[name] != other_update.get(name):
            what = f"{name} of the optim_step"
            yield _part(ours, Place(), what, update[name], other_update.get(name))


def _compare_settings(ours: Any, theirs: Any, *, name: str = "") -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted({*ours, *theirs}):
            inner = f"{name}.{key}" if name else key
            yield from _compare_settings(ours.get(key), theirs.get(key), name=inner)
    elif ours != theirs:
        yield f"{name}: {ours} and {theirs}"
