"""Renderers of every kind keep the tokens of replies and close every turn; ChatML equals the
published templates; templates that do not round-trip are refused."""

import json

import numpy as np
import pytest

from rl.models.files.tokenizer import build_byte_tokenizer, load_tokenizer
from rl.rollouts.renderer import RendererConfig, make_renderer
from rl.types import Message
from tests.support.chat_templates import byte_tokenizer, merging_tokenizer
from tests.support.fakes import completion_of

ROUND_TRIP = ["cohere2", "lfm2", "phi3", "qwen2_5", "qwen3_instruct_2507"]
REFUSED = {
    "qwen3": "it takes the thoughts out of earlier replies",
    "gemma3": "it trims spaces and line ends around earlier replies",
    "llama3_2": "it trims spaces and line ends around earlier replies",
    "deepseekv3": "it writes earlier replies differently",
    "glm4moe": "it writes earlier replies differently",
    "qwen3_6": "it writes earlier replies differently",
}
"""Reasons why templates are refused without `keep_replies`."""
NO_TEXT = ["idefics3", "llava_next", "smolvlm"]

SYSTEM = Message(role="system", content="Be brief.")
ASKED = Message(role="user", content="What is 47 + 82?\nThink.")
ASKED_AGAIN = Message(role="user", content="And then, twice?")
ONCE_MORE = Message(role="user", content="Once more?")
TOOL = Message(role="tool", content='{"value": 129}')
OTHER_TOOL = Message(role="tool", content="129.0")
REPLY = "129 it is."
THOUGHTS = (
    '<think>\nFirst 7+2.\n\nThen 4+8.\n</think>\n\n<tool_call>\n{"name": "add"}\n</tool_call>'
)
CHATML = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"


def renderer_of(tokenizer, **fields):
    return make_renderer(
        RendererConfig(**fields), tokenizer=tokenizer, stop_token_ids=(tokenizer.eos_token_id,)
    )


def replied(text):
    return Message(role="assistant", content=text)


def rendered(tokenizer, messages, **options):
    """Return the token ids of the tokenizer's own template."""
    listed = [{"role": m.role, "content": m.content} for m in messages]
    text = tokenizer.apply_chat_template(listed, tokenize=False, **options)
    return tokenizer.encode(text, add_special_tokens=False)


def conversation(renderer, opening, *turns):
    """Return the token ids of an opening, then of each reply and the messages after it."""
    ids = [renderer.opening(opening)]
    for reply, messages in turns:
        produced = renderer.reply(reply)
        ids += [produced, renderer.continuation(messages, after=completion_of(produced))]
    return np.concatenate(ids).tolist()


def messages_of(opening, *turns):
    return [*opening, *(m for reply, messages in turns for m in (replied(reply), *messages))]


def written(tmp_path, turn, *, opens="<|im_start|>assistant\n", **settings):
    """Return a byte tokenizer whose template renders each message `m` by `turn`."""
    build_byte_tokenizer(tmp_path)
    loop = f"{{% for m in messages %}}{turn}{{% endfor %}}"
    end = f"{{% if add_generation_prompt %}}{opens}{{% endif %}}"
    (tmp_path / "chat_template.jinja").write_text(loop + end)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return load_tokenizer(tmp_path)


# ChatML and the templates that Qwen publishes


