"""Rollouts of a report: an index, chunks that the browser unpacks on demand, texts of tokens.

The index has one column for each property, so that a page lists and filters a hundred thousand
rollouts without their tokens. A chunk has the turns of some rollouts, and stores texts that they
share once.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream

from rl.models.files.tokenizer import build_byte_tokenizer, read_tokenizer_json
from rl.observability.metrics import parse_number, to_json
from rl.observability.run_folder import STARTING_POINTS

CHUNK_TOKENS = 60_000
"""Approximate tokens of a chunk, which is unpacked to show one rollout."""
EXCERPT = 90
"""Characters of a reply in the index."""
_COPIED = (
    "step", "kind", "set", "problem", "answer", "sample", "reward", "correct", "end", "failure",
    "dropped", "unparsed",
)  # fmt: skip
"""Fields of a line that are columns of the index as they are."""
_COST_OF_A_ROLLOUT = 30
"""Cost of a rollout's line in the index, in tokens."""
_CHARACTERS_A_TOKEN = 4
_GZIP_LEVEL = 6  # level 9 takes three times as long for 1% less
TOKENIZER = "tokenizer.json"
_CUT_CHARACTER = "\ufffd"
"""Shown for a reply's last token if it is a part of a character only."""

Line = Mapping[str, Any]
"""Line of rollouts.jsonl, see rl/observability/recorder.py."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRollouts:
    """Rollouts as a page holds them."""

    index: dict[str, Any]
    """`columns` by name, `first_of_chunk`, `num_recorded`, and `texts_known`: of the tokens."""
    chunks: list[str]
    """Blocks with `rollouts`, and the `texts` and `pieces` that these index."""

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.chunks)) + len(pack(self.index))


def pack_rollouts(
    lines: Sequence[Line], texts: TokenTexts, *, max_bytes: int, keep: frozenset[int] = frozenset()
) -> PackedRollouts:
    """Pack all rollouts, or as many evenly spaced groups as fit.

    Args:
        max_bytes: largest size of the result.
        keep: numbers of lines whose groups are always packed.
    """

    groups = _split_groups(lines)
    every = 1
    while True:
        chosen = []
        for i, group in enumerate(groups):
            if i % every == 0 or not keep.isdisjoint(group):
                chosen += group
        result = _pack([lines[n] for n in chosen], chosen, texts, num_recorded=len(lines))
        if result.num_bytes <= max_bytes or every >= len(groups):
            return result
        # The size hardly says how well the rest compresses, so it is tried.
        every = max(every + 1, math.ceil(every * result.num_bytes / max_bytes))


def _split_groups(lines: Sequence[Line]) -> list[list[int]]:
    """Return the numbers of lines that follow each other and have one prompt."""
    groups: list[list[int]] = []
    last = None
    for number, line in enumerate(lines):
        prompt = [line.get(name) for name in ("step", "kind", "set", "problem")]
        if not groups or prompt != last:
            groups.append([])
        groups[-1].append(number)
        last = prompt
    return groups


def _estimate_tokens(line: Line) -> int:
    """Return the approximate size of a rollout in tokens."""
    cost = _COST_OF_A_ROLLOUT
    for turn in line.get("turns", ()):
        cost += len(turn.get("token_ids") or ())
        num_characters = 0
        for message in turn.get("messages", ()):
            num_characters += len(str(message.get("content") or ""))
        if "token_ids" not in turn:
            num_characters += len(turn.get("reply") or "")
        cost += num_characters // _CHARACTERS_A_TOKEN
    return cost


def _pack(
    lines: Sequence[Line], numbers: Sequence[int], texts: TokenTexts, *, num_recorded: int
) -> PackedRollouts:
    chunk, chunks, first_of_chunk = _Chunk(texts), [], []
    rows = []
    for row, line in enumerate(lines):
        if not chunk.rollouts:
            first_of_chunk.append(row)
        chunk.add(line)
        rows.append(_describe(line))
        # A chunk ends between rollouts: none of them needs two.
        if chunk.num_tokens >= CHUNK_TOKENS:
            chunks.append(chunk.pack())
            chunk = _Chunk(texts)
    if chunk.rollouts:
        chunks.append(chunk.pack())
    # Columns, because rows would repeat each name.
    names = list(_describe({}))
    columns = {name: [row[name] for row in rows] for name in names} | {"line": list(numbers)}
    index = {
        "columns": columns,
        "first_of_chunk": first_of_chunk,
        "num_recorded": num_recorded,
        "texts_known": texts.known,
    }
    return PackedRollouts(index=index, chunks=chunks)


def _describe(line: Line) -> dict[str, Any]:
    """Return a rollout's row of the index.

    `diff` is the largest |trainer - generator| of its tokens' logprobs, in nats.
    """
    num_tokens, largest = 0, None
    replies = []
    turns = line.get("turns", ())
    for turn in turns:
        num_tokens += len(turn.get("token_ids") or ())
        replies.append(str(turn.get("reply") or ""))
        for difference in _subtract_logprobs(turn):
            if difference is not None:
                largest = max(largest or 0.0, abs(difference))
    return {
        **{name: line.get(name) for name in _COPIED},
        "advantage": _average(line.get("advantage")),
        "tokens": num_tokens,
        "turns": len(turns),
        "diff": largest,
        "parts": line.get("parts") or {},
        "excerpt": " ".join(" ".join(replies).split())[:EXCERPT],
    }


@dataclass(slots=True)
class _Chunk:
    """Turns of some rollouts, with each text and each token's text once."""

    token_texts: TokenTexts
    num_tokens: int = 0
    rollouts: list[list[dict[str, Any]]] = field(default_factory=list)
    _texts: dict[str, int] = field(default_factory=dict)
    _pieces: dict[tuple[int, str], int] = field(default_factory=dict)

    def add(self, line: Line) -> None:
        turns, branches = line.get("turns", ()), line.get("branches")
        if branches is None:
            packed = [self._pack_turn(turn, line.get("advantage")) for turn in turns]
        else:
            packed = self._pack_branches(turns, branches)
        # Not in the index, which is unpacked for all rollouts at once.
        if packed and line.get("ledger"):
            packed[0]["in_ledger"] = line["ledger"]
        self.rollouts.append(packed)
        self.num_tokens += _estimate_tokens(line)

    def pack(self) -> str:
        return pack(
            {"rollouts": self.rollouts, "texts": list(self._texts), "pieces": list(self._pieces)}
        )

    def _pack_branches(
        self, turns: Sequence[Line], branches: Sequence[Line]
    ) -> list[dict[str, Any]]:
        """Return the turns branch by branch, each once: shared ones in the first branch.

        Each has its `number` in the episode, and the first of a branch the `branch`, with the turn
        that it comes `after`. A branch without a turn of its own is not there.
        """
        packed: list[dict[str, Any]] = []
        seen: set[int] = set()
        for branch in branches:
            before, own = None, []
            for index in branch["turns"]:
                if index in seen:
                    before = index + 1
                else:
                    own.append(index)
            for index in own:
                # Turns of an untrained branch have no advantages, whatever the rollout's are.
                packed.append(self._pack_turn(turns[index], None) | {"number": index + 1})
            if own:
                packed[-len(own)]["branch"] = {
                    "role": branch.get("role"),
                    "cause": branch.get("cause"),
                    "trained": branch.get("trained"),
                    "after": before,
                }
            seen.update(own)
        return packed

    def _pack_turn(self, turn: Line, advantage: Any) -> dict[str, Any]:
        """Return a turn: `messages`, `reply` and `prompt` index the texts, `tokens` the pieces.

        A single number instead of a list holds for all tokens; what is not recorded is missing.
        """
        messages = []
        for message in turn.get("messages", ()):
            messages.append([message.get("role"), self._number_text(message.get("content"))])
        values: dict[str, Any] = {
            "messages": messages,
            "reply": self._number_text(turn.get("reply")),
            "finish": turn.get("finish_reason"),
            "reward": turn.get("reward"),
            "metrics": turn.get("metrics"),
            "ledger": turn.get("ledger"),
        }
        ids = turn.get("token_ids")
        if ids is not None:
            values |= {
                "prompt": self._number_prompt(turn.get("prompt_ids")),
                "num_prompt": len(turn.get("prompt_ids") or ()),
                "tokens": self._number_tokens(ids),
                "logprobs": _shorten_all(turn.get("logprobs") or []),
                "diffs": _shorten_all(_subtract_logprobs(turn)),
                "advantages": _shorten_all(turn.get("advantages", advantage)),
                "mask": _shorten_all(turn.get("mask")),
                "versions": _shorten_all(turn.get("policy_versions")),
            }
        # Most rollouts lack most of these, and a page has a hundred thousand.
        return {name: value for name, value in values.items() if value not in (None, [])}

    def _number_tokens(self, ids: Sequence[int]) -> list[int]:
        """Return the places of the tokens' texts among the pieces."""
        numbers = []
        for pair in zip(ids, self.token_texts.split(ids), strict=True):
            numbers.append(self._pieces.setdefault(pair, len(self._pieces)))
        return numbers

    def _number_prompt(self, ids: Sequence[int] | None) -> int | None:
        return self._number_text("".join(self.token_texts.split(ids))) if ids else None

    def _number_text(self, text: Any) -> int | None:
        return None if text is None else self._texts.setdefault(str(text), len(self._texts))


