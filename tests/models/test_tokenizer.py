import json
import random

import pytest

from rl.models.tokenizer import (
    IM_END,
    SPECIAL_TOKENS,
    WORD_TOKENS,
    build_byte_tokenizer,
    load_tokenizer,
    stop_token_ids,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    build_byte_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def random_text(rng: random.Random) -> str:
    """Any code points but surrogates, plain ones more often, with tokens of several characters between."""
    pieces = []
    for _ in range(rng.randrange(40)):
        kind = rng.random()
        if kind < 0.5:
            pieces.append(chr(rng.randrange(128)))
        elif kind < 0.65:
            pieces.append(rng.choice("  \t\n\r'\u2019é\u0301\u00a0\u200d\ufeff"))
        elif kind < 0.8:
            pieces.append(rng.choice(SPECIAL_TOKENS + WORD_TOKENS))
        else:
            code = rng.randrange(0x110000 - 0x800)
            pieces.append(chr(code if code < 0xD800 else code + 0x800))
    return "".join(pieces)


def test_any_text_comes_back_from_its_tokens(tokenizer):
    rng = random.Random(0)
    for _ in range(500):
        text = random_text(rng)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text


def test_a_token_id_below_256_is_the_byte(tokenizer):
    text = "".join(map(chr, range(0x250))) + "漢😀"
    assert bytes(tokenizer.encode(text)) == text.encode()
    # Bytes that no valid text contains have a token too, and decode to the replacement character.
    assert tokenizer.decode([0xFF]) == "\ufffd"
    assert len({tokenizer.convert_ids_to_tokens(i) for i in range(256)}) == 256


def test_chatml_and_word_tokens_are_single_tokens_and_fit_the_tiny_vocabulary(tokenizer):
    ids = [tokenizer.encode(token) for token in SPECIAL_TOKENS + WORD_TOKENS]
    assert ids == [[256], [257], [258], [259], [260], [261]]
    assert len(tokenizer) == 262 <= 320
    assert tokenizer.eos_token_id == 258
    assert tokenizer.pad_token_id == 256


def test_special_tokens_are_skipped_and_word_tokens_kept(tokenizer):
    ids = tokenizer.encode("<|im_start|><think>a</think>[ANSWER] 7<|im_end|><|endoftext|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a</think>[ANSWER] 7"


def test_ids_of_the_padded_vocabulary_decode_to_nothing(tokenizer):
    assert tokenizer.decode([65, *range(262, 320), 66]) == "AB"


def test_chat_template_writes_chatml(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": "<think>easy</think>3"},
        {"role": "user", "content": "And 4+5?"},
    ]
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n1+2?<|im_end|>\n"
        "<|im_start|>assistant\n<think>easy</think>3<|im_end|>\n"
        "<|im_start|>user\nAnd 4+5?<|im_end|>\n"
    )
    render = tokenizer.apply_chat_template
    assert render(messages, tokenize=False) == text
    assert render(messages, tokenize=False, add_generation_prompt=True) == text + "<|im_start|>assistant\n"
    assert (
        render(messages[1:2], tokenize=False, add_generation_prompt=True, enable_thinking=False)
        == "<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_a_conversation_is_a_prefix_of_its_continuation(tokenizer):
    first = [{"role": "user", "content": "1+2?"}]
    second = [*first, {"role": "assistant", "content": "3"}, {"role": "user", "content": "and?"}]
    prompt = tokenizer.apply_chat_template(first, add_generation_prompt=True)["input_ids"]
    continued = tokenizer.apply_chat_template(second)["input_ids"]
    reply = tokenizer.encode("3" + IM_END)
    assert continued[: len(prompt) + len(reply)] == prompt + reply


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_missing_file_is_named(tmp_path, name):
    build_byte_tokenizer(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "content", ["{}", "not json", '{"model": {"type": "BPE", "vocab": 3, "merges": []}}']
)
def test_a_malformed_tokenizer_json_is_named_with_its_folder(tmp_path, content):
    build_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=rf"{tmp_path}: tokenizer.json is malformed: \w+"):
        load_tokenizer(tmp_path)


def test_a_part_that_transformers_needs_is_named_with_its_folder(tmp_path):
    build_byte_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    del content["added_tokens"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"{tmp_path}: its files lack 'added_tokens'"):
        load_tokenizer(tmp_path)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_reply_ends_at_the_end_of_turn_and_at_what_generation_config_names(tmp_path):
    build_byte_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text('{"eos_token_id": [256, 258]}')
    assert stop_token_ids(tmp_path, tokenizer=tokenizer) == (256, 258)
    path.write_text('{"eos_token_id": 256}')
    assert stop_token_ids(tmp_path, tokenizer=tokenizer) == (256, 258)
    path.unlink()
    assert stop_token_ids(tmp_path, tokenizer=tokenizer) == (258,)
