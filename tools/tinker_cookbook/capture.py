"""The run of the cookbook's capture proxy (capture_run.py), and what it must have captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.tinker_cookbook.recipes import SMALL, Evidence, Finding, Recipe, Row, Sample, read_rows

NAME = "capture_proxy"
PROGRAM = Path(__file__).with_name("capture_run.py")
KINDS = ("sample", "train_op")
"""Kinds of the rows that the exporter writes."""
NUM_STEPS = 100
"""Training steps on the call of the tool and the answer after it."""
CALL = {"arguments": {"a": 2, "b": 3}, "answer": "The sum is 5."}
EXPECTED: dict[str, dict[str, Any]] = {
    "openai_turns": {"model": "policy"},
    "anthropic_turns": {"model": "policy"},
    "openai_stream": {"is_equal": True},
    "anthropic_stream": {"ends": ["message_start", "message_stop"], "has_text": True},
    "openai_tools": {"end": "tool_calls", **CALL},
    "anthropic_tools": {"end": "tool_use", **CALL},
    "at_once": {},
}
"""What the clients must see in the cases that get replies, apart from the usage."""
NUM_REPLIES = {
    "openai_turns": 3,
    "anthropic_turns": 3,
    "openai_stream": 2,
    "anthropic_stream": 1,
    "openai_tools": 2,
    "anthropic_tools": 2,
    "at_once": 8,
}
NUM_TOO_LONG = 2
REFUSED = {
    "model": ("BadRequestError", "base_model='gpt-7': must be"),
    "weights": ("NotFoundError", "tinker://00000000-0000000000000000:train:0"),
}
"""Type and words of the errors of models and weights that are not there."""


def make_capture_recipe() -> Recipe:
    return Recipe(
        name=NAME,
        program=(str(PROGRAM),),
        arguments={**SMALL, "num_steps": NUM_STEPS},
        checks=(
            check_clients,
            check_samples,
            check_usage,
            check_training,
            check_long_prompts,
            check_unknown_names,
            check_exporter,
        ),
    )


def read_captured(folder: Path) -> dict[str, tuple[Row, ...]]:
    """Return the rows below a run's folder by kind; none of a recipe that captures nothing."""
    return {kind: read_rows(folder / "capture" / f"{kind}.jsonl") for kind in KINDS}


# Promises


def check_clients(evidence: Evidence) -> Finding:
    """Check that each case ended with what its clients must see."""
    wrong = []
    for case, expected in EXPECTED.items():
        seen = _find_case(evidence, case)
        is_right = bool(seen)
        for name, value in expected.items():
            is_right = is_right and seen.get(name) == value
        if not is_right:
            wrong.append(case)
    return Finding(
        promise="clients of OpenAI and Anthropic get turns, streams and calls of tools",
        holds=not wrong and evidence.statuses[-1] == 0,
        seen=f"status {evidence.statuses[-1]}, {len(EXPECTED)} cases, wrong: "
        f"{', '.join(wrong) or 'none'}",
    )


def check_samples(evidence: Evidence) -> Finding:
    """Check that the rows are what the server sampled, to the bit and each once, with a logprob for
    each token and the address of its case.
    """
    rows = _list_replies(evidence)
    captured = _list_samples(rows)
    num_uneven = sum(len(one.tokens) != len(one.logprobs) or not one.tokens for one in captured)
    by_case = Counter(row["scope"].get("run_id") for row in rows)
    num_different = sum((Counter(captured) - Counter(evidence.served)).values())
    num_missing = sum((Counter(evidence.served) - Counter(captured)).values())
    return Finding(
        promise="rows have the tokens and logprobs that the server sampled",
        holds=by_case == NUM_REPLIES and not num_uneven + num_different + num_missing,
        seen=f"{len(captured)} rows of {len(evidence.served)} samples, "
        f"{sum(len(one.tokens) for one in captured)} tokens; {num_different} different, "
        f"{num_missing} missing, {num_uneven} without a logprob for each token",
    )


