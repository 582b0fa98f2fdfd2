"""A tokenizer folder that cannot be used is refused by name."""

import json

import pytest

from rl.models.tokenizer import build_byte_tokenizer, open_tokenizer


@pytest.fixture
def folder(tmp_path):
    build_byte_tokenizer(tmp_path)
    return tmp_path


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_valid_folder_gives_the_tokens_that_end_a_reply(folder):
    tokenizer, stop_ids = open_tokenizer(folder)
    assert tokenizer.encode("A") == [65]
    assert stop_ids == (256, 258)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("tokenizer_config.json", {"padding_side": "up"}, "Padding side should be selected"),
        ("tokenizer_config.json", {"model_max_length": "long"}, "not supported"),  # raised while encoding
        ("tokenizer_config.json", {"eos_token": None}, "no eos_token"),
        ("generation_config.json", {"eos_token_id": [256, -1]}, "is not a list of token ids"),
    ],
)
def test_invalid_value_names_the_folder(folder, name, values, message):
    change(folder / name, **values)
    with pytest.raises(ValueError, match=f"the tokenizer of {folder} cannot be used: .*{message}"):
        open_tokenizer(folder)
    (folder / name).write_text('{"eos_token": ')
    with pytest.raises(ValueError, match=str(folder)):
        open_tokenizer(folder)


@pytest.mark.parametrize(("vocab_size", "end_id"), [(261, 258), (320, 320)])
def test_token_ids_beyond_the_vocabulary_are_refused(folder, vocab_size, end_id):
    change(folder / "generation_config.json", eos_token_id=end_id)
    open_tokenizer(folder, vocab_size=vocab_size + 1)
    with pytest.raises(
        ValueError, match=f"vocab_size={vocab_size}, so ids must be from 0 to {vocab_size - 1}"
    ):
        open_tokenizer(folder, vocab_size=vocab_size)
