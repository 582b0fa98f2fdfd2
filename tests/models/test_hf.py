import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl.models.files.hf import HFFolder, read_parameters, write_hf_folder, write_random_model
from rl.models.files.tokenizer import load_tokenizer
from rl.models.qwen3 import Qwen3Adapter
from tests.support.policies import random_model, small_spec


@pytest.fixture
def model():
    return random_model(small_spec(tie=False), seed=0)


@pytest.fixture
def adapter(model):
    return Qwen3Adapter(model.config)


@pytest.fixture
def folder(tmp_path, model, adapter):
    """Return a Hugging Face folder in several shards."""
    path = tmp_path / "written" / "hf"
    write_hf_folder(
        path, model.named_parameters(), adapter, dtype=torch.float32, max_shard_bytes=20_000
    )
    return path


@pytest.mark.parametrize(
    ("dtype", "max_shard_bytes"), [(torch.float32, 10**9), (torch.bfloat16, 20_000)]
)
def test_written_parameters_are_read_back_bit_exact(
    tmp_path, model, adapter, dtype, max_shard_bytes
):
    write_hf_folder(
        tmp_path / "hf",
        model.named_parameters(),
        adapter,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
    )
    opened = HFFolder(tmp_path / "hf")
    opened.check(model, adapter)
    names = [name for name, _ in model.named_parameters()][::-1]
    read = list(read_parameters(opened, adapter, names))
    assert [name for name, _ in read] == names
    for name, tensor in read:
        assert torch.equal(tensor, model.get_parameter(name).to(dtype))
    assert opened.config["dtype"] == str(dtype).removeprefix("torch.")


def test_tokenizer_files_and_token_ids_are_copied(tmp_path, model, adapter):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "unrelated.txt"):
        (source / name).write_text(name)
    (source / "generation_config.json").write_text('{"eos_token_id": [1, 2], "pad_token_id": 3}')
    (source / "config.json").write_text('{"eos_token_id": 1, "hidden_size": 7}')
    write_hf_folder(
        tmp_path / "hf",
        model.named_parameters(),
        adapter,
        dtype=torch.float32,
        tokenizer_from=source,
    )
    opened = HFFolder(tmp_path / "hf", tokenizer=True)
    assert (tmp_path / "hf" / "chat_template.jinja").read_text() == "chat_template.jinja"
    assert not (tmp_path / "hf" / "unrelated.txt").exists()
    assert opened.config["eos_token_id"] == 1
    assert opened.config["pad_token_id"] == 3
    assert opened.config["hidden_size"] == 32


def truncated(num_bytes):
    return lambda file: os.truncate(file, num_bytes)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("model-00002-of-*", Path.unlink, "{name} is missing, which .*index.json lists"),
        ("model-00002-of-*", truncated(0), "{name} is truncated"),
        ("model-00002-of-*", truncated(100), "{name} is truncated"),
        ("model-00002-of-*", lambda f: os.truncate(f, f.stat().st_size - 1), "{name} is truncated"),
        (
            "model-00002-of-*",
            lambda f: f.write_bytes(b"\x08" + bytes(7) + b"not json"),
            "{name} is .*not a safet",
        ),
        (
            "model-00002-of-*",
            lambda f: save_file({"w": torch.zeros(2)}, f),
            r"tensor \S+ is missing from .*{name}",
        ),
        ("*.index.json", lambda f: f.write_text("[]"), "{name} holds list"),
        (
            "*.index.json",
            lambda f: f.write_text('{"weight_map": {"a": 1}}'),
            "{name} has no weight_map",
        ),
        ("*.index.json", Path.unlink, "model.safetensors is missing, and so is"),
        ("config.json", Path.unlink, "config.json is missing"),
        ("tokenizer_config.json", Path.unlink, "tokenizer_config.json is missing"),
        ("tokenizer.json", Path.unlink, "tokenizer.json is missing"),
        ("", shutil.rmtree, "folder .* does not exist"),
    ],
)
def test_damaged_file_is_named(folder, name, damage, message):
    for file in ("tokenizer_config.json", "tokenizer.json"):
        (folder / file).write_text("{}")
    HFFolder(folder, tokenizer=True)
    (file,) = folder.glob(name) if name else [folder]
    damage(file)
    with pytest.raises(ValueError, match=message.replace("{name}", file.name)):
        HFFolder(folder, tokenizer=True)


K_PROJ = "model.layers.1.self_attn.k_proj.weight"
Q_BIAS = "model.layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("lm_head.weight"), "tensor lm_head.weight is missing"),
        (
            lambda t: t.update({K_PROJ: torch.zeros(8, 32)}),
            rf"{K_PROJ} has shape \[8, 32\], .* \[16, 32\]",
        ),
        (lambda t: t.update({Q_BIAS: torch.zeros(32)}), f"{Q_BIAS} has no place in the model"),
    ],
)
def test_weights_of_another_architecture_are_rejected(tmp_path, model, adapter, change, message):
    path = tmp_path / "hf"
    write_hf_folder(path, model.named_parameters(), adapter, dtype=torch.float32)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        HFFolder(path).check(model, adapter)


def test_output_head_of_a_tied_model_must_equal_its_embedding(tmp_path):
    model = random_model(small_spec(tie=True), seed=0)
    adapter, path = Qwen3Adapter(model.config), tmp_path / "hf"
    write_hf_folder(path, model.named_parameters(), adapter, dtype=torch.bfloat16)
    tensors = load_file(path / "model.safetensors")
    head = tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors")
    HFFolder(path).check(model, adapter)
    head[-1, -1] += 1
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"lm_head.weight differs from .*: set tie_word_embeddings to false"
    ):
        HFFolder(path).check(model, adapter)


@pytest.fixture
def spec():
    return small_spec(vocab_size=320)


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_folder_holds_the_seeded_model_and_its_tokenizer(tmp_path, spec):
    folder = HFFolder(write_random_model(tmp_path / "a", spec=spec, seed=3), tokenizer=True)
    assert spec.adapter.config_from_hf(folder.config) == spec.model
    expected = spec.model.build()
    expected.init_weights(seed=3)
    names = [name for name, _ in expected.named_parameters()]
    for name, tensor in read_parameters(folder, spec.adapter(spec.model), names):
        assert torch.equal(tensor, expected.get_parameter(name))
    # With the model's config beside it, transformers could pick a tokenizer class that rewrites
    # text.
    text = "e\u0301 [ANSWER] 12 <|im_end|>"
    tokenizer = load_tokenizer(folder.path)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_id in folder.config["eos_token_id"]


def test_concurrent_writers_leave_one_complete_folder(tmp_path, spec):
    with ThreadPoolExecutor(4) as pool:
        done = list(
            pool.map(lambda _: write_random_model(tmp_path / "a", spec=spec, seed=0), range(8))
        )
    assert set(done) == {tmp_path / "a"}
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]
    assert contents(tmp_path / "a") == contents(
        write_random_model(tmp_path / "b", spec=spec, seed=0)
    )
