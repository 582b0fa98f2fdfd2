"""Folders and files from elsewhere: one line of error and status 2, and nothing outside the folder
is read.
"""

import json
import re
import resource
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl.config.cli import parse_cli
from rl.models.files.hf import HFFolder, read_parameters, write_hf_folder, write_random_model
from rl.models.files.peft import read_peft_folder, write_peft_folder
from rl.models.files.tokenizer import open_tokenizer
from rl.models.spec import FAMILIES
from rl.starting_point import open_model_folder
from tests.support.fp8_folders import quantize_folder
from tests.support.policies import random_model, small_spec

ROOT = Path(__file__).parents[2]
DEEP, HUGE = "[" * 100_000 + "]" * 100_000, "9" * 5000
NAME = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def folder(tmp_path):
    return write_random_model(tmp_path / "hf", spec=small_spec(vocab_size=320), seed=0)


def edit(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_tensor(folder, name, change):
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / "model.safetensors")


def read_all(folder):
    opened = HFFolder(folder)
    adapter = (spec := opened.spec()).adapter(spec.model)
    with torch.device("meta"):
        names = [name for name, _ in spec.model.build().named_parameters()]
    return dict(read_parameters(opened, adapter, names))


def open_model(folder):
    open_model_folder(folder, spec=None)
    open_tokenizer(folder)


# JSON


@pytest.mark.parametrize(
    "text",
    [DEEP, HUGE, '{"a": ' + "[" * 150 + "]" * 150 + "}", f'{{"vocab_size": {HUGE}}}', "\xff"],
)
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors.index.json",
        "tokenizer_config.json",
        "generation_config.json",
    ],
)
def test_json_that_is_too_deep_or_large_is_refused_in_one_line(folder, name, text):
    (folder / name).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=rf"file {folder / name} is not valid JSON: ") as refused:
        open_model(folder)
    assert len(str(refused.value)) < 300
    assert "\n" not in str(refused.value)


def test_json_that_does_not_fit_into_memory_is_refused(folder):
    with (folder / "config.json").open("ab") as file:
        file.truncate(2**42)  # sparse
    with pytest.raises(
        ValueError, match=f"{folder}/config.json has 4398046511104 bytes: must have at most"
    ):
        open_model(folder)


@pytest.mark.parametrize(
    "text", [DEEP, '{"module": "configs.sum_digits", "config": "tiny", "values": ' + HUGE + "}"]
)
def test_config_of_a_run_that_is_too_deep_or_large_is_refused_with_status_2(tmp_path, text, capsys):
    file = tmp_path / "config.json"
    file.write_text(text)
    for option, given in (("--from_json", file), ("--resume", tmp_path)):
        with pytest.raises(SystemExit) as stopped:
            parse_cli([option, str(given)], default_module="sum_digits")
        assert stopped.value.code == 2
        assert re.fullmatch(
            rf"error: {file} is not JSON: [^\n]{{1,200}}\n", capsys.readouterr().err
        )


@pytest.mark.parametrize("option", ["--from_json", "--resume"])
def test_module_of_a_file_is_named_before_it_runs(tmp_path, monkeypatch, option, capsys):
    (tmp_path / "received_module.py").write_text("print('running')\n")
    monkeypatch.syspath_prepend(tmp_path)
    content = {"module": "received_module", "config": "tiny", "values": {}}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content))
    with pytest.raises(SystemExit):
        parse_cli(
            [option, str(file if option == "--from_json" else tmp_path)],
            default_module="sum_digits",
        )
    sys.modules.pop("received_module")
    shown = capsys.readouterr()
    assert shown.out == "running\n"
    assert shown.err.startswith(f"{file} runs code: tiny() of the module received_module\n")


def test_run_on_a_damaged_folder_ends_with_one_line_and_status_2(folder, tmp_path):
    (folder / "config.json").write_text(DEEP)
    run = subprocess.run(
        [
            sys.executable, "-m", "rl.train", "--module", "sum_digits", "--config", "tiny",
            "--warmup", "None",
            "--hf_assets_path", str(folder), "--dump_folder", str(tmp_path), "--launch.dry_run",
            "True",
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (2, "")
    assert re.fullmatch(
        rf"error: [^\n]*{folder}/config.json [^\n]*levels of lists[^\n]*\n", run.stderr
    )


# Sizes and other settings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**9), ("hidden_size", 2**62), ("vocab_size", 2**40),
        ("num_attention_heads", 2**31),
        ("max_position_embeddings", 10**12), ("head_dim", 10**90), ("intermediate_size", 2**31),
    ],
)  # fmt: skip
def test_sizes_that_no_model_has_are_refused_before_anything_is_built(folder, field, value):
    edit(folder / "config.json", **{field: value})
    started = time.monotonic()
    with pytest.raises(
        ValueError, match=rf"{folder}: config.json: {field}={value}: must be an integer from 1 to "
    ):
        open_model_folder(folder, spec=None)
    assert time.monotonic() - started < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4e6  # kilobytes


