"""A step of a ledger as arrays, as the rules of the check read it.

Shape legend: N turns of a step, T sampled tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rl.ledger.files import GIVEN, OPTIONAL, TINKER, StepRecord

_SCALARS = ("group", "member", "turn", "parent", "trained", "cut_off", "minibatch", "row", "reward")
_TEXTS = ("role", "generator", "request", "receipt", "prompt_ids")
_LISTS = (
    "token_ids", "logprobs", "versions", "mask", "advantages", "trainer_logprobs",
    "trainer_advantages",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A token of a step, or a turn, an episode or the whole step."""

    group: int | None = None
    member: int | None = None
    turn: int | None = None
    token: int | None = None


class LedgerStep:
    """Turns and tokens of a step."""

    def __init__(self, record: StepRecord) -> None:
        table = record.table
        self.name = record.file.path.name
        self.number = record.file.step
        self.facts = record.facts
        self.turns: dict[str, Any] = {}
        """[N] each, by column."""
        self.tokens: dict[str, np.ndarray] = {}
        """[T] each, by column."""
        for name in _SCALARS:
            self.turns[name] = table[name].to_numpy()
        for name in _TEXTS:
            self.turns[name] = table[name].to_pylist()
        self.starts = np.zeros(len(table) + 1, dtype=np.int64)
        """[N + 1], places at which the tokens of each turn begin, and their number."""
        for name in (*_LISTS, *OPTIONAL, GIVEN):
            # A run with one minibatch has no proximal logprobs, one without a KL no reference, and
            # only a Tinker client gives logprobs.
            if name not in table.column_names:
                continue
            lists = table[name].combine_chunks()
            self.tokens[name] = lists.flatten().to_numpy(zero_copy_only=False)
            # All lists of a turn are equally long.
            if name == "token_ids":
                self.starts[1:] = np.cumsum(lists.value_lengths().to_numpy(zero_copy_only=False))

    @property
    def num_turns(self) -> int:
        return len(self.starts) - 1

    @property
    def kind(self) -> str:
        """TINKER, or empty for a run."""
        return str(self.facts.get("kind", ""))

    @property
    def settings(self) -> Mapping[str, Any]:
        settings: Mapping[str, Any] = self.facts["settings"]
        return settings

    @property
    def groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.facts["groups"]
        return groups

    @property
    def is_whole(self) -> bool:
        """True if the tokens of all groups are recorded."""
        return bool(self.facts["share"] >= 1)

    @cached_property
    def turn_of_token(self) -> np.ndarray:
        """[T], the turn that has sampled each token."""
        return np.repeat(np.arange(self.num_turns), np.diff(self.starts))

    @cached_property
    def is_trained(self) -> np.ndarray:
        """[T], True for tokens that the loss has read."""
        trained: np.ndarray = ~np.isnan(self.tokens["trainer_advantages"])
        return trained

    def of_turn(self, n: int, name: str) -> np.ndarray:
        """Return the values of a turn's tokens."""
        return self.tokens[name][self.starts[n] : self.starts[n + 1]]

    def read_prompt(self, n: int) -> np.ndarray:
        """Return the tokens of a turn's messages."""
        # Bytes, because a column of bytes keeps equal prompts of a group once.
        return np.frombuffer(self.turns["prompt_ids"][n], dtype="<i4")

    def find_parent(self, n: int) -> int | None:
        """Return the place of the turn before a turn; turns of an episode are in order."""
        parent, turn = int(self.turns["parent"][n]), int(self.turns["turn"][n])
        if parent < 0:
            return None
        # Not as a run writes it: a circle of turns would have no end.
        if parent >= turn:
            raise ValueError(f"row {n}: turn {turn} goes on after turn {parent}")
        return n - turn + parent

    def read_context(self, n: int) -> np.ndarray:
        """Return every token that the generator has read for a turn."""
        # From the end to the beginning, along the turns that the conversation continues.
        parts = [self.read_prompt(n)]
        before = self.find_parent(n)
        while before is not None:
            parts += [self.of_turn(before, "token_ids"), self.read_prompt(before)]
            before = self.find_parent(before)
        return np.concatenate(parts[::-1])

    def place_turn(self, n: int) -> Place:
        values = (int(self.turns[name][n]) for name in ("group", "member", "turn"))
        group, member, turn = values
        return Place(group=group, member=member, turn=turn)

    def place_token(self, t: int) -> Place:
        n = int(self.turn_of_token[t])
        of_turn = self.place_turn(n)
        return Place(
            group=of_turn.group,
            member=of_turn.member,
            turn=of_turn.turn,
            token=t - int(self.starts[n]),
        )

    def describe(self, place: Place) -> str:
        """Return a place in words: `problem 'a', sample 3, turn 0, token 7`."""
        if place.group is None:
            return ""
        group = self.groups[place.group]
        if self.kind == TINKER:
            words = [f"forward_backward {group['number']}"]
            names = {"datum": place.member, "span": place.turn, "token": place.token}
            words += [f"{name} {n}" for name, n in names.items() if n is not None]
            return ", ".join(words)
        words = [f"problem {group['problem']!r}"]
        if place.member is not None:
            words.append(f"sample {group['members'][place.member]['sample']}")
        if place.turn is not None:
            words.append(f"turn {place.turn}")
        if place.token is not None:
            words.append(f"token {place.token}")
        return ", ".join(words)
