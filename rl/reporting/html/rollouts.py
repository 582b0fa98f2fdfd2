"""What the model wrote, for a page's browser of rollouts: an index, and chunks that are unpacked when needed.

The index has a column a property, so that a page lists and filters a hundred thousand rollouts without their
tokens. A chunk has the turns of some rollouts; texts that they share, as the prompt of a group's samples, are
in it once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rl.reporting.html.blocks import packed
from rl.reporting.html.token_texts import TokenTexts

CHUNK_TOKENS = 60_000
"""About so many in one chunk: what is unpacked to show one rollout."""
EXCERPT = 90
"""Characters of a reply in the list."""
_COST_OF_A_ROLLOUT = 30
"""In tokens: what its line in the index takes."""
_CHARACTERS_A_TOKEN = 4

Line = Mapping[str, Any]
"""As rollouts.jsonl has it, see rl/observability/recorder.py."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRollouts:
    """Of one run."""

    index: dict[str, Any]
    """`columns` by name, `first_of_chunk`, `num_recorded`, and whether texts of tokens are known."""
    chunks: list[str]
    """Blocks, each a list of rollouts under `rollouts`, and the `texts` and `pieces` that they count in."""

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.chunks)) + len(packed(self.index))


def pack_rollouts(
    lines: Sequence[Line], texts: TokenTexts, *, most_bytes: int, keep: frozenset[int] = frozenset()
) -> PackedRollouts:
    """All of them, or whole groups at even distances as far as they have room.

    Args:
        most_bytes: of the packed result; fewer groups are taken until it has that size.
        keep: numbers of lines whose groups are taken before others.
    """
    groups = _groups(lines)
    costs = [sum(_cost(lines[n]) for n in group) for group in groups]
    kept = [any(n in keep for n in group) for group in groups]
    budget = float(sum(costs))
    while True:
        chosen = [n for i in _evenly(costs, kept, budget) for n in groups[i]]
        result = _pack([lines[n] for n in chosen], chosen, texts, num_recorded=len(lines))
        if result.num_bytes <= most_bytes or not chosen:
            return result
        budget = min(budget, sum(_cost(lines[n]) for n in chosen)) * min(
            0.9, 0.95 * most_bytes / result.num_bytes
        )


def _groups(lines: Sequence[Line]) -> list[list[int]]:
    """Numbers of lines that stand together and are of one prompt."""

    def of(n: int) -> tuple[Any, ...]:
        return tuple(lines[n].get(name) for name in ("step", "kind", "set", "problem"))

    return [list(group) for _, group in groupby(range(len(lines)), key=of)]


def _cost(line: Line) -> int:
    """In tokens, about: of what has none recorded, by its characters."""
    cost = _COST_OF_A_ROLLOUT
    for turn in line.get("turns", ()):
        texts = [str(m.get("content") or "") for m in turn.get("messages", ())]
        texts += [] if "token_ids" in turn else [turn.get("reply") or ""]
        cost += len(turn.get("token_ids") or ()) + sum(map(len, texts)) // _CHARACTERS_A_TOKEN
    return cost


def _evenly(costs: Sequence[int], kept: Sequence[bool], budget: float) -> list[int]:
    """Numbers of groups whose costs are together about the budget: those that are kept as far as they fit,
    and of the others as many at even distances."""
    total = sum(costs)
    if budget >= total:
        return list(range(len(costs)))
    chosen, left = set(), budget
    for i, cost in enumerate(costs):
        if kept[i] and cost <= left:
            chosen.add(i)
            left -= cost
    share = left / max(1, sum(cost for i, cost in enumerate(costs) if i not in chosen))
    owed = 0.0
    for i, cost in enumerate(costs):
        if i in chosen:
            continue
        owed += share * cost
        if cost <= owed:
            chosen.add(i)
            owed -= cost
    return sorted(chosen)


def _pack(
    lines: Sequence[Line], numbers: Sequence[int], texts: TokenTexts, *, num_recorded: int
) -> PackedRollouts:
    chunk, chunks, first_of_chunk = _Chunk(texts), [], []
    rows = []
    for row, line in enumerate(lines):
        if not chunk.rollouts:
            first_of_chunk.append(row)
        chunk.add(line)
        rows.append(_row(line))
        if chunk.num_tokens >= CHUNK_TOKENS:
            chunks.append(chunk.pack())
            chunk = _Chunk(texts)
    if chunk.rollouts:
        chunks.append(chunk.pack())
    names = list(_row({}))
    columns = {name: [row[name] for row in rows] for name in names} | {"line": list(numbers)}
    index = {
        "columns": columns,
        "first_of_chunk": first_of_chunk,
        "num_recorded": num_recorded,
        "texts_known": texts.known,
    }
    return PackedRollouts(index=index, chunks=chunks)


