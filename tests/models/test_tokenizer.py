import json
import random
import shutil

import pytest
from tokenizers import Tokenizer

from rl.models.files.tokenizer import (
    SPECIAL_TOKENS,
    WORD_TOKENS,
    build_byte_tokenizer,
    compute_fingerprint,
    load_tokenizer,
    open_tokenizer,
)


@pytest.fixture
def folder(tmp_path):
    build_byte_tokenizer(tmp_path / "made")
    return tmp_path / "made"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    build_byte_tokenizer(path)
    return load_tokenizer(path)


@pytest.mark.parametrize("named", ["GPT2Tokenizer", "LlamaTokenizer", "Qwen2Tokenizer"])
def test_texts_are_split_by_the_rules_of_tokenizer_json_whatever_class_is_named(folder, named):
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": named}))
    made = json.loads((folder / "tokenizer.json").read_text())
    made["model"]["vocab"] |= {"ĊĊ": 262, "Ġ1": 263}
    made["model"]["merges"] = [["Ċ", "Ċ"], ["Ġ", "1"]]
    (folder / "tokenizer.json").write_text(json.dumps(made))
    text = "a:\n\n1.  12"
    assert (
        load_tokenizer(folder).encode(text)
        == Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    )


def random_text(rng: random.Random) -> str:
    """Return any code points but surrogates, with many ASCII characters and special tokens."""
    pieces = []
    for _ in range(rng.randrange(40)):
        code = rng.randrange(0x110000 - 0x800)
        any_character = chr(code if code < 0xD800 else code + 0x800)
        word = rng.choice(
            ("  \t\n\r'\u2019é\u0301\u00a0\u200d\ufeff", *SPECIAL_TOKENS, *WORD_TOKENS)
        )
        pieces.append(rng.choice((chr(rng.randrange(128)), word, any_character)))
    return "".join(pieces)


def test_any_text_survives_the_round_trip(tokenizer):
    rng = random.Random(0)
    for _ in range(500):
        text = random_text(rng)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chatml_and_word_tokens_are_single_tokens_and_fit_the_tiny_vocabulary(tokenizer):
    ids = [tokenizer.encode(token) for token in SPECIAL_TOKENS + WORD_TOKENS]
    assert ids == [[256], [257], [258], [259], [260], [261]]
    assert len(tokenizer) == 262 <= 320
    assert tokenizer.eos_token_id == 258
    assert tokenizer.pad_token_id == 256


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
    assert (
        render(messages, tokenize=False, add_generation_prompt=True)
        == text + "<|im_start|>assistant\n"
    )
    assert (
        render(messages[1:2], tokenize=False, add_generation_prompt=True, enable_thinking=False)
        == "<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_stop_tokens_are_the_end_of_turn_and_those_of_generation_config(folder):
    file = folder / "generation_config.json"
    for content in ('{"eos_token_id": [256, 258]}', '{"eos_token_id": 256}'):
        file.write_text(content)
        assert open_tokenizer(folder)[1] == (256, 258)
    file.unlink()
    assert open_tokenizer(folder)[1] == (258,)


@pytest.mark.parametrize(
    ("config", "ends"),
    [
        ({"eos_token_id": 256}, (256, 258)),
        ({"eos_token_id": [256, 257]}, (256, 257, 258)),
        ({"text_config": {"eos_token_id": 256}}, (256, 258)),
        ({"eos_token_id": None}, (258,)),
        # The defaults of a class, such as 2 of LlamaConfig, are ordinary text to this tokenizer.
        ({"eos_token_id": 2}, (258,)),
    ],
)
def test_end_token_of_config_json_ends_replies(folder, config, ends):
    for name in ("generation_config.json", "config.json"):
        (folder / name).write_text("{}")
    (folder / "config.json").write_text(json.dumps(config))
    assert open_tokenizer(folder)[1] == ends
    (folder / "generation_config.json").write_text('{"eos_token_id": 257}')
    assert open_tokenizer(folder)[1] == tuple(sorted({*ends, 257}))


def change(file, **values):
    """Set keys of a JSON file, or remove them by None."""
    content = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


BAD_MODEL = {"type": "BPE", "vocab": 3, "merges": []}


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer_config.json", None, "tokenizer_config.json is missing"),
        ("tokenizer.json", "not json", "tokenizer.json is malformed"),
        ("tokenizer.json", {"model": BAD_MODEL}, "tokenizer.json is malformed"),
        ("tokenizer.json", {"added_tokens": None}, "its files lack 'added_tokens'"),
        ("", None, "does not exist"),
        ("tokenizer_config.json", {"padding_side": "up"}, "Padding side should be selected"),
        # raised only while encoding
        ("tokenizer_config.json", {"model_max_length": "long"}, "not supported"),
        ("tokenizer_config.json", {"eos_token": None}, "no eos_token"),
        ("tokenizer_config.json", '{"eos_token": ', ""),
        ("generation_config.json", {"eos_token_id": [256, -1]}, "is not a list of token ids"),
        ("generation_config.json", '{"eos_token_id": ', ""),
    ],
)
def test_damaged_folder_is_named(folder, name, damage, message):
    if isinstance(damage, dict):
        change(folder / name, **damage)
    elif damage is not None:
        (folder / name).write_text(damage)
    elif name:
        (folder / name).unlink()
    else:
        shutil.rmtree(folder)
    with pytest.raises(ValueError, match=rf"{folder}.*{message}"):
        open_tokenizer(folder)


def test_changed_file_is_named_and_a_copy_has_the_same_fingerprint(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    noted, present = (
        compute_fingerprint(folder),
        compute_fingerprint(copy, known_as=tmp_path / "run"),
    )
    assert present.folder == str(tmp_path / "run")
    assert noted.find_differences(present, tokens_alone=False) == []
    (copy / "chat_template.jinja").unlink()
    (copy / "generation_config.json").write_text("{}")
    changed = compute_fingerprint(copy)
    assert noted.find_differences(changed, tokens_alone=False) == [
        "chat_template.jinja",
        "generation_config.json",
    ]
    assert noted.find_differences(changed, tokens_alone=True) == []
    (copy / "merges.txt").write_text("a b\n")
    assert noted.find_differences(compute_fingerprint(copy), tokens_alone=True) == ["merges.txt"]


@pytest.mark.parametrize(("vocab_size", "end_id"), [(261, 258), (320, 320)])
def test_token_ids_beyond_the_vocabulary_are_refused(folder, vocab_size, end_id):
    change(folder / "generation_config.json", eos_token_id=end_id)
    open_tokenizer(folder, vocab_size=vocab_size + 1)
    with pytest.raises(
        ValueError, match=f"vocab_size={vocab_size}, so .* from 0 to {vocab_size - 1}"
    ):
        open_tokenizer(folder, vocab_size=vocab_size)


def test_special_token_beyond_the_vocabulary_is_refused_only_where_it_is_used(folder):
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    image = tokens[0] | {"id": 262, "content": "<image>"}  # as Gemma 3's text models have
    change(folder / "tokenizer.json", added_tokens=[*tokens, image])
    open_tokenizer(folder, vocab_size=262)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}<image>")
    with pytest.raises(ValueError, match=r"'<image>' with id 262 .* vocab_size=262"):
        open_tokenizer(folder, vocab_size=262)