def _subtract_logprobs(turn: Line) -> list[float | None]:
    """Return trainer - generator for each token in nats, or nothing if either was not recorded."""
    trainer, generator = turn.get("trainer_logprobs"), turn.get("logprobs")
    if not isinstance(trainer, list) or not isinstance(generator, list):
        return []
    if len(trainer) != len(generator):
        return []
    differences = []
    for p, q in zip(map(_read_finite, trainer), map(_read_finite, generator), strict=True):
        differences.append(None if p is None or q is None else p - q)
    return differences


def _read_finite(value: Any) -> float | None:
    number = parse_number(value)
    return number if number is not None and math.isfinite(number) else None


def shorten(value: Any, digits: int = 4) -> float | None:
    """Return the number with a few digits, which is enough to show; None if it is not finite."""
    number = _read_finite(value)
    return None if number is None else float(f"{number:.{digits}g}")


def _shorten_all(value: Any) -> Any:
    """Return a list's numbers with a few digits, and anything else as it is."""
    return [shorten(v) for v in value] if isinstance(value, list) else value


def _average(value: Any) -> float | None:
    """Return the mean of a number, or of the finite ones of a list."""
    numbers = []
    for item in value if isinstance(value, list) else [value]:
        number = _read_finite(item)
        if number is not None:
            numbers.append(number)
    return shorten(sum(numbers) / len(numbers)) if numbers else None


