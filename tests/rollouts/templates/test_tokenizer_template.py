"""The tokenizer's own chat template: what is taken for several turns, and what is refused and why."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from rl.models.tokenizer import build_byte_tokenizer, load_tokenizer
from rl.rollouts.renderer import RendererConfig, make_renderer
from rl.rollouts.templates.tokenizer_template import REPLIED
from rl.types import Message
from tests.support.chat_templates import byte_tokenizer, completion_of, merging_tokenizer, template_files

DOCS = Path(__file__).parents[3] / "docs" / "renderers.md"

ROUND_TRIP = [
    "cohere2", "lfm2", "lfm2_v2", "phi3", "phi3_5", "qwen2_5", "qwen2_5_vl", "qwen3_instruct_2507",
    "qwen3_vl",
]  # fmt: skip
WITHOUT_THOUGHTS = ["lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl", "qwen3"]
TRIMMED = [
    "cohere", "diffusion_gemma", "gemma", "gemma3", "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4",
    "gemma4_v5", "llama3", "llama3_1", "llama3_2",
]  # fmt: skip
OTHER_BEGINNING = [
    "deepseek_r1_distill", "deepseekv3", "glm4moe", "muse_glimmer", "nemotron_3_5_lightning",
    "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6",
    "qwen3_8",
]  # fmt: skip
REFUSED = {
    **dict.fromkeys(WITHOUT_THOUGHTS, "it takes the thoughts out of earlier replies: "),
    **dict.fromkeys(TRIMMED, "it trims spaces and line ends around earlier replies: "),
    **dict.fromkeys(OTHER_BEGINNING, "it writes earlier replies differently: "),
}
"""Without `keep_replies`, and what is said of it."""
OTHER_END = ["gptoss"]
NO_TEXT = ["idefics3", "llava_next", "smolvlm"]

SYSTEM = Message(role="system", content="Be brief.")
ASKED = Message(role="user", content="What is 47 + 82?")
ASKED_AGAIN = Message(role="user", content="And then, twice?")
TOOL = Message(role="tool", content="129")
REPLY = "129 it is."


def renderer_of(tokenizer, **fields):
    return make_renderer(
        RendererConfig(**fields), tokenizer=tokenizer, stop_token_ids=(tokenizer.eos_token_id,)
    )


def conversation(renderer, opening, *turns):
    ids = [renderer.opening(opening)]
    for reply, messages in turns:
        produced = renderer.reply(reply)
        ids += [produced, renderer.continuation(messages, after=completion_of(produced))]
    return np.concatenate(ids).tolist()


def written(tmp_path, turn, *, begins="", opens="<|im_start|>assistant\n", **settings):
    """A tokenizer of bytes with the template of a message made up here."""
    build_byte_tokenizer(tmp_path)
    loop = f"{begins}{{% for m in messages %}}{turn}{{% endfor %}}"
    end = f"{{% if add_generation_prompt %}}{opens}{{% endif %}}"
    (tmp_path / "chat_template.jinja").write_text(loop + end)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return load_tokenizer(tmp_path)


# Published templates


def test_every_published_template_is_one_of_those_below():
    known = {*ROUND_TRIP, *REFUSED, *OTHER_END, *NO_TEXT}
    assert {name for name in template_files() if not name.endswith("_training")} == known


def test_the_docs_say_the_same_of_every_published_template():
    rows = [line.split("|") for line in DOCS.read_text().splitlines() if line.startswith("| ")]
    said = {row[1].strip(): set(re.findall(r"`([a-z0-9_]+)`", row[2])) for row in rows if len(row) > 3}
    assert said["round-trips"] == set(ROUND_TRIP)
    assert said["takes the thoughts out of earlier replies"] == set(WITHOUT_THOUGHTS)
    assert said["trims spaces and line ends around earlier replies"] == set(TRIMMED)
    assert said["writes the beginning of earlier replies differently"] == set(OTHER_BEGINNING)
    assert said["ends earlier replies with another token than the last"] == set(OTHER_END)
    assert said["wants content in parts"] == set(NO_TEXT)


@pytest.mark.parametrize("name", ROUND_TRIP)
@pytest.mark.parametrize("make", [byte_tokenizer, merging_tokenizer])
def test_a_conversation_is_that_of_the_template(tmp_path, make, name):
    tokenizer = make(tmp_path, name)
    renderer = renderer_of(tokenizer)
    renderer.check_multi_turn()
    turns = [(REPLY, [ASKED_AGAIN]), ("<think>\nTwice.\n</think>\n\n258", [ASKED]), (" 2 \n", [ASKED_AGAIN])]
    messages = [SYSTEM, ASKED]
    for reply, told in turns:
        messages += [Message(role="assistant", content=reply), *told]
    text = tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in messages], tokenize=False, add_generation_prompt=True
    )
    assert conversation(renderer, [SYSTEM, ASKED], *turns) == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(("name", "what"), REFUSED.items())
def test_a_template_that_does_not_round_trip_is_refused_for_several_turns_alone(tmp_path, name, what):
    tokenizer = byte_tokenizer(tmp_path, name)
    file = tmp_path / "chat_template.jinja"
    renderer = renderer_of(tokenizer)
    assert ASKED.content in tokenizer.decode(renderer.opening([ASKED]).tolist())
    assert renderer.reply("a").tolist() == [97, tokenizer.eos_token_id]
    with pytest.raises(
        ValueError, match=f"^the chat template of {file} does not round-trip.*{what}.* becomes "
    ) as error:
        renderer.continuation([ASKED], after=completion_of(renderer.reply(REPLY)))
    assert "choose renderer.kind=qwen3 or chatml, or set renderer.keep_replies=True" in str(error.value)
    with pytest.raises(ValueError, match=what):
        make_renderer(
            RendererConfig(), tokenizer=tokenizer, stop_token_ids=(tokenizer.eos_token_id,), multi_turn=True
        )


@pytest.mark.parametrize("name", REFUSED)
def test_on_wish_replies_are_kept_and_the_template_says_what_follows_them(tmp_path, name):
    tokenizer = byte_tokenizer(tmp_path, name)
    renderer = renderer_of(tokenizer, keep_replies=True)
    reply = "<think>\nTwice.\n</think>\n\n 258 \n"
    ids = conversation(renderer, [ASKED], (reply, [ASKED_AGAIN]))
    opening = renderer.opening([ASKED]).tolist()
    produced = renderer.reply(reply).tolist()
    assert ids[: len(opening) + len(produced)] == opening + produced

    def rendered(*messages):
        told = [{"role": m.role, "content": m.content} for m in messages]
        return tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True, **options)

    options = {"enable_thinking": True} if "enable_thinking" in tokenizer.chat_template else {}
    plain = Message(role="assistant", content=REPLY)
    follows = rendered(ASKED, plain, ASKED_AGAIN).partition(REPLY)[2]
    assert tokenizer.decode(ids[len(opening) + len(produced) - 1 :]) == follows
    assert ASKED_AGAIN.content in follows


def test_a_reply_that_the_template_ends_with_no_stop_token_is_refused(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, "gptoss")
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    says = rf"it puts '<\|end\|>' after a reply, .* add {end} to eos_token_id of generation_config.json"
    with pytest.raises(ValueError, match=says):
        renderer_of(tokenizer).check_multi_turn()


@pytest.mark.parametrize("name", NO_TEXT)
def test_a_template_that_leaves_out_what_the_user_says_is_refused_for_one_turn_too(tmp_path, name):
    tokenizer = byte_tokenizer(tmp_path, name)
    with pytest.raises(ValueError, match="does not render a user's turn: its text is left out"):
        renderer_of(tokenizer)


# Thinking


@pytest.mark.parametrize("thinking", [True, False])
def test_enable_thinking_is_passed_to_a_template_that_reads_it(tmp_path, thinking):
    tokenizer = byte_tokenizer(tmp_path, "qwen3")
    ids = renderer_of(tokenizer, thinking=thinking, system="Be brief.").opening([ASKED])
    block = "" if thinking else "<think>\n\n</think>\n\n"
    assert tokenizer.decode(ids.tolist()) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 47 + 82?<|im_end|>\n"
        f"<|im_start|>assistant\n{block}"
    )


def test_thinking_cannot_be_off_where_the_template_does_not_read_it(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, "qwen2_5")
    says = rf"renderer.thinking=False: the chat template of {tmp_path}/chat_template.jinja does not read"
    with pytest.raises(ValueError, match=says):
        renderer_of(tokenizer, thinking=False)


def test_qwen3_without_thinking_does_not_round_trip_and_ours_goes_on(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, "qwen3")
    with pytest.raises(ValueError, match=r"writes earlier replies differently: .*<think>.* becomes"):
        renderer_of(tokenizer, thinking=False).check_multi_turn()
    kept = renderer_of(tokenizer, thinking=False, keep_replies=True)
    ours = renderer_of(tokenizer, kind="qwen3", thinking=False)
    turns = [(REPLY, [ASKED_AGAIN]), (REPLY, [TOOL, TOOL])]
    assert conversation(kept, [ASKED], *turns) == conversation(ours, [ASKED], *turns)


# Templates made up here

CHATML = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"


@pytest.mark.parametrize(
    ("turn", "begins", "opens", "says"),
    [
        (
            "<|im_start|>{{ loop.index }} {{ m.role }}\n{{ m.content }}<|im_end|>\n",
            "",
            "<|im_start|>{{ messages|length + 1 }} assistant\n",
            r"writes what follows a reply differently where another turn came before: .*3 user.* becomes .*5",
        ),
        (
            "{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
            "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
            "{{ m.content }}<|im_end|>\n{% endif %}",
            "",
            "<|im_start|>assistant\n",
            r"differently where a system message came before: .* becomes .*Relay asks",
        ),
        (
            "{{ m.role }}: {{ m.content }}\n",
            "",
            "assistant:",
            r"puts '\\nuser: What is said ' after a reply, which does not begin with a special token",
        ),
        (
            "{% if m.role != 'assistant' %}" + CHATML + "{% endif %}",
            "",
            "",
            "writes a reply 0 times",
        ),
        (
            "{% if m.role == 'assistant' %}{{ raise_exception('no replies') }}{% endif %}" + CHATML,
            "",
            "",
            "cannot render a conversation: no replies",
        ),
        (
            "<|im_start|>{{ m.role }}\n{{ m.content }}",
            "",
            "<|im_start|>assistant\n",
            r"puts '<\|im_start\|>' after a reply, which is none of the tokens that end one \(\[258\]\)",
        ),
    ],
    ids=["numbers turns", "moves the system message", "no special token", "no replies", "raises", "no end"],
)
def test_a_conversation_that_does_not_only_grow_is_refused(tmp_path, turn, begins, opens, says):
    renderer = renderer_of(written(tmp_path, turn, begins=begins, opens=opens), keep_replies=True)
    renderer.opening([ASKED])
    with pytest.raises(ValueError, match=says):
        renderer.check_multi_turn()


def test_an_end_token_that_swallows_the_space_before_it_is_refused(tmp_path):
    end = {"content": "<end>", "lstrip": True, "rstrip": False, "special": True, "__type": "AddedToken"}
    turn = "<|im_start|>{{ m.role }}\n{{ m.content }}<end>\n"
    tokenizer = written(tmp_path, turn, eos_token=end)
    with pytest.raises(ValueError, match=r"'reply <end>' is not tokenized as 'reply ' and '<end>' are"):
        renderer_of(tokenizer).check_multi_turn()


def test_an_end_token_that_swallows_the_line_end_after_it_is_no_obstacle(tmp_path):
    end = {"content": "<end>", "lstrip": False, "rstrip": True, "special": True, "__type": "AddedToken"}
    turn = "<|im_start|>{{ m.role }}\n{{ m.content }}<end>\n"
    tokenizer = written(tmp_path, turn, eos_token=end)
    ids = conversation(renderer_of(tokenizer), [ASKED], (REPLY, [ASKED_AGAIN]))
    end_id = tokenizer.eos_token_id
    assert ids.count(end_id) == 3
    assert all(ids[i + 1] == 257 for i, token in enumerate(ids) if token == end_id)


def test_what_the_checks_say_themselves_may_be_said_in_a_conversation(tmp_path):
    renderer = renderer_of(written(tmp_path, CHATML))
    told = renderer.continuation([REPLIED, ASKED, REPLIED], after=completion_of([258]))
    text = "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in (REPLIED, ASKED, REPLIED))
    assert renderer.tokenizer.decode(told.tolist()) == f"\n{text}<|im_start|>assistant\n"


def test_a_role_that_the_template_does_not_know_after_a_reply_is_named(tmp_path):
    turn = "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + CHATML
    renderer = renderer_of(written(tmp_path, turn))
    renderer.check_multi_turn()
    with pytest.raises(ValueError, match="does not render messages of roles user, assistant, tool: no tools"):
        renderer.continuation([TOOL], after=completion_of([258]))


def test_a_role_before_which_a_reply_ends_differently_is_named(tmp_path):
    turn = (
        "{% if m.role == 'tool' %}<|endoftext|>{{ m.content }}<|im_end|>{% else %}"
        "<|im_start|>{{ m.content }}{% if not loop.last and messages[loop.index0 + 1].role == 'user' %}"
        "<|im_end|>{% endif %}{% endif %}"
    )
    renderer = renderer_of(written(tmp_path, turn, opens="<|im_start|>"))
    renderer.check_multi_turn()
    says = r"puts '<\|endoftext\|>129<\|im' between a reply and messages of roles tool, but '<\|im_end\|>'"
    with pytest.raises(ValueError, match=says):
        renderer.continuation([TOOL], after=completion_of([258]))


def test_the_end_of_turn_is_the_templates_where_the_tokenizer_names_another(tmp_path):
    """As base models have it: their end token ends texts, their template's ends turns."""
    renderer = renderer_of(written(tmp_path, CHATML, eos_token="<|endoftext|>"))
    renderer.check_multi_turn()
    assert renderer.stop_token_ids == (256, 258)
    assert renderer.reply("a").tolist() == [97, 258]


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{{ messages + 1 }}", "{% if %}"])
@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_that_does_not_render_is_named_by_its_file(tmp_path, name, template):
    build_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    if name == "chat_template.jinja":
        (tmp_path / name).write_text(template)
    else:
        content = json.loads((tmp_path / name).read_text()) | {"chat_template": template}
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"the chat template of {tmp_path}/{name} does not render a user's"):
        renderer_of(load_tokenizer(tmp_path))


def test_a_system_message_that_the_template_refuses_is_told_at_once(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, "gemma")
    with pytest.raises(ValueError, match=r"does not render messages of roles system, user: System role not"):
        renderer_of(tokenizer, system="Be brief.")


def test_a_missing_template_is_told_and_other_kinds_need_none(tmp_path):
    build_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer = load_tokenizer(tmp_path)
    says = r"tokenizer_config\.json has no chat_template, and there is no chat_template.jinja beside it"
    with pytest.raises(ValueError, match=says):
        renderer_of(tokenizer)
    assert tokenizer.decode(renderer_of(tokenizer, kind="chatml").opening([ASKED]).tolist()).endswith(
        "<|im_start|>assistant\n"
    )
