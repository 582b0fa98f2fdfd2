"""Rollouts as a page has them: all, or evenly chosen ones, and each number where it belongs."""

import math
from typing import Any

import pytest

from rl.reporting.html.blocks import unpacked
from rl.reporting.html.rollouts import CHUNK_TOKENS, pack_rollouts
from rl.reporting.html.token_texts import open_token_texts

ROOM = 10_000_000


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return open_token_texts(tmp_path_factory.mktemp("run"), {"hf_assets_path": None})[0]


def line(reply="ab", *, step=1, sample=0, problem="p", **others):
    ids = [*reply.encode()]
    turn = {
        "messages": [{"role": "user", "content": "47 82"}],
        "reply": reply,
        "finish_reason": "stop",
        "prompt_ids": [*b"47 82"],
        "token_ids": ids,
        "logprobs": [-0.5] * len(ids),
        "policy_versions": 3,
        **others,
    }
    return {
        "step": step, "kind": "train", "advantage": 0.25, "problem": problem, "answer": "21",
        "sample": sample, "reward": 1.0, "correct": True, "parts": {"answer": 1.0}, "end": "done",
        "turns": [turn],
    }  # fmt: skip


def shown(packed):
    """Of each rollout, in order, its turns with texts and pieces in their places."""
    rollouts: list[list[dict[str, Any]]] = []
    for block in packed.chunks:
        chunk = unpacked(block)
        texts, pieces = chunk["texts"], chunk["pieces"]
        for turns in chunk["rollouts"]:
            for turn in turns:
                turn["reply"] = texts[turn["reply"]]
                if "tokens" in turn:
                    turn["tokens"] = [pieces[number] for number in turn["tokens"]]
            rollouts.append(turns)
    return rollouts


def test_each_token_has_its_text_and_both_logprobs_as_their_difference(texts):
    packed = pack_rollouts(
        [line(trainer_logprobs=[-0.5, -0.25], advantages=[0.5, -0.5], mask=[1, 0])], texts, most_bytes=ROOM
    )
    ((turn,),) = shown(packed)
    assert turn["tokens"] == [[97, "a"], [98, "b"]]
    assert turn["logprobs"] == [-0.5, -0.5]
    assert turn["diffs"] == [0, 0.25]
    assert turn["advantages"] == [0.5, -0.5]
    assert turn["mask"] == [1, 0]
    assert turn["versions"] == 3
    assert packed.index["columns"]["diff"] == [0.25]


def test_of_an_older_run_the_rollouts_advantage_is_each_tokens_and_nothing_is_made_up(texts):
    packed = pack_rollouts([line()], texts, most_bytes=ROOM)
    ((turn,),) = shown(packed)
    assert turn["advantages"] == 0.25
    assert not {"diffs", "mask"} & set(turn)
    assert packed.index["columns"]["diff"] == [None]


def test_a_rollout_without_tokens_is_its_text(texts):
    bare = line("hello")
    bare["turns"] = [{"messages": [], "reply": "hello", "finish_reason": "stop"}]
    packed = pack_rollouts([bare], texts, most_bytes=ROOM)
    assert shown(packed) == [[{"reply": "hello", "finish": "stop"}]]
    assert packed.index["columns"]["excerpt"] == ["hello"]


def test_the_index_says_what_is_listed_and_in_which_chunk_it_is(texts):
    long = "x" * (CHUNK_TOKENS // 2 + 10)
    lines = [line(long, sample=0), line(long, sample=1), line("end", sample=2)]
    packed = pack_rollouts(lines, texts, most_bytes=ROOM)
    assert packed.index["first_of_chunk"] == [0, 2]
    assert packed.index["num_recorded"] == 3
    columns = packed.index["columns"]
    assert columns["sample"] == [0, 1, 2]
    assert columns["tokens"] == [len(long), len(long), 3]
    assert columns["reward"] == [1.0] * 3
    assert columns["advantage"] == [0.25] * 3
    assert columns["line"] == [0, 1, 2]
    assert [turns[0]["reply"] for turns in shown(packed)] == [long, long, "end"]


def test_a_prompt_that_samples_share_is_in_the_page_once(texts):
    lines = [line(sample=i) for i in range(8)]
    lines[0]["turns"][0]["messages"] = lines[1]["turns"][0]["messages"] = [{"role": "user", "content": "Q"}]
    chunk = unpacked(pack_rollouts(lines, texts, most_bytes=ROOM).chunks[0])
    assert sorted(chunk["texts"]) == ["47 82", "Q", "ab"]


def test_too_many_rollouts_are_thinned_out_evenly_by_whole_groups(texts):
    # Each reply is another, or it would be packed to nothing.
    lines = [
        line("".join(chr(33 + (7 * i * step + i * i) % 90) for i in range(300)), step=step, sample=sample)
        for step in range(1, 101)
        for sample in range(2)
    ]
    whole = pack_rollouts(lines, texts, most_bytes=ROOM)
    thin = pack_rollouts(lines, texts, most_bytes=whole.num_bytes // 4)
    assert thin.num_bytes <= whole.num_bytes // 4
    steps = thin.index["columns"]["step"]
    assert 30 <= len(steps) <= 50
    assert steps[::2] == steps[1::2]  # both samples of each
    gaps = [b - a for a, b in zip(steps[::2], steps[2::2], strict=False)]
    assert max(gaps) <= 2 * min(gaps) + 1
    assert thin.index["num_recorded"] == 200


def test_what_a_finding_refers_to_stays_when_others_are_left_out(texts):
    lines = [line(f"{step:03d}" * 100, step=step) for step in range(1, 101)]
    most = pack_rollouts(lines, texts, most_bytes=ROOM).num_bytes // 5
    kept = frozenset({3, 61})
    assert {4, 62} <= set(pack_rollouts(lines, texts, most_bytes=most, keep=kept).index["columns"]["step"])
    assert not {4, 62} <= set(pack_rollouts(lines, texts, most_bytes=most).index["columns"]["step"])


def test_numbers_that_are_not_finite_are_shown_as_not_known(texts):
    odd = line(trainer_logprobs=["nan", -0.5], logprobs=["-inf", -0.5]) | {"reward": math.nan}
    packed = pack_rollouts([odd], texts, most_bytes=ROOM)
    ((turn,),) = shown(packed)
    assert turn["logprobs"] == [None, -0.5]
    assert turn["diffs"] == [None, 0]
    assert packed.index["columns"]["reward"] == ["nan"]


def test_what_is_no_number_where_one_should_be_does_not_stop_the_page(texts):
    odd = line(trainer_logprobs=[None, -0.5], logprobs=["?", -0.25], policy_versions=None)
    odd |= {"advantage": "?", "parts": None}
    none = line(sample=1, token_ids=None)
    packed = pack_rollouts([odd, none], texts, most_bytes=ROOM)
    (turn,), (bare,) = shown(packed)
    assert (turn["logprobs"], turn["diffs"]) == ([None, -0.25], [None, -0.25])
    assert "tokens" not in bare
    assert packed.index["columns"]["advantage"] == [None, 0.25]


def test_no_rollouts_are_an_empty_index(texts):
    packed = pack_rollouts([], texts, most_bytes=10)
    assert packed.chunks == []
    assert packed.index["columns"]["step"] == []
