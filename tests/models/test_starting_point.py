import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rl.models.hf import HFFolder, read_parameters
from rl.models.qwen3 import model_registry
from rl.models.starting_point import write_random_model
from rl.models.tokenizer import load_tokenizer


@pytest.fixture
def spec(make_config):
    return dataclasses.replace(model_registry("tiny"), model=make_config(vocab_size=320))


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_folder_holds_the_seeded_model_and_its_tokenizer(tmp_path, spec):
    folder = HFFolder(write_random_model(tmp_path / "a", spec=spec, seed=3), tokenizer=True)
    assert spec.from_hf_config(folder.config) == spec.model
    expected = spec.model.build()
    expected.init_weights(seed=3)
    names = [name for name, _ in expected.named_parameters()]
    for name, tensor in read_parameters(folder, spec.adapter(spec.model), names):
        assert torch.equal(tensor, expected.get_parameter(name))
    # With the model's config beside it, transformers could pick a tokenizer class that rewrites text.
    text = "e\u0301 [ANSWER] 12 <|im_end|>"
    tokenizer = load_tokenizer(folder.path)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_id in folder.config["eos_token_id"]


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path, spec):
    a, b, other = (
        contents(write_random_model(tmp_path / name, spec=spec, seed=seed))
        for name, seed in (("a", 0), ("b", 0), ("other", 1))
    )
    assert a == b
    assert [name for name in a if a[name] != other[name]] == ["model.safetensors"]


def test_a_folder_that_is_there_is_kept(tmp_path, spec):
    folder = write_random_model(tmp_path / "a", spec=spec, seed=0)
    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    write_random_model(folder, spec=spec, seed=0)
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_many_at_once_leave_one_whole_folder(tmp_path, spec):
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: write_random_model(tmp_path / "a", spec=spec, seed=0), range(8)))
    assert set(done) == {tmp_path / "a"}
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]
    assert contents(tmp_path / "a") == contents(write_random_model(tmp_path / "b", spec=spec, seed=0))


def test_a_folder_of_another_model_is_refused(tmp_path, spec, make_config):
    write_random_model(tmp_path / "a", spec=spec, seed=0)
    wider = dataclasses.replace(spec, model=make_config(vocab_size=324))
    with pytest.raises(
        ValueError, match=r"embed_tokens.weight has shape \[320, 32\], the model needs \[324, 32\]"
    ):
        write_random_model(tmp_path / "a", spec=wider, seed=0)
