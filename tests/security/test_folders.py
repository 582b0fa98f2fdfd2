"""Folders that are no model's, or whose files lie elsewhere: refused in one line that says what
they are.
"""

import io
import json
import os
import re
import shutil
import tarfile
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl.models.decoder import find_persistent_buffers
from rl.models.files.assets import resolve_assets
from rl.models.files.folder_check import check_model_folder
from rl.models.files.hf import HFFolder, write_hf_folder, write_random_model
from rl.models.files.peft import read_peft_folder, write_peft_folder
from rl.models.files.tokenizer import (
    TokenizerFingerprint,
    compute_fingerprint,
    list_tokenizer_files,
    load_tokenizer,
    open_tokenizer,
)
from rl.starting_point import open_model_folder
from tests.support.gguf_files import random_tensors, write_gguf
from tests.support.policies import random_model, small_spec

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5000000000\n"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_random_model(
        tmp_path_factory.mktemp("written") / "hf", spec=small_spec(vocab_size=320), seed=0
    )


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written, tmp_path / "hf")


def refusal(path):
    """Return the error of a folder that is opened as a run's."""
    with pytest.raises(ValueError, match=str(path)) as refused:
        open_model_folder(resolve_assets(path, cache=path.parent / "cache"), spec=None)
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 700
    return message


# Kinds


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "is empty: must be a Hugging Face folder"),
        (["config.json"], "has a config.json and no weights"),
        (["README.md"], "config.json is missing: the folder has 1 files, such as README.md"),
        (["adapter_config.json", "adapter_model.safetensors"], "is a PEFT adapter without the "
                                                               "model it belongs to"),
        (["adapter_config.json", "adapter_model.safetensors", "config.json"], "is a PEFT adapter"),
        (["config.json", "pytorch_model.bin"], "weights in pickles, .*save_pretrained"),
        (["config.json", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"],
            "weights in pickles"),
        (["config.json", "training_args.bin", "optimizer.pt"], "has a config.json and no weights"),
        (["config.json", "tf_model.h5"], "weights of TensorFlow"),
        (["config.json", "flax_model.msgpack"], "weights of Flax"),
        (["config.json", "onnx/model.onnx"], "exported to ONNX"),
        (["model.onnx"], "exported to ONNX"),
        (["config.json", "zero_to_fp32.py", "global_step5/x.pt"], "a sharded checkpoint of another "
                                                                  "trainer"),
        (["config.json", "openvino_model.bin", "openvino_model.xml"], "a compiled model"),
        (["model_index.json", "unet/config.json"], "a pipeline of diffusers"),
        (["modules.json", "1_Pooling/config.json", "config.json"],
            "a model of sentence-transformers"),
        (["consolidated.00.pth", "params.json", "tokenizer.model"], "in the format of its maker"),
        (["consolidated.safetensors", "params.json", "tekken.json"], "in the format of its maker"),
        (["step-10/state.json", "hf/config.json"], "is a checkpoint of a run, or a folder of them: "
                                                   ".*hf/ beside"),
        (["state.json", "manifest.json", "__0_0.distcp", ".metadata"], "is a checkpoint of a run"),
        (["config.json", "model-00001-of-00002.safetensors"], "index.json: there is "
                                                              "model-00001-of-00002"),
        (["config.json", "weights.safetensors"], "index.json: there is weights.safetensors"),
        (["blobs/1", "refs/main", "snapshots/abc/config.json"], "is the hub's cache of a model: "
                                                                ".*abc"),
        (["checkpoint-5/config.json", "runs/x"], "contains one: give .*checkpoint-5"),
        (["metrics.jsonl", "config.json", "checkpoints/hf/config.json"], "contains one: give "
                                                                         ".*checkpoints/hf"),
    ],
)  # fmt: skip
def test_wrong_folder_is_refused_by_what_it_is(tmp_path, names, message):
    folder = tmp_path / "given"
    folder.mkdir()
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    with pytest.raises(ValueError, match=message):
        HFFolder(folder)
    assert refusal(folder)


