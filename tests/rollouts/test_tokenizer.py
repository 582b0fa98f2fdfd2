import json

import pytest

from rl.models.tokenizer import build_byte_tokenizer
from rl.rollouts.tokenizer import open_tokenizer, template_file


@pytest.fixture
def folder(tmp_path):
    build_byte_tokenizer(tmp_path)
    return tmp_path


def change(file, **values):
    """Set keys of a JSON file; None removes one."""
    content = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_a_sound_folder_opens_with_the_tokens_that_end_a_reply(folder):
    tokenizer, stop_ids = open_tokenizer(folder)
    assert tokenizer.encode("A") == [65]
    assert stop_ids == (256, 258)


@pytest.mark.parametrize(
    "name",
    ["tokenizer_config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json"],
)
@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"eos_token": ', r"is not valid JSON: Expecting value: line 1 column 15"),
        ("", "is not valid JSON"),
        ("[]", "holds list, not an object"),
    ],
)
def test_a_file_that_is_no_json_object_is_named(folder, name, content, says):
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=f"{folder}/{name} {says}"):
        open_tokenizer(folder)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("eos_token", 5, "eos_token has to be either str or AddedToken"),
        ("tokenizer_class", 3, "'int' object"),
        ("added_tokens_decoder", {"a": {"content": "x"}}, "invalid literal for int.*'a'"),
        ("padding_side", "up", "Padding side should be selected .*: up"),
        ("model_max_length", "long", "not supported between instances"),  # looked at only when encoding
    ],
)
def test_a_value_that_transformers_refuses_is_told_with_its_file(folder, field, value, says):
    change(folder / "tokenizer_config.json", **{field: value})
    with pytest.raises(ValueError, match=rf"{folder}/tokenizer_config.json has a value .*refuses: .*{says}"):
        open_tokenizer(folder)


def test_a_value_of_an_older_file_is_told_with_both_that_it_may_be_in(folder):
    (folder / "special_tokens_map.json").write_text('{"eos_token": 3}')
    with pytest.raises(ValueError, match=r"tokenizer_config\.json or special_tokens_map\.json has a value"):
        open_tokenizer(folder)


def test_a_malformed_tokenizer_json_is_named_once(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=f"^tokenizer folder {folder}: tokenizer.json is malformed"):
        open_tokenizer(folder)


def test_a_tokenizer_without_an_end_of_turn_is_refused(folder):
    change(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ValueError, match=f"{folder}/tokenizer_config.json names no eos_token"):
        open_tokenizer(folder)


@pytest.mark.parametrize("ids", ["256", [256, "258"], 25.6, True])
def test_end_ids_that_are_no_token_ids_are_named(folder, ids):
    change(folder / "generation_config.json", eos_token_id=ids)
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id=.* is not a token id"):
        open_tokenizer(folder)


@pytest.mark.parametrize(
    ("vocab_size", "end_id", "says"),
    [
        (262, 258, None),
        (
            261,
            258,
            r": token '\[ANSWER\]' has id 261; the model has vocab_size=261, so ids must be from 0 to 260",
        ),
        (320, 320, r"/generation_config.json: eos_token_id has 320; the model has vocab_size=320"),
        (320, 99999, r"/generation_config.json: eos_token_id has 99999"),
        (320, -1, r"/generation_config.json: eos_token_id has -1"),
    ],
)
def test_token_ids_that_the_model_has_no_row_for_are_refused(folder, vocab_size, end_id, says):
    change(folder / "generation_config.json", eos_token_id=end_id)
    open_tokenizer(folder)
    if says is None:
        open_tokenizer(folder, vocab_size=vocab_size)
    else:
        with pytest.raises(ValueError, match=f"{folder}{says}"):
            open_tokenizer(folder, vocab_size=vocab_size)


def test_a_chat_template_that_is_no_utf8_is_named(folder):
    (folder / "chat_template.jinja").write_bytes("Fran\u00e7ais".encode("latin-1"))
    with pytest.raises(ValueError, match=f"{folder}/chat_template.jinja is not text in UTF-8: .* byte 0xe7"):
        open_tokenizer(folder)


def test_the_file_of_a_chat_template_is_the_one_that_it_is_read_from(folder):
    assert template_file(folder).name == "chat_template.jinja"
    (folder / "chat_template.jinja").unlink()
    assert template_file(folder).name == "tokenizer_config.json"
