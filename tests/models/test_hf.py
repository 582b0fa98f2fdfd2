import json
import multiprocessing
import os
import shutil
import signal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rl.models.hf import HFFolder, read_parameters, write_hf_folder
from rl.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

SHARD = "model-00002-of-*.safetensors"


@pytest.fixture
def model(make_model):
    return make_model(tie=False)


@pytest.fixture
def adapter(model):
    return Qwen3StateDictAdapter(model.config)


@pytest.fixture
def folder(tmp_path, model, adapter):
    """Written in shards."""
    path = tmp_path / "written" / "hf"
    write_hf_folder(path, model.named_parameters(), adapter, dtype=torch.float32, max_shard_bytes=20_000)
    return path


def shard_of(folder):
    (shard,) = folder.glob(SHARD)
    return shard


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_written_parameters_are_read_back_bit_exact(tmp_path, model, adapter, dtype, max_shard_bytes):
    write_hf_folder(
        tmp_path / "hf", model.named_parameters(), adapter, dtype=dtype, max_shard_bytes=max_shard_bytes
    )
    opened = HFFolder(tmp_path / "hf")
    opened.check(model, adapter)
    names = [name for name, _ in model.named_parameters()][::-1]
    read = list(read_parameters(opened, adapter, names))
    assert [name for name, _ in read] == names
    for name, tensor in read:
        assert torch.equal(tensor, model.get_parameter(name).to(dtype))
    assert opened.config["dtype"] == str(dtype).removeprefix("torch.")


def test_shards_stay_below_the_limit_and_the_index_lists_every_tensor(folder, model):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert [f.name for f in files] == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    names: dict[str, str] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            sizes = [opened.get_tensor(name).nbytes for name in opened.keys()]  # noqa: SIM118
            assert sum(sizes) <= 20_000
            names |= dict.fromkeys(opened.keys(), file.name)
    assert index["weight_map"] == names
    assert index["metadata"]["total_size"] == 4 * sum(p.numel() for p in model.parameters())


def test_tokenizer_files_and_token_ids_come_along(tmp_path, model, adapter):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "unrelated.txt"):
        (source / name).write_text(name)
    (source / "generation_config.json").write_text('{"eos_token_id": [1, 2], "pad_token_id": 3}')
    (source / "config.json").write_text('{"eos_token_id": 1, "hidden_size": 7}')
    write_hf_folder(
        tmp_path / "hf", model.named_parameters(), adapter, dtype=torch.float32, tokenizer_from=source
    )
    opened = HFFolder(tmp_path / "hf", tokenizer=True)
    assert (tmp_path / "hf" / "chat_template.jinja").read_text() == "chat_template.jinja"
    assert not (tmp_path / "hf" / "unrelated.txt").exists()
    assert opened.config["eos_token_id"] == 1
    assert opened.config["pad_token_id"] == 3
    assert opened.config["hidden_size"] == 32


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_write_that_fails_or_is_interrupted_leaves_nothing_behind(tmp_path, model, adapter, error):
    def breaks_midway():
        yield from list(model.named_parameters())[:5]
        raise error("a rank is gone")

    with pytest.raises(error, match="a rank is gone"):
        write_hf_folder(
            tmp_path / "out" / "hf", breaks_midway(), adapter, dtype=torch.float32, max_shard_bytes=5_000
        )
    assert list((tmp_path / "out").iterdir()) == []


def killed_while_writing(path, model, adapter):
    """Another process starts to write `path` and is killed at its sixth parameter."""

    def dies_midway():
        yield from list(model.named_parameters())[:5]
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(
        target=write_hf_folder, args=(path, dies_midway(), adapter), kwargs={"dtype": torch.float32}
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_what_a_killed_process_left_is_removed_by_the_next_that_writes_there(tmp_path, model, adapter):
    killed_while_writing(tmp_path / "a", model, adapter)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".a.")
    (tmp_path / ".somebody.elses").mkdir()
    write_hf_folder(tmp_path / "b", model.named_parameters(), adapter, dtype=torch.float32)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".somebody.elses", "b"]


def test_what_a_living_process_writes_is_left_alone(tmp_path, model, adapter):
    def writes_another_meanwhile():
        yield from list(model.named_parameters())[:5]
        write_hf_folder(tmp_path / "b", model.named_parameters(), adapter, dtype=torch.float32)
        yield from list(model.named_parameters())[5:]

    write_hf_folder(tmp_path / "a", writes_another_meanwhile(), adapter, dtype=torch.float32)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "b"]
    for name in ("a", "b"):
        HFFolder(tmp_path / name).check(model, adapter)