def _row(line: Line) -> dict[str, Any]:
    """Of one rollout in the index; `diff` is the largest |trainer - generator| of its tokens, nats."""
    turns = line.get("turns", ())
    reply = " ".join(" ".join(str(turn.get("reply") or "") for turn in turns).split())
    diffs = [abs(d) for turn in turns for d in _differences(turn) if d is not None]
    return {
        "step": _plain(line.get("step")),
        "kind": line.get("kind"),
        "set": line.get("set"),
        "problem": line.get("problem"),
        "answer": _plain(line.get("answer")),
        "sample": _plain(line.get("sample")),
        "reward": _plain(line.get("reward")),
        "correct": line.get("correct"),
        "advantage": _mean(line.get("advantage")),
        "tokens": sum(len(turn.get("token_ids") or ()) for turn in turns),
        "turns": len(turns),
        "end": line.get("end"),
        "failure": line.get("failure"),
        "dropped": line.get("dropped"),
        "diff": max(diffs, default=None),
        "parts": {str(name): _plain(part) for name, part in (line.get("parts") or {}).items()},
        "unparsed": line.get("unparsed"),
        "excerpt": reply[:EXCERPT],
    }


@dataclass(slots=True)
class _Chunk:
    """Rollouts that are packed together."""

    token_texts: TokenTexts
    num_tokens: int = 0
    rollouts: list[list[dict[str, Any]]] = field(default_factory=list)
    _texts: dict[str, int] = field(default_factory=dict)
    _pieces: dict[tuple[int, str], int] = field(default_factory=dict)

    def add(self, line: Line) -> None:
        turns = line.get("turns", ())
        self.rollouts.append([self._turn(turn, line.get("advantage")) for turn in turns])
        self.num_tokens += _cost(line)

    def pack(self) -> str:
        return packed({"rollouts": self.rollouts, "texts": list(self._texts), "pieces": list(self._pieces)})

    def _turn(self, turn: Line, advantage: Any) -> dict[str, Any]:
        """`messages`, `reply` and `prompt` count in texts, `tokens` in pieces; what is not recorded is
        missing. What is one number is that of all tokens."""
        ids = turn.get("token_ids")
        said: dict[str, Any] = {
            "messages": [[m.get("role"), self._text(m.get("content"))] for m in turn.get("messages", ())],
            "reply": self._text(turn.get("reply")),
            "finish": turn.get("finish_reason"),
            "reward": _plain(turn.get("reward")),
            "metrics": turn.get("metrics"),
        }
        if ids is not None:
            said |= {
                "prompt": self._prompt(turn.get("prompt_ids")),
                "num_prompt": len(turn.get("prompt_ids") or ()),
                "tokens": [self._piece(pair) for pair in zip(ids, self.token_texts.pieces(ids), strict=True)],
                "logprobs": [_short(p) for p in turn.get("logprobs") or ()],
                "diffs": [_short(d) for d in _differences(turn)],
                "advantages": _numbers(turn.get("advantages", advantage)),
                "mask": _numbers(turn.get("mask")),
                "versions": _numbers(turn.get("policy_versions")),
            }
        return {name: value for name, value in said.items() if value not in (None, [])}

    def _prompt(self, ids: Sequence[int] | None) -> int | None:
        return self._text("".join(self.token_texts.pieces(ids))) if ids else None

    def _text(self, text: Any) -> int | None:
        return None if text is None else self._texts.setdefault(str(text), len(self._texts))

    def _piece(self, pair: tuple[int, str]) -> int:
        return self._pieces.setdefault(pair, len(self._pieces))


def _differences(turn: Line) -> list[float | None]:
    """[T] nats, trainer - generator, None where one of them is no finite number; empty where one of them was
    not recorded."""
    trainer, generator = turn.get("trainer_logprobs"), turn.get("logprobs")
    if not isinstance(trainer, list) or not isinstance(generator, list) or len(trainer) != len(generator):
        return []
    pairs = zip(map(_finite, trainer), map(_finite, generator), strict=True)
    return [None if p is None or q is None else p - q for p, q in pairs]


def _finite(value: Any) -> float | None:
    """None also of what is no number at all."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _short(value: Any) -> float | None:
    """Four digits: a logprob is shown, not computed with."""
    number = _finite(value)
    return None if number is None else float(f"{number:.4g}")


def _numbers(value: Any) -> Any:
    return [_short(v) for v in value] if isinstance(value, list) else _plain(value)


def _mean(value: Any) -> float | None:
    """Of numbers, one or several."""
    numbers = [n for v in (value if isinstance(value, list) else [value]) if (n := _finite(v)) is not None]
    return _short(sum(numbers) / len(numbers)) if numbers else None


def _plain(value: Any) -> Any:
    """As JSON has it: what is not finite as the text that the recorder wrote of it."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
