"""Texts of tokens, with real tokenizers."""

import pytest
from tokenizers import Tokenizer, decoders, models

from rl.models.tokenizer import build_byte_tokenizer
from rl.reporting.html.rollouts import TokenTexts, open_token_texts

NONE_GIVEN = {"hf_assets_path": None}


@pytest.fixture
def bytes_texts(tmp_path):
    texts, problem = open_token_texts(tmp_path, NONE_GIVEN)
    assert problem is None
    return texts


@pytest.mark.parametrize("text", ["4+7=11 [ANSWER] 11", "schön: 10 €, 🙂!", "\x00\n\t"])
def test_pieces_add_up_to_the_text(text, bytes_texts, tmp_path):
    build_byte_tokenizer(tmp_path)
    ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    pieces = bytes_texts.pieces(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text


def test_character_of_several_tokens_belongs_to_the_last(bytes_texts):
    assert bytes_texts.pieces([*"a€b".encode()]) == ["a", "", "", "€", "b"]


@pytest.mark.parametrize(
    ("ids", "pieces"),
    [
        ([0xE2, 0x82], ["\ufffd", "\ufffd"]),
        ([0xE2, ord("a")], ["\ufffd", "a"]),
        ([0xFF, 0xFF, 0xFF, 0xFF, 0xFF, ord("a")], ["\ufffd"] * 5 + ["a"]),
    ],
    ids=["cut at the end", "broken off", "no character at all"],
)
def test_bytes_without_a_character_are_decoded_separately(ids, pieces, bytes_texts):
    assert bytes_texts.pieces(ids) == pieces


def test_special_tokens_are_shown(bytes_texts):
    assert bytes_texts.pieces([ord("a"), 258]) == ["a", "<|im_end|>"]


def test_space_that_the_decoder_drops_is_kept():
    vocabulary = {"▁add": 0, "▁it": 1, "s": 2, "<unk>": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    assert TokenTexts(tokenizer).pieces([0, 1, 2]) == [" add", " it", "s"]


def test_tokenizer_of_the_exported_model_is_preferred(tmp_path):
    exported = tmp_path / "checkpoints" / "hf"
    build_byte_tokenizer(exported)
    content = (exported / "tokenizer.json").read_text().replace("[ANSWER]", "[EXPORT]")
    (exported / "tokenizer.json").write_text(content)
    build_byte_tokenizer(tmp_path / "given")
    texts, _ = open_token_texts(tmp_path, {"hf_assets_path": str(tmp_path / "given")})
    assert texts.pieces([261]) == ["[EXPORT]"]


def test_without_a_tokenizer_tokens_are_numbers(tmp_path):
    texts, problem = open_token_texts(tmp_path, {"hf_assets_path": str(tmp_path / "gone")})
    assert texts.pieces([7, 12]) == ["<7>", "<12>"]
    assert not texts.known
    assert problem is not None
    assert str(tmp_path / "gone") in problem
