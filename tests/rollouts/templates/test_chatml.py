"""Our ChatML beside the chat templates that Qwen publishes, as text and as tokens."""

import numpy as np
import pytest

from rl.rollouts.renderer import RendererConfig, make_renderer
from rl.rollouts.templates.chatml import NO_THOUGHTS, ChatML
from rl.types import Message
from tests.support.chat_templates import byte_tokenizer, completion_of, merging_tokenizer, template_files

SYSTEM = Message(role="system", content="Be brief.")
ASKED = Message(role="user", content="What is 47 + 82?\nThink.")
TOOL = Message(role="tool", content='{"value": 129}')
OTHER_TOOL = Message(role="tool", content="129.0")
ASKED_AGAIN = Message(role="user", content="And then, twice?")
PLAIN = "129 it is."
WITH_THOUGHTS = '<think>\nFirst 7+2.\n\nThen 4+8.\n</think>\n\n<tool_call>\n{"name": "add"}\n</tool_call>'


@pytest.fixture(scope="module", params=["bytes", "merges"])
def tokenizer_of(request, tmp_path_factory):
    """A tokenizer with a published template, by the template's name."""
    make = {"bytes": byte_tokenizer, "merges": merging_tokenizer}[request.param]
    made = {}

    def get(name):
        if name not in made:
            made[name] = make(tmp_path_factory.mktemp(name), name)
        return made[name]

    return get


def rendered(tokenizer, messages, **options):
    """By the tokenizer's own template, as text."""
    told = [{"role": m.role, "content": m.content} for m in messages]
    return tokenizer.apply_chat_template(told, tokenize=False, **options)


def renderer_of(tokenizer, kind, **fields):
    return make_renderer(
        RendererConfig(kind=kind, **fields), tokenizer=tokenizer, stop_token_ids=(tokenizer.eos_token_id,)
    )


def conversation(renderer, opening, *turns):
    """Token ids of a conversation: an opening, then replies, each a text, and what follows each."""
    ids = [renderer.opening(opening)]
    for reply, messages in turns:
        produced = renderer.reply(reply)
        ids += [produced, renderer.continuation(messages, after=completion_of(produced))]
    return np.concatenate(ids).tolist()


OPENINGS = {
    "user": [ASKED],
    "system": [SYSTEM, ASKED],
    "examples": [SYSTEM, ASKED, Message(role="assistant", content=PLAIN), ASKED_AGAIN],
    "tools at once": [ASKED, Message(role="assistant", content=PLAIN), TOOL, OTHER_TOOL],
}


@pytest.mark.parametrize("opening", OPENINGS.values(), ids=OPENINGS)
@pytest.mark.parametrize(
    ("kind", "thinking", "name"),
    [
        ("qwen3", True, "qwen3"),
        ("qwen3", False, "qwen3"),
        ("chatml", True, "qwen3_instruct_2507"),
        ("chatml", True, "qwen2_5"),
        ("chatml", True, "qwen3_vl"),
    ],
)
def test_openings_are_those_of_the_published_template(tokenizer_of, kind, thinking, name, opening):
    tokenizer = tokenizer_of(name)
    if name == "qwen2_5" and opening[0].role != "system":
        # It brings a system message of its own, which ours is given by the config.
        system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
        renderer = renderer_of(tokenizer, kind, system=system)
    else:
        renderer = renderer_of(tokenizer, kind, thinking=thinking)
    options = {} if thinking else {"enable_thinking": False}
    text = rendered(tokenizer, opening, add_generation_prompt=True, **options)
    ids = renderer.opening(opening)
    assert tokenizer.decode(ids.tolist()) == text
    assert ids.tolist() == tokenizer.encode(text, add_special_tokens=False)
    assert ids.dtype == np.int32


@pytest.mark.parametrize("name", ["qwen3", "qwen3_instruct_2507", "qwen2_5"])
def test_conversations_without_thoughts_are_those_of_the_published_template(tokenizer_of, name):
    tokenizer = tokenizer_of(name)
    kind = "qwen3" if name == "qwen3" else "chatml"
    turns = [(PLAIN, [ASKED_AGAIN]), ("  258\n", [SYSTEM, ASKED]), ("", [TOOL, OTHER_TOOL]), ("3", [ASKED])]
    messages = [SYSTEM, ASKED]
    for reply, told in turns:
        messages += [Message(role="assistant", content=reply), *told]
    text = rendered(tokenizer, messages, add_generation_prompt=True)
    ids = conversation(renderer_of(tokenizer, kind), [SYSTEM, ASKED], *turns)
    assert tokenizer.decode(ids) == text
    assert ids == tokenizer.encode(text, add_special_tokens=False)


def test_thoughts_before_tool_turns_are_kept_as_qwen3_does(tokenizer_of):
    tokenizer = tokenizer_of("qwen3")
    turns = [(WITH_THOUGHTS, [TOOL]), (WITH_THOUGHTS, [TOOL, OTHER_TOOL])]
    messages = [ASKED]
    for reply, told in turns:
        messages += [Message(role="assistant", content=reply), *told]
    text = rendered(tokenizer, messages, add_generation_prompt=True)
    ids = conversation(renderer_of(tokenizer, "qwen3"), [ASKED], *turns)
    assert ids == tokenizer.encode(text, add_special_tokens=False)


def test_thoughts_before_a_user_turn_are_kept_where_qwen3_drops_them(tokenizer_of):
    tokenizer = tokenizer_of("qwen3")
    ids = conversation(renderer_of(tokenizer, "qwen3"), [ASKED], (WITH_THOUGHTS, [ASKED_AGAIN]))
    messages = [ASKED, Message(role="assistant", content=WITH_THOUGHTS), ASKED_AGAIN]
    theirs = rendered(tokenizer, messages, add_generation_prompt=True)
    answer = WITH_THOUGHTS.partition("</think>\n\n")[2]
    assert WITH_THOUGHTS not in theirs
    assert tokenizer.decode(ids) == theirs.replace(answer, WITH_THOUGHTS)


@pytest.mark.parametrize("thinking", [True, False])
def test_a_finished_reply_is_what_qwen3_writes_of_it(tokenizer_of, thinking):
    tokenizer = tokenizer_of("qwen3")
    renderer = renderer_of(tokenizer, "qwen3", thinking=thinking)
    reply = WITH_THOUGHTS if thinking else PLAIN
    whole = rendered(tokenizer, [ASKED, Message(role="assistant", content=reply)])
    ids = [*renderer.opening([ASKED]).tolist(), *renderer.reply(reply).tolist()]
    assert ids == tokenizer.encode(whole.removesuffix("\n"), add_special_tokens=False)


def test_without_thinking_every_reply_begins_with_an_empty_think_block():
    template = ChatML(reply_begins=NO_THOUGHTS)
    assert template.opening([ASKED_AGAIN]) == (
        "<|im_start|>user\nAnd then, twice?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert template.continuation([TOOL, OTHER_TOOL, ASKED_AGAIN]) == (
        '<|im_end|>\n<|im_start|>user\n<tool_response>\n{"value": 129}\n</tool_response>\n<tool_response>\n'
        "129.0\n</tool_response><|im_end|>\n<|im_start|>user\nAnd then, twice?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_the_templates_compared_with_have_not_changed():
    """They are another package's files: where these differ, the comparisons above say something else."""
    assert "enable_thinking" in template_files()["qwen3"].read_text()
    assert "enable_thinking" not in template_files()["qwen3_instruct_2507"].read_text()
