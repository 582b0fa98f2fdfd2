"""The promises of the capture proxy's run, each with runs that violate it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from rl.tinker.types import SampleOutput, SampleRequest
from rl.types import Completion, SamplingParams
from tools.tinker_cookbook import capture
from tools.tinker_cookbook.capture import NUM_REPLIES, NUM_STEPS
from tools.tinker_cookbook.recipes import Evidence, Sample
from tools.tinker_cookbook.served import SampleLog

LONG = [[400, "prompt is too long: 9 prompt tokens"]] * 2
GONE = {
    "path": 404,
    "address": 400,
    "model": ["BadRequestError", "base_model='gpt-7': must be 'tiny'"],
    "weights": ["NotFoundError", "tinker://00000000-0000000000000000:train:0 is not there"],
}


def list_samples():
    """Return a sample for each reply, by case: the n-th of a case has n + 1 tokens."""
    samples: list[tuple[str, int, Sample]] = []
    for case, count in NUM_REPLIES.items():
        for number in range(count):
            tokens = tuple(range(number + 1))
            prompt = (len(samples), 7)
            samples.append((case, number, Sample(prompt=prompt, tokens=tokens, logprobs=tokens)))
    return samples


def make_row(case, number, sample):
    return {
        "status": "ok",
        # Only requests that run at the same time have addresses of their own.
        "scope": {"run_id": case, "traj_idx": number if case == "at_once" else 0},
        "created_at": float(number),
        "prompt_tokens": list(sample.prompt),
        "samples": [{"tokens": list(sample.tokens), "logprobs": list(sample.logprobs)}],
    }


def make_seen(case):
    usages = [[2, number + 1] for number in range(NUM_REPLIES[case])]
    return {**capture.EXPECTED[case], **({} if case.endswith("_tools") else {"usages": usages})}


def make_evidence():
    rows = [make_row(*one) for one in list_samples()]
    errors = [{"status": "error", "scope": {"run_id": "too_long"}, "error": "400"}] * 2
    steps = [{"op": op, "status": "ok"} for op in ("forward_backward", "optim_step")] * NUM_STEPS
    seen = [{"case": case, "seen": make_seen(case)} for case in NUM_REPLIES]
    seen += [{"case": "too_long", "seen": LONG}, {"case": "unknown", "seen": GONE}]
    seen.append({"case": "exporter", "seen": {"is_drained": True, "losses": [0, 0, 0]}})
    return Evidence(
        statuses=(0,),
        rows=tuple(seen),
        checkpoints=(),
        log="",
        captured={
            "sample": (*errors, *reversed(rows)),
            "train_op": (*steps, {"op": "save_weights_for_sampler", "status": "ok"}),
        },
        served=tuple(sample for _, _, sample in list_samples()),
    )


GOOD = make_evidence()


def with_seen(case, seen):
    """Return the good run with another row of a case; None is a case that raised."""
    changed = {"case": case, "error": "raised"} if seen is None else {"case": case, "seen": seen}
    rows = [changed if row["case"] == case else row for row in GOOD.rows]
    return replace(GOOD, rows=tuple(rows))


def with_samples(*rows):
    return replace(GOOD, captured={**GOOD.captured, "sample": rows})


def with_training(*rows):
    return replace(GOOD, captured={**GOOD.captured, "train_op": rows})


SAMPLES, TRAINING = GOOD.captured["sample"], GOOD.captured["train_op"]
LAST = SAMPLES[-1]
"""Row of the first reply, which has one token."""


def with_last(**changes):
    return with_samples(*SAMPLES[:-1], {**LAST, **changes})


@pytest.mark.parametrize(
    ("check", "violations"),
    [
        (
            capture.check_clients,
            [
                replace(GOOD, statuses=(1,)),
                with_seen("at_once", None),
                with_seen("openai_stream", {"is_equal": False}),
                with_seen("anthropic_tools", make_seen("anthropic_tools") | {"end": "end_turn"}),
            ],
        ),
        (
            capture.check_samples,
            [
                replace(GOOD, served=GOOD.served[1:]),
                with_samples(*SAMPLES[:-1]),
                with_samples(*SAMPLES, LAST),
                with_last(scope={"run_id": "at_once", "traj_idx": 0}),
                with_last(prompt_tokens=[8, 7]),
                with_last(samples=[{"tokens": [1], "logprobs": [0]}]),
                with_last(samples=[{"tokens": [0], "logprobs": [1e-9]}]),
                with_last(samples=[{"tokens": [0], "logprobs": None}]),
            ],
        ),
        (
            capture.check_usage,
            [
                with_seen("openai_turns", {"usages": [[2, 1], [2, 3], [2, 2]]}),
                with_seen("at_once", {"usages": [[2, 1]]}),
                replace(GOOD, rows=()),
            ],
        ),
        (
            capture.check_training,
            [
                with_training(*TRAINING[1:]),
                with_training(*TRAINING, {"op": "optim_step", "status": "error"}),
                with_training(),
            ],
        ),
        (
            capture.check_long_prompts,
            [
                with_seen("too_long", [LONG[0], [500, "prompt is too long"]]),
                with_seen("too_long", [LONG[0], [400, "the context is full"]]),
                with_seen("too_long", LONG[:1]),
                with_seen("too_long", None),
                with_samples(*SAMPLES[1:]),
            ],
        ),
        (
            capture.check_unknown_names,
            [
                with_seen("unknown", GONE | {"path": 500}),
                with_seen("unknown", GONE | {"model": ["", ""]}),
                with_seen("unknown", GONE | {"weights": ["NotFoundError", "no"]}),
                with_seen("unknown", None),
            ],
        ),
        (
            capture.check_exporter,
            [
                with_seen("exporter", {"is_drained": True, "losses": [0, 1, 0]}),
                with_seen("exporter", {"is_drained": False, "losses": [0, 0, 0]}),
                with_seen("exporter", None),
            ],
        ),
    ],
)
def test_check_passes_a_good_run_and_finds_each_violation(check, violations):
    assert check(GOOD).holds
    assert [number for number, one in enumerate(violations) if check(one).holds] == []


def test_captured_rows_are_read_by_their_kind(tmp_path):
    assert capture.read_captured(tmp_path) == {"sample": (), "train_op": ()}
    (tmp_path / "capture").mkdir()
    (tmp_path / "capture" / "sample.jsonl").write_text(json.dumps({"kind": "sample"}) + "\n")
    assert capture.read_captured(tmp_path)["sample"] == ({"kind": "sample"},)


def test_log_of_samples_has_each_completion_with_its_prompt_once():
    log = SampleLog()
    completions = []
    for token in (4, 5):
        completions.append(
            Completion(
                token_ids=np.array([token], np.int32),
                logprobs=np.array([-0.1], np.float32),
                policy_versions=np.zeros(1, np.int32),
                finish_reason="stop",
            )
        )
    prompt = np.array([1, 2], np.int32)
    log.add(
        SampleRequest(prompt=prompt, sampling=SamplingParams(max_tokens=1)),
        SampleOutput(completions=completions, of_prompt=None),
    )
    # A float32, as the row of a client has it.
    logprobs = (float(np.float32(-0.1)),)
    assert log.take() == (
        Sample(prompt=(1, 2), tokens=(4,), logprobs=logprobs),
        Sample(prompt=(1, 2), tokens=(5,), logprobs=logprobs),
    )
    assert log.take() == ()