def check_usage(evidence: Evidence) -> Finding:
    """Check that clients were told the lengths of the rows, in their order."""
    wrong, num_told = [], 0
    rows = _list_replies(evidence)
    for case in NUM_REPLIES:
        told = _find_case(evidence, case).get("usages")
        if told is None:
            continue
        of_case = [row for row in rows if row["scope"].get("run_id") == case]
        of_case.sort(key=lambda row: (row["scope"]["traj_idx"], row["created_at"]))
        lengths = [[len(one.prompt), len(one.tokens)] for one in _list_samples(of_case)]
        num_told += len(told)
        if told != lengths:
            wrong.append(case)
    return Finding(
        promise="the usage that clients see is that of the rows",
        holds=num_told > 0 and not wrong,
        seen=f"{num_told} replies, wrong: {', '.join(wrong) or 'none'}",
    )


def check_training(evidence: Evidence) -> Finding:
    """Check that each call about the model in training is a row with its outcome."""
    rows = [row for row in evidence.captured["train_op"] if row["status"] == "ok"]
    num_calls = Counter(row["op"] for row in rows)
    expected = {
        "forward_backward": NUM_STEPS,
        "optim_step": NUM_STEPS,
        "save_weights_for_sampler": 1,
    }
    return Finding(
        promise="each training call is a row",
        holds=num_calls == expected and len(rows) == len(evidence.captured["train_op"]),
        seen=", ".join(f"{count} {op}" for op, count in sorted(num_calls.items())) or "none",
    )


def check_long_prompts(evidence: Evidence) -> Finding:
    """Check that both clients got 400 with the words that agents know, and the errors are rows."""
    told = _find_case(evidence, "too_long") or []
    is_told = [status == 400 and "prompt is too long" in text for status, text in told]
    rows = [row for row in evidence.captured["sample"] if row["status"] == "error"]
    errors = [row["error"] for row in rows if row["scope"].get("run_id") == "too_long"]
    return Finding(
        promise="a prompt beyond the context is a 400 that says so",
        holds=is_told == [True] * NUM_TOO_LONG and len(errors) == len(rows) == NUM_TOO_LONG,
        seen=f"{told}, {len(errors)} rows of errors",
    )


def check_unknown_names(evidence: Evidence) -> Finding:
    told = _find_case(evidence, "unknown") or {}
    holds = (told.get("path"), told.get("address")) == (404, 400)
    for name, (kind, words) in REFUSED.items():
        told_kind, text = told.get(name, ["", ""])
        holds = holds and told_kind == kind and words in text
    return Finding(
        promise="models, weights and paths that are not there are clear errors",
        holds=holds,
        seen=str(told),
    )


def check_exporter(evidence: Evidence) -> Finding:
    told = _find_case(evidence, "exporter") or {}
    return Finding(
        promise="the exporter loses nothing",
        holds=told.get("is_drained") is True and told.get("losses") == [0, 0, 0],
        seen=f"dropped, failed exports, failed callbacks: {told.get('losses')}",
    )


def _find_case(evidence: Evidence, name: str) -> Any:
    """Return what the clients of a case saw; empty if they raised something."""
    seen: Any = {}
    for row in evidence.rows:
        if row["case"] == name:
            seen = row.get("seen", {})
    return seen


def _list_replies(evidence: Evidence) -> list[Row]:
    return [row for row in evidence.captured["sample"] if row["status"] == "ok"]


def _list_samples(rows: Sequence[Row]) -> list[Sample]:
    samples = []
    for row in rows:
        for one in row["samples"]:
            samples.append(
                Sample(
                    prompt=tuple(row["prompt_tokens"]),
                    tokens=tuple(one["tokens"]),
                    logprobs=tuple(one["logprobs"] or ()),
                )
            )
    return samples
