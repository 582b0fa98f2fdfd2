"""Two tokenizers have one print where they do the same, and it says where they do not."""

import json
import shutil

import pytest

from rl.models.tokenizer import build_byte_tokenizer
from rl.models.tokenizer_print import read_tokenizer_print, tokenizer_print


@pytest.fixture
def folder(tmp_path):
    build_byte_tokenizer(tmp_path / "made")
    return tmp_path / "made"


def edit(file, **values):
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | values, indent=4))


def differences(folder, other, *, tokens_alone=False):
    return tokenizer_print(folder).differences(tokenizer_print(other), tokens_alone=tokens_alone)


def test_a_copy_has_the_same_print_and_its_own_folder(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert differences(folder, copy) == []
    assert tokenizer_print(copy).folder == str(copy)
    assert tokenizer_print(copy, known_as=tmp_path / "run").folder == str(tmp_path / "run")


def test_what_a_library_writes_differently_is_the_same(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    for where, merges in ((folder, ["a b", "ab c"]), (copy, [["a", "b"], ["ab", "c"]])):
        model = json.loads((where / "tokenizer.json").read_text())["model"]
        edit(where / "tokenizer.json", model=model | {"merges": merges})
    edit(copy / "tokenizer.json", truncation={"max_length": 8}, padding={"pad_id": 0})
    template = (copy / "chat_template.jinja").read_text()
    (copy / "chat_template.jinja").unlink()
    edit(copy / "tokenizer_config.json", chat_template=template, name_or_path="elsewhere")
    edit(copy / "generation_config.json", eos_token_id=[256, 258], temperature=0.6)
    (copy / "vocab.json").write_text("{}")  # of the slow tokenizer, which is not the one that is used
    assert differences(folder, copy) == []


@pytest.mark.parametrize(
    ("file", "change", "part"),
    [
        ("tokenizer.json", {"added_tokens": []}, "tokenizer.json"),
        ("tokenizer_config.json", {"eos_token": "<|endoftext|>"}, "tokenizer_config.json"),
        ("generation_config.json", {"eos_token_id": 256}, "eos_token_id of generation_config.json"),
    ],
)
def test_each_part_that_is_another_is_named(folder, tmp_path, file, change, part):
    copy = shutil.copytree(folder, tmp_path / "copy")
    edit(copy / file, **change)
    assert differences(folder, copy) == [part]
    assert differences(folder, copy, tokens_alone=True) == ([part] if part == "tokenizer.json" else [])


def test_a_template_that_is_another_or_gone_is_named(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    assert differences(folder, copy) == ["chat template"]
    (copy / "chat_template.jinja").unlink()
    assert differences(folder, copy) == ["chat template"]
    assert differences(folder, copy, tokens_alone=True) == []


def test_one_merge_more_is_another_tokenizer_also_of_a_slow_one(folder, tmp_path):
    slow = shutil.copytree(folder, tmp_path / "slow")
    (slow / "tokenizer.json").unlink()
    (slow / "vocab.json").write_text('{"a": 0}')
    (slow / "merges.txt").write_text("a b\n")
    other = shutil.copytree(slow, tmp_path / "other")
    (other / "merges.txt").write_text("a b\nab c\n")
    assert differences(slow, other, tokens_alone=True) == ["merges.txt"]
    assert differences(folder, slow, tokens_alone=True) == ["merges.txt", "tokenizer.json", "vocab.json"]


def test_it_comes_back_from_json(folder):
    noted = tokenizer_print(folder)
    text = json.dumps({"folder": noted.folder, "parts": noted.parts})
    assert read_tokenizer_print(json.loads(text)) == noted
    assert read_tokenizer_print(None) is None


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_malformed_file_is_named(folder, content):
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"made/tokenizer_config\.json is malformed: "):
        tokenizer_print(folder)
