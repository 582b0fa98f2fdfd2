"""Conversations as tokens: what the model produced stays, what it is told is tokenized once."""

import numpy as np
import pytest

from rl.rollouts.renderer import RendererConfig, make_renderer, render_prompt
from rl.types import Message, Problem
from tests.support.chat_templates import byte_tokenizer, completion_of, merging_tokenizer

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


# Tokenizers whose decode and encode differ


def drifted(tokenizer, text):
    """The text with a token for each byte, as a model may produce it, although the tokenizer merges some."""
    ids = [tokenizer.convert_tokens_to_ids(token) for byte in text for token in tokenizer.tokenize(byte)]
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text, add_special_tokens=False) != ids
    return ids


def no_utf8(tokenizer):
    """The first two bytes of a euro sign: a reply that was cut off within a character."""
    ids = tokenizer.encode("\u20ac", add_special_tokens=False)[:2]
    assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) != ids
    return ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ended", [True, False])
def test_what_the_model_produced_is_in_the_conversation_as_it_was_produced(merging, kind, ended):
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
    # Told once, and as if the replies had been anything else.
    between = conversation[spans[0][0] + len(spans[0][1]) : spans[1][0]]
    anything = completion_of([5, *end] if ended else [5])
    assert between == renderer.continuation([ASKED_AGAIN], after=anything).tolist()
    assert merging.decode(between).count(ASKED_AGAIN.content) == 1


@pytest.mark.parametrize("kind", ["template", "chatml", "qwen3"])
def test_pieces_are_the_whole_where_replies_are_as_the_tokenizer_has_them(merging, kind):
    renderer = renderer_of(merging, kind=kind)
    produced = renderer.reply("the answer: 46.\n")
    pieces = [
        renderer.opening([SYSTEM, ASKED]),
        produced,
        renderer.continuation([ASKED_AGAIN], after=completion_of(produced)),
    ]
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 12 + 34?<|im_end|>\n"
        "<|im_start|>assistant\nthe answer: 46.\n<|im_end|>\n"
        "<|im_start|>user\nAnd then, twice?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = np.concatenate(pieces)
    assert ids.dtype == np.int32
    assert ids.tolist() == merging.encode(text, add_special_tokens=False)
    assert len(ids) < len(text) - 60  # something was merged


# How a turn is closed

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


def test_the_end_of_turn_token_stops_a_reply_even_if_the_tokenizer_ends_with_another(tokenizer):
    config = RendererConfig(kind="chatml")
    renderer = make_renderer(config, tokenizer=tokenizer, stop_token_ids=(END_OF_TEXT,))
    assert renderer.stop_token_ids == (END_OF_TEXT, IM_END)


@pytest.mark.parametrize("kind", KINDS)
def test_a_demonstration_ends_with_the_end_of_turn_and_reads_as_it_is(tokenizer, kind):
    renderer = renderer_of(tokenizer, kind=kind)
    reply = renderer.reply("<think>\nSix.\n</think>\n\n46")
    assert reply[-1] == IM_END
    assert reply.dtype == np.int32
    assert renderer.text(reply) == "<think>\nSix.\n</think>\n\n46"


def test_special_tokens_are_not_part_of_the_text_and_broken_characters_are_marked(tokenizer):
    renderer = renderer_of(tokenizer)
    assert renderer.text(np.array([52, END_OF_TEXT, 54, IM_END])) == "46"
    assert renderer.text(np.array([52, 0xE2, 0x82])) == "4\ufffd"


# Raw text


def test_raw_text_is_the_messages_and_the_reply_follows_directly(tokenizer):
    renderer = renderer_of(tokenizer, kind="raw")
    assert renderer.opening([SYSTEM, ASKED]).tolist() == ids_of("Be brief.\nWhat is 12 + 34?")
    told = renderer.continuation([ASKED_AGAIN, ASKED], after=completion_of([52, IM_END]))
    assert told.tolist() == ids_of("\nAnd then, twice?\nWhat is 12 + 34?")
    told = renderer.continuation([ASKED], after=completion_of([52], "length"))
    assert told.tolist() == [IM_END, *ids_of("\nWhat is 12 + 34?")]


def test_the_separator_of_raw_text_is_a_setting(tokenizer):
    renderer = renderer_of(tokenizer, kind="raw", separator=" | ")
    assert renderer.opening([SYSTEM, ASKED]).tolist() == ids_of("Be brief. | What is 12 + 34?")
    told = renderer.continuation([ASKED], after=completion_of([IM_END]))
    assert told.tolist() == ids_of(" | What is 12 + 34?")


# Settings


@pytest.mark.parametrize("kind", KINDS)
def test_a_system_message_is_put_before_an_opening_that_has_none(tokenizer, kind):
    plain = renderer_of(tokenizer, kind=kind)
    renderer = renderer_of(tokenizer, kind=kind, system="Be brief.")
    with_system = plain.opening([SYSTEM, ASKED]).tolist()
    assert renderer.opening([ASKED]).tolist() == with_system != plain.opening([ASKED]).tolist()
    other = [Message(role="system", content="Be long."), ASKED]
    assert renderer.opening(other).tolist() == plain.opening(other).tolist()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kind": "chatml", "thinking": False}, "renderer.thinking=False: kind='chatml' knows no thoughts"),
        ({"kind": "raw", "thinking": False}, "renderer.thinking=False: kind='raw' knows no thoughts"),
        ({"separator": " "}, "renderer.separator=' ': it is of kind raw, not of kind='template'"),
        ({"kind": "qwen3", "keep_replies": True}, "renderer.keep_replies=True: it is of kind template"),
    ],
)
def test_a_setting_of_another_kind_is_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        RendererConfig(**fields)


def test_chatml_is_refused_for_a_tokenizer_without_its_tokens():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    other = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    with pytest.raises(
        ValueError, match=r"renderer.kind=qwen3: the tokenizer of .* has no token '<\|im_start"
    ):
        renderer_of(other, kind="qwen3")


@pytest.mark.parametrize("kind", KINDS)
def test_without_messages_there_is_nothing_to_render(tokenizer, kind):
    renderer = renderer_of(tokenizer, kind=kind)
    with pytest.raises(ValueError, match="an opening without messages"):
        renderer.opening([])
    with pytest.raises(ValueError, match="a continuation without messages"):
        renderer.continuation([], after=completion_of([IM_END]))


# Prompts of problems


def problem(question="12 + 34?", **fields):
    return Problem(id="p7", question=question, answer="46", **fields)


def test_a_prompt_that_leaves_no_room_names_its_problem(tokenizer):
    renderer = renderer_of(tokenizer, kind="raw")
    assert len(render_prompt(problem(), [ASKED], renderer=renderer, max_tokens=16).token_ids) == 16
    with pytest.raises(ValueError, match=r"problem 'p7' has 16 tokens; the context leaves room for 15"):
        render_prompt(problem(), [ASKED], renderer=renderer, max_tokens=15)


def test_messages_that_cannot_be_rendered_name_their_problem(tmp_path):
    renderer = renderer_of(byte_tokenizer(tmp_path, "gemma"))
    says = "prompt of problem 'p7': the chat template of .* does not render messages of roles system, user"
    with pytest.raises(ValueError, match=says):
        render_prompt(problem(), [SYSTEM, ASKED], renderer=renderer, max_tokens=99)