def pack(value: Any) -> str:
    """Return the value as JSON, compressed, in base64; the result is deterministic."""
    # Without a time stamp, so that the same run gives the same page.
    compressed = gzip.compress(format_json(value).encode(), compresslevel=_GZIP_LEVEL, mtime=0)
    return base64.b64encode(compressed).decode()


def format_json(value: Any) -> str:
    """Return compact JSON; numbers that are not finite become strings."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:  # rare, so values are searched only now
        return to_json(value)


class TokenTexts:
    """Texts of tokens; without a tokenizer, their numbers."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer

    @property
    def known(self) -> bool:
        return self._tokenizer is not None

    def split(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds.

        A character of several tokens belongs to the last of them, and the others are empty.
        """
        if self._tokenizer is None:
            return [f"<{token_id}>" for token_id in token_ids]
        stream = DecodeStream(skip_special_tokens=False)
        pieces = [stream.step(self._tokenizer, token_id) or "" for token_id in token_ids]
        # The rest of its character never came.
        if pieces and not pieces[-1]:
            pieces[-1] = _CUT_CHARACTER
        return pieces


def open_token_texts(folder: Path, values: Mapping[str, Any]) -> tuple[TokenTexts, str | None]:
    """Return the texts of a run's tokens, and a sentence if the tokenizer is missing.

    Args:
        folder: the run's folder; its exported model is tried first.
        values: values of config.json with `hf_assets_path`, null for a random model, whose tokens
            are bytes.
    """
    given = values.get("hf_assets_path")
    if not isinstance(given, str | None):
        return TokenTexts(None), "hf_assets_path is not a path: tokens are shown by their numbers"
    exported = folder / "checkpoints" / "hf"
    if (exported / TOKENIZER).is_file():
        return _open(exported / TOKENIZER)

    folders = [exported]
    if given:
        start = _find_start(given, values, cache=folder.parent / STARTING_POINTS)
        if (start / TOKENIZER).is_file():
            return _open(start / TOKENIZER)
        folders.append(start)
    if given or "hf_assets_path" not in values:
        places = " or ".join(map(str, folders))
        return TokenTexts(None), f"no {TOKENIZER} in {places}: tokens are shown by their numbers"
    # A random model has a tokenizer of bytes, which is quickly made again.
    with tempfile.TemporaryDirectory() as made:
        build_byte_tokenizer(made)
        return _open(Path(made) / TOKENIZER)


def _find_start(given: str, values: Mapping[str, Any], *, cache: Path) -> Path:
    """Return the folder that a run started from, or the given path if it is no longer there."""
    # It imports PyTorch, which most reports need not.
    from rl.models.files.assets import resolve_assets

    # The text may be no path at all, or name a home that is unknown.
    with suppress(ValueError, OSError, RuntimeError):
        revision = values.get("hf_revision")
        return resolve_assets(given, cache=cache, revision=revision, prepares=False)
    return Path(given)


def _open(file: Path) -> tuple[TokenTexts, str | None]:
    try:
        return TokenTexts(read_tokenizer_json(file)), None
    except ValueError as error:
        return TokenTexts(None), f"{error}; tokens are shown by their numbers"