def test_a_folder_that_is_there_is_not_written_over(folder, model, adapter):
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(FileExistsError, match="already exists"):
        write_hf_folder(folder, model.named_parameters(), adapter, dtype=torch.bfloat16)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert list(folder.parent.iterdir()) == [folder]


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"folder {tmp_path}/nowhere does not exist"):
        HFFolder(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_missing_file_is_named(folder, name):
    for file in ("tokenizer_config.json", "tokenizer.json"):
        (folder / file).write_text("{}")
    HFFolder(folder, tokenizer=True)
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing"):
        HFFolder(folder, tokenizer=True)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}', "[]"])
def test_an_index_without_a_weight_map_is_named(folder, content):
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(
        ValueError, match=r"file .*/model\.safetensors\.index\.json (has no weight_map|holds list)"
    ):
        HFFolder(folder)


def test_missing_weights_are_named(folder):
    shard = shard_of(folder)
    shard.unlink()
    with pytest.raises(ValueError, match=f"{shard.name} is missing, which .*index.json lists"):
        HFFolder(folder)
    for file in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
        file.unlink()
    with pytest.raises(
        ValueError, match=r"model\.safetensors is missing, and so is model\.safetensors\.index"
    ):
        HFFolder(folder)


@pytest.mark.parametrize("kept_bytes", [0, 5, 100, -1])
def test_a_truncated_file_is_named(folder, kept_bytes):
    shard = shard_of(folder)
    shard.write_bytes(shard.read_bytes()[:kept_bytes])
    with pytest.raises(ValueError, match=f"{shard.name} is truncated"):
        HFFolder(folder)


def test_a_file_of_another_format_is_named(folder):
    shard = shard_of(folder)
    shard.write_bytes(b"\x08" + bytes(7) + b"not json" + bytes(100))
    with pytest.raises(ValueError, match=f"{shard.name} is not a safetensors file"):
        HFFolder(folder)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ([], "its header is a list, not an object"),
        ({"w": 5}, "shape=None for tensor w"),
        ({"w": {"shape": [2]}}, "data_offsets=None for tensor w"),
        ({"w": {"shape": [2], "data_offsets": [0]}}, r"data_offsets=\[0\] for tensor w"),
        ({"w": {"shape": ["2"], "data_offsets": [0, 8]}}, r"shape=\['2'\] for tensor w"),
        ({"w": {"shape": [2], "data_offsets": [0, -8]}}, r"data_offsets=\[0, -8\] for tensor w"),
    ],
)
def test_a_header_of_another_form_is_named(folder, header, says):
    shard = shard_of(folder)
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ValueError, match=f"{shard.name} is not a safetensors file: .*{says}"):
        HFFolder(folder)


def test_a_tensor_that_its_shard_lacks_is_named(folder):
    shard = shard_of(folder)
    with safe_open(shard, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    dropped = sorted(tensors)[0]
    del tensors[dropped]
    save_file(tensors, shard)
    with pytest.raises(ValueError, match=f"tensor {dropped} is missing from .*{shard.name}"):
        HFFolder(folder)


def rewrite(folder, change):
    """The folder as a single file, after `change(tensors)`."""
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("lm_head.weight"), "tensor lm_head.weight is missing"),
        (
            lambda t: t.update({"model.layers.1.self_attn.k_proj.weight": torch.zeros(8, 32)}),
            r"model.layers.1.self_attn.k_proj.weight has shape \[8, 32\], the model needs \[16, 32\]",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}),
            "model.layers.0.self_attn.q_proj.bias has no place in the model.*another architecture",
        ),
    ],
)
def test_a_checkpoint_of_another_architecture_is_refused(folder, model, adapter, change, named):
    rewrite(folder, change)
    with pytest.raises(ValueError, match=named):
        HFFolder(folder).check(model, adapter)


def test_a_tied_model_ignores_a_stored_head(folder, make_model):
    tied = make_model(tie=True)
    HFFolder(folder).check(tied, Qwen3StateDictAdapter(tied.config))


def test_a_folder_can_be_moved(folder, tmp_path, model, adapter):
    shutil.move(folder, tmp_path / "moved")
    HFFolder(tmp_path / "moved").check(model, adapter)
