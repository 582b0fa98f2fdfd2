"""Renderers of every kind keep the tokens of replies and close every turn."""

import numpy as np
import pytest

from rl.rollouts.renderer import RendererConfig, make_renderer
from rl.types import Message
from tests.support.chat_templates import byte_tokenizer, merging_tokenizer
from tests.support.fakes import completion_of

KINDS = ["template", "chatml", "qwen3", "raw"]
SYSTEM = Message(role="system", content="Be brief.")
ASKED = Message(role="user", content="What is 12 + 34?")
ASKED_AGAIN = Message(role="user", content="And then, twice?")
END_OF_TEXT, IM_START, IM_END = 256, 257, 258
"""Ids of the byte tokenizer."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"), "qwen3_instruct_2507")


@pytest.fixture(scope="module")
def merging(tmp_path_factory):
    return merging_tokenizer(tmp_path_factory.mktemp("merges"), "qwen3_instruct_2507")


def renderer_of(tokenizer, **fields):
    stop_ids = (tokenizer.convert_tokens_to_ids("<|endoftext|>"), tokenizer.eos_token_id)
    return make_renderer(RendererConfig(**fields), tokenizer=tokenizer, stop_token_ids=stop_ids)


def ids_of(text):
    return list(text.encode())


def drifted(tokenizer, text):
    """Return one token for each byte of the text, which the tokenizer would merge."""
    ids = [tokenizer.convert_tokens_to_ids(token) for byte in text for token in tokenizer.tokenize(byte)]
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text, add_special_tokens=False) != ids
    return ids


def no_utf8(tokenizer):
    """Return the first two bytes of a euro sign, as of a reply cut off within a character."""
    ids = tokenizer.encode("\u20ac", add_special_tokens=False)[:2]
    assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) != ids
    return ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ended", [True, False])
def test_conversation_contains_the_models_own_tokens(merging, kind, ended):
    renderer = renderer_of(merging, kind=kind)
    end = [merging.eos_token_id]
    replies = [drifted(merging, "the answer then"), no_utf8(merging), drifted(merging, "it is 46.")]
    conversation, spans = renderer.opening([ASKED]).tolist(), []
    for reply in replies:
        produced = reply + end * ended
        spans.append((len(conversation), produced))
        after = completion_of(produced, "stop" if ended else "length")
        conversation += produced
        conversation += renderer.continuation([ASKED_AGAIN], after=after).tolist()
    for start, produced in spans:
        assert conversation[start : start + len(produced)] == produced
    text = merging.decode(conversation)
    assert merging.encode(text, add_special_tokens=False) != conversation
    # The messages are tokenized once, independently of the reply.
    between = conversation[spans[0][0] + len(spans[0][1]) : spans[1][0]]
    anything = completion_of([5, *end] if ended else [5])
    assert between == renderer.continuation([ASKED_AGAIN], after=anything).tolist()
    assert merging.decode(between).count(ASKED_AGAIN.content) == 1


FOLLOWS = [*ids_of("\n"), IM_START, *ids_of("user\nAnd then, twice?"), IM_END, *ids_of("\n")]
FOLLOWS += [IM_START, *ids_of("assistant\n")]


@pytest.mark.parametrize("kind", ["template", "chatml", "qwen3"])
@pytest.mark.parametrize(
    ("produced", "reason", "closing"),
    [
        ([52, 54, IM_END], "stop", []),
        ([52, 54], "length", [IM_END]),
        ([52, IM_END], "length", []),
        ([52, 54], "abort", [IM_END]),
        ([], "abort", [IM_END]),
        ([52, 54, END_OF_TEXT], "stop", [IM_END]),
    ],
    ids=["ended", "cut off", "cut off at its end", "aborted", "nothing", "another stop token"],
)
def test_every_turn_is_closed_by_the_end_of_turn_token(tokenizer, kind, produced, reason, closing):
    renderer = renderer_of(tokenizer, kind=kind)
    told = renderer.continuation([ASKED_AGAIN], after=completion_of(produced, reason))
    assert told.tolist() == closing + FOLLOWS
    assert told.dtype == np.int32


@pytest.mark.parametrize("kind", KINDS)
def test_system_message_is_added_to_an_opening_without_one(tokenizer, kind):
    plain = renderer_of(tokenizer, kind=kind)
    renderer = renderer_of(tokenizer, kind=kind, system="Be brief.")
    with_system = plain.opening([SYSTEM, ASKED]).tolist()
    assert renderer.opening([ASKED]).tolist() == with_system != plain.opening([ASKED]).tolist()
    other = [Message(role="system", content="Be long."), ASKED]
    assert renderer.opening(other).tolist() == plain.opening(other).tolist()


@pytest.mark.parametrize(("fields", "separator"), [({}, "\n"), ({"separator": " | "}, " | ")])
def test_raw_text_is_the_messages_with_their_separator(tokenizer, fields, separator):
    renderer = renderer_of(tokenizer, kind="raw", **fields)
    assert renderer.opening([SYSTEM, ASKED]).tolist() == ids_of(f"Be brief.{separator}What is 12 + 34?")
    ended = renderer.continuation([ASKED], after=completion_of([IM_END])).tolist()
    assert ended == ids_of(f"{separator}What is 12 + 34?")
    cut_off = renderer.continuation([ASKED], after=completion_of([52], "length")).tolist()
    assert cut_off == [IM_END, *ids_of(f"{separator}What is 12 + 34?")]