def test_file_in_place_of_a_folder_is_refused_by_what_it_is(folder, tmp_path):
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.write(folder / "config.json")
    with tarfile.open(tmp_path / "model.tar", "w") as archive:
        archive.add(folder)
    with tarfile.open(tmp_path / "model.tgz", "w:gz") as archive:
        archive.add(folder)
    (tmp_path / "model.bin").write_bytes(b"GGUF" + bytes(40))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "lost").symlink_to("/nowhere/model")
    for name, message in (
        ("model.zip", "is a zip archive: unpack it"),
        ("model.tar", "is a tar archive: unpack it"),
        ("model.tgz", "is a compressed archive: unpack it"),
        ("model.bin", r"is a GGUF file: its name must end in \.gguf"),
        (
            "hf/config.json",
            f"is a file: must be the Hugging Face folder that it is in, here {folder}",
        ),
        ("pipe", "is a pipe or a device"),
        ("lost", "is a link to /nowhere/model, which does not exist"),
        ("no", "does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            check_model_folder(tmp_path / name)


@pytest.mark.parametrize(
    "name", [WEIGHTS, "config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_pointer_of_git_lfs_is_named(folder, name):
    (folder / name).write_text(POINTER)
    assert (
        f"{folder / name} is a pointer of git-LFS and not the file itself: run `git lfs pull`"
        in refusal(folder)
    )


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "compressed-tensors", "mxfp4"])
def test_quantized_model_is_named(folder, method):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": method}})
    )
    assert f"'quant_method': '{method}'" in refusal(folder)


def test_quantized_tensors_are_recognized_without_a_setting(folder):
    tensors = load_file(folder / WEIGHTS)
    tensors["model.layers.0.mlp.up_proj.qweight"] = torch.zeros(2, 2, dtype=torch.int32)
    save_file(tensors, folder / WEIGHTS)
    assert "is of I32: must be of F64, F32, F16, BF16, F8_E4M3 (the model is quantized" in refusal(
        folder
    )


def test_models_that_write_no_text_are_refused(folder):
    (folder / "1_Pooling").mkdir()
    assert "a model of sentence-transformers" in refusal(folder)


@pytest.mark.parametrize(
    "names",
    [
        ["README.md", ".git/HEAD", ".gitattributes", ".cache/huggingface/x.metadata",
            "USE_POLICY.txt"],
        ["original/consolidated.00.pth", "original/params.json", "consolidated.safetensors",
            "params.json"],
        ["pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack",
            "onnx/model.onnx"],
        ["training_args.bin", "optimizer.pt", "rng_state_0.pth", "trainer_state.json",
            "global_step5/x.pt"],
        ["adapter_config.json"],
        ["config_sentence_transformers.json", "modules.json", "1_LogitScore/config.json"],
        ["model-q4.gguf"], ["checkpoint-5/config.json", "step-5/x", "state.json", "manifest.json"],
    ],
)  # fmt: skip
def test_other_files_beside_a_model_do_no_harm(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    (folder / "train_log.txt").symlink_to("/nowhere/log")  # nothing reads it
    assert open_model_folder(resolve_assets(f"{folder}/", cache=folder / "cache"), spec=None)


@pytest.mark.parametrize(
    ("renamed", "message"),
    [
        (
            lambda name: f"base.{name}",
            "but there is base.model.embed_tokens.weight: save the language model itself",
        ),
        (
            lambda name: name.removeprefix("model."),
            "but there is embed_tokens.weight: save the language model",
        ),
        (
            lambda name: f"{name}\n\x1b[31m",
            r"has a tensor 'model.*\\n\\x1b.31m': no model has such a name",
        ),
    ],
)
def test_names_of_a_wrapped_model_are_explained(folder, renamed, message):
    tensors = load_file(folder / WEIGHTS)
    save_file({renamed(name): tensor for name, tensor in tensors.items()}, folder / WEIGHTS)
    assert re.search(message, refusal(folder))


# Two sources of weights


def shards(folder, total, *, index):
    """Write the model's tensors as shards `of total`, with or without an index."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for i in range(total):
        file = f"model-{i + 1:05d}-of-{total:05d}.safetensors"
        save_file({name: tensors[name] for name in names[i::total]}, folder / file)
        weight_map |= dict.fromkeys(names[i::total], file)
    if index:
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_whole_file_beside_the_index_of_others_is_refused_naming_both(folder):
    shards(folder, 2, index=True)
    message = refusal(folder)
    assert (
        f"has both {WEIGHTS} and {INDEX}, which lists model-00001-of-00002.safetensors" in message
    )
    for file in folder.glob("model-*"):  # the stale index of shards that are gone
        file.unlink()
    assert f"has both {WEIGHTS} and {INDEX}" in refusal(folder)
    (folder / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(load_file(folder / WEIGHTS), WEIGHTS)})
    )
    assert open_model_folder(folder, spec=None)  # an index of the whole file says the same


def test_tensor_in_two_shards_is_refused_naming_both(folder):
    shards(folder, 2, index=True)
    (folder / WEIGHTS).unlink()
    second = folder / "model-00002-of-00002.safetensors"
    first = load_file(folder / "model-00001-of-00002.safetensors")
    save_file(
        load_file(second) | {"model.norm.weight": torch.zeros(32)} | dict(list(first.items())[:1]),
        second,
    )
    assert "is in both" in refusal(folder)


def test_index_chooses_between_two_sets_of_shards(folder):
    shards(folder, 3, index=False)
    shards(folder, 2, index=True)
    save_file(
        {"other": torch.zeros(1)}, folder / "consolidated.safetensors"
    )  # as Mistral's folders have
    (folder / "params.json").write_text("{}")
    whole = set(load_file(folder / WEIGHTS))
    (folder / WEIGHTS).unlink()
    opened = HFFolder(folder)
    assert {file.name for file in opened.files.values()} == {
        f"model-0000{i}-of-00002.safetensors" for i in (1, 2)
    }
    assert set(opened.shapes) == whole
    (folder / INDEX).unlink()
    assert f"{INDEX}: there is consolidated.safetensors" in refusal(folder) or "maker" in refusal(
        folder
    )


def test_model_and_adapter_in_one_folder_are_refused_naming_both(folder):
    name = "model.layers.0.self_attn.q_proj.weight"
    write_peft_folder(
        folder / "a",
        [(name, torch.ones(2, 8), torch.ones(4, 2))],
        rank=2,
        alpha=4.0,
        base_model=None,
    )
    for file in (folder / "a").iterdir():
        shutil.copy(file, folder)
    assert "holds the weights of a model and of an adapter (adapter_model.safetensors)" in refusal(
        folder
    )


# Links


@pytest.mark.parametrize(
    "name",
    [
        "chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer.model",
        "vocab.json",
        "config.json", INDEX, "additional_chat_templates/tool_use.jinja", "processor_config.json",
        "additional_chat_templates",
    ],
)  # fmt: skip
def test_link_that_leaves_the_folder_is_refused(folder, tmp_path, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.jinja").write_text("secret")
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    file.symlink_to(outside if name == "additional_chat_templates" else outside / "secret.jinja")
    assert f"{file} is a link that leaves its folder, to {outside}" in refusal(folder)
    spec = small_spec(vocab_size=320)
    for read in (load_tokenizer, compute_fingerprint, list_tokenizer_files):
        with pytest.raises(ValueError, match="is a link that leaves its folder"):
            read(folder)
    with pytest.raises(ValueError, match="is a link that leaves its folder"):
        write_hf_folder(
            tmp_path / "out",
            [],
            spec.adapter(spec.model),
            dtype=torch.float32,
            tokenizer_from=folder,
        )
    assert not (tmp_path / "out").exists()


def test_weights_may_lie_elsewhere_and_nothing_but_tensors_is_read_from_there(folder, tmp_path):
    shards(folder, 2, index=True)
    (folder / WEIGHTS).unlink()
    (tmp_path / "scratch").mkdir()
    for file in folder.glob("model-*"):
        shutil.move(file, tmp_path / "scratch")
        file.symlink_to(tmp_path / "scratch" / file.name)
    assert open_model_folder(folder, spec=None)
    (tmp_path / "scratch" / "model-00001-of-00002.safetensors").write_text("secret")
    message = refusal(folder)
    assert "model-00001-of-00002.safetensors is truncated or not a safetensors file" in message
    assert "secret" not in message
    (tmp_path / "scratch" / "model-00001-of-00002.safetensors").unlink()
    os.mkfifo(tmp_path / "scratch" / "model-00001-of-00002.safetensors")
    assert "model-00001-of-00002.safetensors is a pipe or a device" in refusal(folder)


def test_links_of_the_hubs_cache_and_within_a_folder_are_followed(folder, tmp_path):
    snapshot = tmp_path / "models--org--x" / "snapshots" / "abc"
    blobs = tmp_path / "models--org--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.move(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (snapshot / "additional_chat_templates").mkdir()
    (blobs / "t").write_text("{{ messages }}")
    (snapshot / "additional_chat_templates" / "x.jinja").symlink_to("../../../blobs/t")
    link = tmp_path / "my-model"
    link.symlink_to(snapshot)
    for given in (snapshot, link):
        assert open_model_folder(given, spec=None)
        assert open_tokenizer(given)
    # A folder that only looks like the cache gets no further.
    (blobs / "0").unlink()
    (blobs / "0").symlink_to("/etc/passwd")
    assert "is a link that leaves its folder, to /etc/passwd" in refusal(snapshot)


def test_link_within_the_folder_is_followed_and_a_broken_one_named(folder):
    (folder / "data").mkdir()
    shutil.move(folder / WEIGHTS, folder / "data" / "w")
    (folder / WEIGHTS).symlink_to("data/w")
    assert open_model_folder(folder, spec=None)
    (folder / "data" / "w").unlink()
    assert (
        f"{folder / WEIGHTS} is a link to {folder / 'data' / 'w'}, which does not exist"
        in refusal(folder)
    )
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(WEIGHTS)
    assert "which does not exist" in refusal(folder)


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "tokenizer.json", "config.json", WEIGHTS, "a.json"]
)
def test_pipe_in_place_of_a_file_is_refused(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert f"{folder / name} is a pipe or a device" in refusal(folder)


def test_links_of_an_adapter_and_of_gguf_files_are_refused(tmp_path):
    adapter = tmp_path / "a"
    write_peft_folder(
        adapter,
        [("w.weight", torch.ones(2, 8), torch.ones(4, 2))],
        rank=2,
        alpha=4.0,
        base_model=None,
    )
    shutil.move(adapter / "adapter_config.json", tmp_path / "c")
    (adapter / "adapter_config.json").symlink_to("../c")
    with pytest.raises(ValueError, match=r"adapter_config.json is a link that leaves its folder"):
        read_peft_folder(adapter, rank=2, alpha=4.0, widths={"w.weight": (8, 4)})
    write_gguf(tmp_path / "model.gguf", random_tensors())
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "model.gguf").symlink_to("../model.gguf")
    with pytest.raises(ValueError, match=r"g/model.gguf is a link that leaves its folder"):
        resolve_assets(tmp_path / "g", cache=tmp_path / "cache")
    link = tmp_path / "link.gguf"  # a user's own
    link.symlink_to("model.gguf")
    assert resolve_assets(link, cache=tmp_path / "cache")


def test_folder_that_is_no_adapter_is_named(folder):
    with pytest.raises(ValueError, match="is the folder of a model: must be a PEFT adapter's"):
        read_peft_folder(folder, rank=2, alpha=4.0, widths={})
    with pytest.raises(
        ValueError, match=r"config.json is a file: must be the folder of a PEFT adapter"
    ):
        read_peft_folder(folder / "config.json", rank=2, alpha=4.0, widths={})


def test_adapter_of_pickles_is_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4.0})
    )
    (tmp_path / "adapter_model.bin").write_text("")
    with pytest.raises(ValueError, match=r"adapter_model.bin is a pickle, which is not read"):
        read_peft_folder(tmp_path, rank=2, alpha=4.0, widths={})


# Tokenizers


def test_tokenizer_in_another_format_is_named(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tekken.json").write_text("{}")
    assert (
        f"{folder / 'tokenizer.json'} is missing: tekken.json is in a format that is not read"
        in refusal(folder)
    )


@pytest.fixture(scope="module")
def sentencepiece_model():
    """Return the bytes of a tokenizer.model as Llama 2 has it: bytes as fallback, texts as they
    are.
    """
    from sentencepiece import SentencePieceTrainer

    texts = [f"Hello world, what is {i} + {7 * i}?  The answer is here" for i in range(300)]
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=320, model_type="bpe",
        byte_fallback=True,
        character_coverage=1.0, minloglevel=2, pad_id=-1, normalization_rule_name="identity",
        remove_extra_whitespaces=False, split_digits=True, allow_whitespace_only_pieces=True,
    )  # fmt: skip
    return model.getvalue()


def sentencepiece_folder(folder, model, tokenizer_class):
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        (folder / name).unlink()
    (folder / "tokenizer.model").write_bytes(model)
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "tokenizer_class": tokenizer_class,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_tokenizer_of_sentencepiece_alone_is_converted(folder, sentencepiece_model):
    from sentencepiece import SentencePieceProcessor

    original = SentencePieceProcessor(model_proto=sentencepiece_model)
    sentencepiece_folder(folder, sentencepiece_model, "LlamaTokenizer")
    assert open_model_folder(folder, spec=None)
    tokenizer, stop_ids = open_tokenizer(folder, vocab_size=320)
    assert stop_ids == (2,)
    for text in ("Hello world", "what is 17 + 119?", "\n\n1 x", "two  spaces "):
        assert tokenizer.encode(text, add_special_tokens=False) == original.encode(text)


def test_conversion_that_splits_texts_otherwise_is_refused(folder, sentencepiece_model):
    sentencepiece_folder(folder, sentencepiece_model, "PreTrainedTokenizerFast")
    with pytest.raises(
        ValueError,
        match=r"tokenizer.model: transformers splits 'Hello world' into .*tokenizer_class",
    ):
        load_tokenizer(folder)
    (folder / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"tokenizer.model is malformed"):
        load_tokenizer(folder)


# What belongs to a tokenizer


def test_every_file_of_the_tokenizer_is_exported_and_counts(folder, tmp_path):
    spec = small_spec(vocab_size=320)
    more = {
        "tokenizer.model": "m",
        "chat_template.json": "{}",
        "additional_chat_templates/tool_use.jinja": "{{ 1 }}",
    }
    before = compute_fingerprint(folder)
    for name, text in more.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    out = tmp_path / "out"
    params = random_model(spec, seed=0).named_parameters()
    write_hf_folder(
        out, params, spec.adapter(spec.model), dtype=torch.bfloat16, tokenizer_from=folder
    )
    for name in (*more, "tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    after = compute_fingerprint(out)
    assert before.find_differences(after, tokens_alone=False) == [*more]
    assert before.find_differences(after, tokens_alone=True) == []  # tokenizer.json is what is read
    old = TokenizerFingerprint(folder="", parts=before.parts, complete=False)
    assert old.find_differences(after, tokens_alone=False) == []  # it did not look for them
    config = json.loads((out / "config.json").read_text())
    assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")


def test_buffers_keep_their_dtype_in_an_export(tmp_path):
    spec = small_spec(experts=True, family="qwen3_moe", vocab_size=320)
    model = random_model(spec, seed=0)
    buffers = {
        name: torch.full_like(buffer, 1.001)
        for name, buffer in find_persistent_buffers(model).items()
    }
    assert buffers
    params = [*model.named_parameters(), *buffers.items()]
    write_hf_folder(
        tmp_path / "out", params, spec.adapter(spec.model), dtype=torch.bfloat16, buffers=buffers
    )
    tensors = load_file(tmp_path / "out" / WEIGHTS)
    kept = {name: tensor for name, tensor in tensors.items() if "correction_bias" in name}
    assert len(kept) == len(buffers)
    assert all(torch.equal(tensor, torch.full_like(tensor, 1.001)) for tensor in kept.values())
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
    assert {tensor.dtype for name, tensor in tensors.items() if name not in kept} == {
        torch.bfloat16
    }
