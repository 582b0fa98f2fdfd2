"""Rollouts in a page: all or evenly chosen ones, with each number in its place."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from rl.models.files.tokenizer import build_byte_tokenizer
from rl.reporting.html.rollouts import CHUNK_TOKENS, TokenTexts, open_token_texts, pack_rollouts
from tests.support.report_runs import rollout, unpack

ROOM = 10_000_000


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    texts, problem = open_token_texts(tmp_path_factory.mktemp("run"), {"hf_assets_path": None})
    assert problem is None
    return texts


def line(reply="ab", *, step=1, sample=0, **others):
    made = rollout(
        step, reply, sample=sample, reward=1.0, correct=True, answer="21", advantage=0.25, version=3
    )
    made["turns"][0] |= {
        "messages": [{"role": "user", "content": "47 82"}],
        "prompt_ids": [*b"47 82"],
        "token_ids": [*reply.encode()],
        "logprobs": [-0.5] * len(reply),
        **others,
    }
    return made


def shown(packed):
    """Return the turns of each rollout with their texts and pieces."""
    rollouts: list[list[dict[str, Any]]] = []
    for block in packed.chunks:
        chunk = unpack(block)
        texts, pieces = chunk["texts"], chunk["pieces"]
        for turns in chunk["rollouts"]:
            for turn in turns:
                turn["reply"] = texts[turn["reply"]]
                if "tokens" in turn:
                    turn["tokens"] = [pieces[number] for number in turn["tokens"]]
            rollouts.append(turns)
    return rollouts


def test_each_token_has_its_text_and_logprob_difference(texts):
    packed = pack_rollouts(
        [line(trainer_logprobs=[-0.5, -0.25], advantages=[0.5, -0.5], mask=[1, 0])],
        texts,
        max_bytes=ROOM,
    )
    ((turn,),) = shown(packed)
    assert turn["tokens"] == [[97, "a"], [98, "b"]]
    assert turn["logprobs"] == [-0.5, -0.5]
    assert turn["diffs"] == [0, 0.25]
    assert turn["advantages"] == [0.5, -0.5]
    assert turn["mask"] == [1, 0]
    assert turn["versions"] == 3
    assert packed.index["columns"]["diff"] == [0.25]


def test_turns_of_a_tree_are_shown_once_branch_by_branch(texts):
    tree = line("a")
    (turn,) = tree["turns"]
    tree["turns"] = [{**turn, "reply": reply} for reply in "abcd"]
    tree["turns"][0]["advantages"] = 0.5
    tree["branches"] = [
        {"turns": [0, 2], "role": "main", "cause": "", "trained": True},
        {"turns": [0, 1], "role": "superseded", "cause": "again", "trained": False},
        {"turns": [3], "role": "sub-agent", "cause": "agent", "trained": True},
        {"turns": [0], "role": "superseded", "cause": "again", "trained": False},
    ]
    (turns,) = shown(pack_rollouts([tree], texts, max_bytes=ROOM))
    assert [(turn["reply"], turn["number"]) for turn in turns] == [
        ("a", 1), ("c", 3), ("b", 2), ("d", 4),
    ]  # fmt: skip
    assert [turn.get("branch") for turn in turns] == [
        {"role": "main", "cause": "", "trained": True, "after": None},
        None,
        {"role": "superseded", "cause": "again", "trained": False, "after": 1},
        {"role": "sub-agent", "cause": "agent", "trained": True, "after": None},
    ]
    # The rollout's advantage is not that of turns that were not trained.
    assert [turn.get("advantages") for turn in turns] == [0.5, None, None, None]
    (plain,) = shown(pack_rollouts([line("a")], texts, max_bytes=ROOM))
    assert not {"branch", "number"} & set(plain[0])


def test_place_in_the_ledger_is_shown_with_the_first_turn(texts):
    linked = line("a") | {"ledger": {"file": "ledger/1.parquet", "command": "show"}}
    linked["turns"][0]["ledger"] = "row 3"
    packed = pack_rollouts([linked, line("b")], texts, max_bytes=ROOM)
    ((turn,), (other,)) = shown(packed)
    assert (turn["in_ledger"], turn["ledger"]) == (linked["ledger"], "row 3")
    assert not {"ledger", "in_ledger"} & set(other)


def test_rollout_without_tokens_has_its_text(texts):
    bare = line("hello")
    bare["turns"] = [{"messages": [], "reply": "hello", "finish_reason": "stop"}]
    packed = pack_rollouts([bare], texts, max_bytes=ROOM)
    assert shown(packed) == [[{"reply": "hello", "finish": "stop"}]]
    assert packed.index["columns"]["excerpt"] == ["hello"]


def test_index_has_columns_and_chunks(texts):
    long = "x" * (CHUNK_TOKENS // 2 + 10)
    lines = [line(long, sample=0), line(long, sample=1), line("end", sample=2)]
    packed = pack_rollouts(lines, texts, max_bytes=ROOM)
    assert packed.index["first_of_chunk"] == [0, 2]
    assert packed.index["num_recorded"] == 3
    columns = packed.index["columns"]
    assert columns["sample"] == [0, 1, 2]
    assert columns["tokens"] == [len(long), len(long), 3]
    assert columns["reward"] == [1.0] * 3
    assert columns["advantage"] == [0.25] * 3
    assert columns["line"] == [0, 1, 2]
    assert [turns[0]["reply"] for turns in shown(packed)] == [long, long, "end"]


def test_shared_prompt_is_stored_once(texts):
    packed = pack_rollouts([line(sample=i) for i in range(8)], texts, max_bytes=ROOM)
    assert sorted(unpack(packed.chunks[0])["texts"]) == ["47 82", "ab"]


def test_too_many_rollouts_are_thinned_by_whole_groups(texts):
    # Replies differ, since equal ones would compress to nothing.
    lines = [
        line(
            "".join(chr(33 + (7 * i * step + i * i) % 90) for i in range(300)),
            step=step,
            sample=sample,
        )
        for step in range(1, 101)
        for sample in range(2)
    ]
    whole = pack_rollouts(lines, texts, max_bytes=ROOM)
    thin = pack_rollouts(lines, texts, max_bytes=whole.num_bytes // 4)
    assert thin.num_bytes <= whole.num_bytes // 4
    steps = thin.index["columns"]["step"]
    assert 30 <= len(steps) <= 50
    assert steps[::2] == steps[1::2]  # both samples of each
    gaps = [b - a for a, b in zip(steps[::2], steps[2::2], strict=False)]
    assert max(gaps) <= 2 * min(gaps) + 1
    assert thin.index["num_recorded"] == 200


def test_rollouts_of_findings_are_kept(texts):
    lines = [line(f"{step:03d}" * 100, step=step) for step in range(1, 101)]
    most = pack_rollouts(lines, texts, max_bytes=ROOM).num_bytes // 5
    kept = frozenset({3, 61})
    assert {4, 62} <= set(
        pack_rollouts(lines, texts, max_bytes=most, keep=kept).index["columns"]["step"]
    )
    assert not {4, 62} <= set(pack_rollouts(lines, texts, max_bytes=most).index["columns"]["step"])


def test_numbers_that_are_not_finite_are_unknown(texts):
    odd = line(trainer_logprobs=["nan", -0.5], logprobs=["-inf", -0.5]) | {"reward": "nan"}
    packed = pack_rollouts([odd], texts, max_bytes=ROOM)
    ((turn,),) = shown(packed)
    assert turn["logprobs"] == [None, -0.5]
    assert turn["diffs"] == [None, 0]
    assert packed.index["columns"]["reward"] == ["nan"]


# Texts of tokens, with real tokenizers


@pytest.mark.parametrize(
    ("ids", "pieces"),
    [
        ([*b"4+7"], ["4", "+", "7"]),
        ([*"a€b".encode()], ["a", "", "", "€", "b"]),
        ([0xE2, 0x82], ["", "\ufffd"]),  # cut at the end
        ([0xE2, ord("a")], ["", "\ufffda"]),  # broken off
        ([0xFF, 0xFF, ord("a")], ["", "", "\ufffd\ufffda"]),  # no character
        ([ord("a"), 258], ["a", "<|im_end|>"]),
    ],
)
def test_each_token_has_the_text_that_it_adds(ids, pieces, texts):
    assert texts.split(ids) == pieces


def test_space_that_the_decoder_drops_is_kept():
    vocabulary = {"▁add": 0, "▁it": 1, "s": 2, "<unk>": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    assert TokenTexts(tokenizer).split([0, 1, 2]) == ["add", " it", "s"]


def test_tokenizer_of_the_exported_model_is_preferred(tmp_path):
    exported = tmp_path / "checkpoints" / "hf"
    build_byte_tokenizer(exported)
    content = (exported / "tokenizer.json").read_text().replace("[ANSWER]", "[EXPORT]")
    (exported / "tokenizer.json").write_text(content)
    build_byte_tokenizer(tmp_path / "given")
    found, _ = open_token_texts(tmp_path, {"hf_assets_path": str(tmp_path / "given")})
    assert found.split([261]) == ["[EXPORT]"]


def test_without_a_tokenizer_tokens_are_numbers(tmp_path):
    found, problem = open_token_texts(tmp_path, {"hf_assets_path": str(tmp_path / "gone")})
    assert found.split([7, 12]) == ["<7>", "<12>"]
    assert not found.known
    assert problem is not None
    assert str(tmp_path / "gone") in problem