ODD: tuple[Any, ...] = (
    None,
    -1,
    0,
    1,
    7,
    2**19,
    2**31,
    10**90,
    1.5,
    1e308,
    1e-320,
    "x",
    [],
    {},
    [[1]],
    True,
    {"rope_type": []},
)


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_odd_values_of_settings_are_refused_by_the_error_for_users(tmp_path, family):
    assert family in FAMILIES
    spec = small_spec(experts=family == "qwen3_moe", family=family, vocab_size=320)
    folder = write_random_model(tmp_path / "hf", spec=spec, seed=0)
    good = json.loads((folder / "config.json").read_text())
    refused = 0
    for field in (*good, "quantization_config", "sliding_window_pattern"):
        for odd in ODD:
            (folder / "config.json").write_text(json.dumps(good | {field: odd}))
            try:
                open_model_folder(folder, spec=None)
            except ValueError:  # any other error fails the test
                refused += 1
    assert refused > 100


def test_scaling_of_positions_cannot_divide_by_zero(folder):
    rope = {
        "rope_type": "yarn",
        "factor": 2.0,
        "rope_theta": 1.0,
        "original_max_position_embeddings": 64,
    }
    edit(folder / "config.json", rope_parameters=rope, rope_scaling=None)
    with pytest.raises(ValueError, match=r"rope_theta=1\.0: must be above 1"):
        open_model_folder(folder, spec=None)


# Weights


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", ".", ""]
)
def test_index_names_files_of_its_folder_only(tmp_path, folder, name):
    save_file({"w": torch.zeros(2)}, tmp_path / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(
        ValueError, match=r"index.json has tensor w in '.*': must be the name of a file beside it"
    ):
        HFFolder(folder)


@pytest.mark.parametrize(
    "header",
    [
        DEEP.encode(), b"[]", b"\xff",
        f'{{"a": {{"dtype": "F32", "shape": [{HUGE}], "data_offsets": [0, 4]}}}}'.encode(),
        b'{"a": {"dtype": "F32", "shape": [1099511627776, 1099511627776], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
    ],
)  # fmt: skip
def test_bad_header_of_weights_is_refused_by_the_name_of_the_file(folder, header):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"0000")
    with pytest.raises(
        ValueError, match=r"weights file .*model.safetensors is truncated or not a safetensors file"
    ):
        HFFolder(folder)


def test_folder_in_place_of_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(ValueError, match=r"weights file .*model.safetensors is missing"):
        HFFolder(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_not_finite_are_refused_by_name(folder, dtype, value):
    def planted(tensor):
        tensor = tensor.to(dtype)
        tensor.view(-1)[-1] = value
        return tensor

    change_tensor(folder, NAME, planted)
    with pytest.raises(
        ValueError, match=rf"model.safetensors: tensor {NAME} has values that are NaN or infinite"
    ):
        read_all(folder)


def test_scale_of_fp8_weights_that_is_not_finite_is_refused(tmp_path):
    spec = small_spec(tie=False, vocab_size=320)
    path, model = tmp_path / "hf", random_model(spec, seed=0)
    write_hf_folder(path, model.named_parameters(), spec.adapter(spec.model), dtype=torch.bfloat16)
    quantize_folder(path, block=(16, 16))
    assert read_all(path)
    change_tensor(path, f"{NAME}_scale_inv", lambda scale: scale * float("nan"))
    with pytest.raises(ValueError, match=f"tensor {NAME}\\S* has values that are NaN"):
        read_all(path)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int8, torch.bool, torch.complex64, torch.float8_e5m2]
)
def test_weights_of_another_type_than_floating_point_are_refused_by_name(folder, dtype):
    change_tensor(folder, NAME, lambda tensor: tensor.to(dtype))
    with pytest.raises(
        ValueError, match=rf"model.safetensors: tensor {NAME} is of \S+: must be of F64, F32"
    ):
        HFFolder(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t * float("nan"), "NaN or infinite"),
        (lambda t: t.to(torch.int32), "is of torch.int32"),
    ],
)
def test_adapter_that_is_not_finite_or_of_integers_is_refused(tmp_path, change, message):
    name = "model.layers.0.self_attn.q_proj.weight"
    a_RI, b_OR = torch.ones(2, 8), torch.ones(4, 2)
    write_peft_folder(tmp_path / "a", [(name, a_RI, b_OR)], rank=2, alpha=4.0, base_model=None)
    given: dict[str, Any] = {"rank": 2, "alpha": 4.0, "widths": {name: (8, 4)}}
    assert read_peft_folder(tmp_path / "a", **given)
    file = tmp_path / "a" / "adapter_model.safetensors"
    save_file({key: change(tensor) for key, tensor in load_file(file).items()}, file)
    with pytest.raises(ValueError, match=message):
        read_peft_folder(tmp_path / "a", **given)