@pytest.fixture(scope="module", params=[byte_tokenizer, merging_tokenizer])
def tokenizer_of(request, tmp_path_factory):
    """Return a tokenizer with a published template by name."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = request.param(tmp_path_factory.mktemp(name), name)
        return made[name]

    return get


@pytest.mark.parametrize(
    ("kind", "name", "thinking"),
    [
        ("qwen3", "qwen3", True),
        ("qwen3", "qwen3", False),
        ("chatml", "qwen3_instruct_2507", True),
        ("chatml", "qwen2_5", True),
        ("chatml", "qwen3_vl", True),
    ],
)
def test_openings_equal_the_published_template(tokenizer_of, kind, name, thinking):
    tokenizer = tokenizer_of(name)
    options = {} if thinking else {"enable_thinking": False}
    for opening in (
        [ASKED],
        [SYSTEM, ASKED],
        [SYSTEM, ASKED, replied(REPLY), ASKED_AGAIN],
        [ASKED, replied(REPLY), TOOL, OTHER_TOOL],
    ):
        # The template of Qwen2.5 adds a system message, which ChatML takes from the config.
        adds_system = name == "qwen2_5" and opening[0].role != "system"
        system = (
            "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
            if adds_system
            else ""
        )
        ids = renderer_of(tokenizer, kind=kind, thinking=thinking, system=system).opening(opening)
        assert ids.tolist() == rendered(tokenizer, opening, add_generation_prompt=True, **options)
        assert ids.dtype == np.int32


TURNS = [
    (REPLY, [ASKED_AGAIN]),
    ("<think>\nTwice.\n</think>\n\n258", [ASKED]),
    (" 2 \n", [ASKED_AGAIN]),
]
TOLD = [
    (REPLY, [ASKED_AGAIN]),
    ("  258\n", [SYSTEM, ASKED]),
    ("", [TOOL, OTHER_TOOL]),
    ("3", [ASKED]),
]


@pytest.mark.parametrize(
    ("kind", "name", "turns"),
    [
        *(("template", name, TURNS) for name in ROUND_TRIP),
        ("chatml", "qwen2_5", TOLD),
        ("chatml", "qwen3_instruct_2507", TOLD),
        ("qwen3", "qwen3", TOLD),
        ("qwen3", "qwen3", [(THOUGHTS, [TOOL]), (THOUGHTS, [TOOL, OTHER_TOOL])]),
    ],
)
def test_conversation_equals_the_published_template(tokenizer_of, kind, name, turns):
    tokenizer = tokenizer_of(name)
    renderer = renderer_of(tokenizer, kind=kind)
    renderer.check_multi_turn()
    ids = conversation(renderer, [SYSTEM, ASKED], *turns)
    assert ids == rendered(
        tokenizer, messages_of([SYSTEM, ASKED], *turns), add_generation_prompt=True
    )


# Published templates that are refused


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_template_that_rewrites_replies_needs_keep_replies_for_several_turns(
    tmp_path, name, reason
):
    tokenizer = byte_tokenizer(tmp_path, name)
    renderer = renderer_of(tokenizer)
    assert ASKED_AGAIN.content in tokenizer.decode(renderer.opening([ASKED_AGAIN]).tolist())
    with pytest.raises(ValueError, match=f"does not round-trip.*{reason}"):
        renderer.continuation([ASKED_AGAIN], after=completion_of(renderer.reply(REPLY)))
    with pytest.raises(ValueError, match=reason):
        renderer.check_multi_turn()
    kept = renderer_of(tokenizer, keep_replies=True)
    reply = "<think>\nTwice.\n</think>\n\n 258 \n"
    own = [*kept.opening([ASKED_AGAIN]).tolist(), *kept.reply(reply).tolist()]
    ids = conversation(kept, [ASKED_AGAIN], (reply, [ONCE_MORE]))
    assert ids[: len(own)] == own
    # The template adds after the reply what it adds after a plain one.
    options = {"enable_thinking": True} if "enable_thinking" in tokenizer.chat_template else {}
    plain = messages_of([ASKED_AGAIN], (REPLY, [ONCE_MORE]))
    follows = tokenizer.decode(rendered(tokenizer, plain, add_generation_prompt=True, **options))
    assert tokenizer.decode(ids[len(own) - 1 :]) == follows.partition(REPLY)[2]


def test_end_of_turn_that_is_no_stop_token_is_refused(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, "gptoss")
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    message = (
        rf"it puts '<\|end\|>' after a reply, .* add {end} to eos_token_id of "
        r"generation_config.json"
    )
    with pytest.raises(ValueError, match=message):
        renderer_of(tokenizer).check_multi_turn()


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        *((name, {}, "does not render a user's turn: its text is left out") for name in NO_TEXT),
        (
            "qwen2_5",
            {"thinking": False},
            r"renderer.thinking=False: the chat template of .* does not read",
        ),
        (
            "gemma",
            {"system": "Be brief."},
            r"does not render messages of roles system, user: System role",
        ),
    ],
)
def test_template_that_cannot_open_a_conversation_is_refused(tmp_path, name, fields, message):
    tokenizer = byte_tokenizer(tmp_path, name)
    with pytest.raises(ValueError, match=message):
        renderer_of(tokenizer, **fields)


# Templates of this file


SWALLOWS = {
    "content": "<end>",
    "lstrip": True,
    "rstrip": False,
    "special": True,
    "__type": "AddedToken",
}


@pytest.mark.parametrize(
    ("turn", "settings", "message"),
    [
        (
            "<|im_start|>{{ loop.index }} {{ m.role }}\n{{ m.content }}<|im_end|>\n",
            {"opens": "<|im_start|>{{ messages|length + 1 }} assistant\n"},
            "writes what follows a reply differently after messages of user",
        ),
        (
            "{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
            "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n{% "
            "endif %}{{ m.content }}<|im_end|>\n{% endif %}",
            {},
            "writes what follows a reply differently after messages of system",
        ),
        (
            "{{ m.role }}: {{ m.content }}\n",
            {"opens": "assistant:"},
            r"puts '\\nuser: What is said ' after a reply, which does not begin with a special "
            r"token",
        ),
        (
            "{% if m.role == 'assistant' %}{{ raise_exception('no replies') }}{% endif %}" + CHATML,
            {"opens": ""},
            "does not render messages of roles user, assistant, user: no replies",
        ),
        (
            "<|im_start|>{{ m.role }}\n{{ m.content }}<end>\n",
            {"eos_token": SWALLOWS},
            r"'reply <end>' is not tokenized as 'reply ' and '<end>' are",
        ),
    ],
    ids=[
        "numbers turns",
        "moves the system message",
        "no special token",
        "raises",
        "swallows a space",
    ],
)
def test_template_without_independent_turns_is_refused(tmp_path, turn, settings, message):
    renderer = renderer_of(written(tmp_path, turn, **settings), keep_replies=True)
    renderer.opening([ASKED])
    with pytest.raises(ValueError, match=message):
        renderer.check_multi_turn()


def test_end_of_turn_comes_from_the_template(tmp_path):
    """Base models end texts with one token and turns with another."""
    renderer = renderer_of(written(tmp_path, CHATML, eos_token="<|endoftext|>"))
    renderer.check_multi_turn()
    assert renderer.stop_token_ids == (256, 258)
    assert renderer.reply("a").tolist() == [97, 258]


def test_missing_template_is_an_error_only_for_kind_template(tmp_path):
    build_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="is missing; add one"):
        renderer_of(tokenizer)
    assert len(renderer_of(tokenizer, kind="chatml").opening([ASKED])) > 0


# Every kind

KINDS = ["template", "chatml", "qwen3", "raw"]
END_OF_TEXT, IM_START, IM_END = 256, 257, 258
"""Ids of the byte tokenizer."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"), "qwen3_instruct_2507")


@pytest.fixture(scope="module")
def merging(tmp_path_factory):
    return merging_tokenizer(tmp_path_factory.mktemp("merges"), "qwen3_instruct_2507")


def ids_of(text):
    return list(text.encode())


def drifted(tokenizer, text):
    """Return one token for each byte of the text, which the tokenizer would merge."""
    return [
        tokenizer.convert_tokens_to_ids(token)
        for byte in text
        for token in tokenizer.tokenize(byte)
    ]


def no_utf8(tokenizer):
    """Return the first two bytes of a euro sign, as of a reply cut off within a character."""
    return tokenizer.encode("\u20ac", add_special_tokens=False)[:2]


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
    assert renderer.opening([SYSTEM, ASKED]).tolist() == ids_of(
        f"Be brief.{separator}{ASKED.content}"
    )
    ended = renderer.continuation([ASKED], after=completion_of([IM_END])).tolist()
    assert ended == ids_of(f"{separator}{ASKED.content}")
    cut_off = renderer.continuation([ASKED], after=completion_of([52], "length")).tolist()
    assert cut_off == [IM_END, *ids_of(f"{separator}{ASKED.content}")]
