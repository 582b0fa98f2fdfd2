"""Saved adapters in PEFT, and what others reported of adapters that opened and did nothing.

`tests/models/test_lora.py` compares the logits of every family; `tests/models/test_vllm_adapter.py`
opens adapters in vLLM.
"""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl.distributed.compile import CompileConfig
from rl.models.files.hub import find_hub_name
from rl.models.files.peft import CONFIG_FILE, WEIGHTS_FILE
from rl.models.lora import ALL_LINEAR, LoRA
from tests.training.parts import (
    make_engine,
    make_sample,
    moe_spec,
    small_spec,
    write_assets,
)

SAMPLE = make_sample(length=19, seed=1)
SETTINGS: dict[str, dict[str, Any]] = {
    "all": {"rank": 4, "alpha": 6.0},
    "subset": {"rank": 4, "alpha": 6.5, "target_modules": ("q_proj", "v_proj", "up_proj")},
    "fused": {"rank": 3, "alpha": 3.0, "target_modules": ("gate_up_proj",)},
    "unembedding": {"rank": 4, "alpha": 6.0, "unembedding": True},
    "head_alone": {"rank": 4, "alpha": 6.0, "target_modules": (), "unembedding": True},
}


def make_trained(assets, spec, *, compiled=False, **settings):
    """Return an engine whose adapters' products are as large as the weights."""
    engine = make_engine(
        assets,
        spec=spec,
        converters=(LoRA.Config(**settings),),
        compile=CompileConfig(enable=compiled, backend="aot_eager"),
    )
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in engine.policy.trained_parameters.values():
            parameter.normal_(std=0.3, generator=generator)
    return engine


@torch.no_grad()
def compute_their_logprobs(model, token_ids):
    """Return the logprob of each token after the first."""
    ids = torch.as_tensor(token_ids, dtype=torch.int64)
    logprobs = model(ids.unsqueeze(0)).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, ids[1:].unsqueeze(1)).squeeze(1)


def drop_router_bias(folder):
    """Remove the experts' biases, which other programs do not know."""
    file = Path(folder) / "model.safetensors"
    tensors = {n: t for n, t in load_file(file).items() if not n.endswith("correction_bias")}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return write_assets(tmp_path_factory.mktemp("assets") / "untied", tie=False)


CASES = [(name, small_spec(tie=False), SETTINGS[name]) for name in SETTINGS]
CASES += [("tied", small_spec(), SETTINGS["all"]), ("moe", moe_spec(), SETTINGS["unembedding"])]


@pytest.mark.medium
@pytest.mark.parametrize(("name", "spec", "settings"), CASES, ids=[case[0] for case in CASES])
def test_saved_adapter_opens_in_peft_with_equal_logprobs(name, spec, settings, tmp_path):
    from peft import AutoPeftModelForCausalLM

    base = write_assets(tmp_path / "base", spec=spec)
    if name == "moe":
        drop_router_bias(base)
    engine = make_trained(base, spec, **settings)
    engine.save_adapter(str(tmp_path / "adapter"))
    with warnings.catch_warnings():
        # PEFT warns of a tensor without a place, and leaves the base model as it is.
        warnings.filterwarnings("error", message=".*(missing|unexpected) adapter keys.*")
        model = AutoPeftModelForCausalLM.from_pretrained(
            tmp_path / "adapter", dtype=torch.float32, attn_implementation="eager"
        )
    factors = [p for name, p in model.named_parameters() if ".lora_B." in name]
    names = load_file(tmp_path / "adapter" / WEIGHTS_FILE)
    # transformers 5 has one stack for all experts, of the gate with the up projection.
    stacks = {re.sub(r"experts\.\d+\.(gate_|up_)?", "experts.", name) for name in names}
    assert len(factors) == len(stacks) / 2
    assert all(factor.any() for factor in factors)

    # At temperature 1, which the logits are not divided by.
    ours = torch.from_numpy(engine.compute_logprobs([SAMPLE])[0][1:])
    theirs = compute_their_logprobs(model, SAMPLE.token_ids)
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)
    with model.disable_adapter():
        without = compute_their_logprobs(model, SAMPLE.token_ids)
    assert (without - ours).abs().max() > 0.3


# What others reported of adapters of training frameworks


# The first compiled model of a process loads the compiler.
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.medium)])
def test_tensors_are_named_as_peft_names_them(untied, tmp_path, compiled):
    """redai-studio/Relax 262 and MakazhanAlpamys/Soup 335: without PEFT's prefix, or with that of
    torch.compile, PEFT leaves every product at zero and only warns."""
    engine = make_trained(
        untied, small_spec(tie=False), compiled=compiled, **SETTINGS["unembedding"]
    )
    engine.save_adapter(str(tmp_path / "adapter"))
    names = {"base_model.model.lm_head"}
    for layer in range(2):
        for module in ALL_LINEAR:
            block = "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            names.add(f"base_model.model.model.layers.{layer}.{block}.{module}")
    tensors = load_file(tmp_path / "adapter" / WEIGHTS_FILE)
    assert tensors.keys() == {f"{n}.lora_{f}.weight" for n in names for f in "AB"}


def test_settings_are_those_that_old_versions_of_peft_know(untied, tmp_path):
    """huggingface/peft 2275: a setting that an older PEFT does not know is an error there. And
    verl-project/verl 1821: lora_alpha was written as 0, with which the products vanish.
    """
    make_trained(untied, small_spec(tie=False), **SETTINGS["subset"]).save_adapter(
        str(tmp_path / "adapter")
    )
    content = json.loads((tmp_path / "adapter" / CONFIG_FILE).read_text())
    assert content == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": untied,
        "revision": None,
        "r": 4,
        "lora_alpha": 6.5,
        "target_modules": ["q_proj", "v_proj", "up_proj"],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": False,
        "use_rslora": False,
        "inference_mode": True,
    }


COMMIT = "c1899de289a04d12100db370d81485cdf75e47ca"


def test_base_model_of_the_hub_is_recorded_by_its_name(tmp_path):
    """fastino-ai/GLiNER2 108: vLLM's resolver of adapters compares the name with the served
    model's. The path of this machine's cache opens nowhere else.
    """
    spec = small_spec(tie=False)
    snapshot = tmp_path / "hub" / "models--org--base" / "snapshots" / COMMIT
    engine = make_trained(write_assets(snapshot, spec=spec), spec, **SETTINGS["all"])
    engine.save_adapter(str(tmp_path / "adapter"))
    content = json.loads((tmp_path / "adapter" / CONFIG_FILE).read_text())
    assert content["base_model_name_or_path"] == "org/base"
    assert content["revision"] == COMMIT


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        (f"/cache/hub/models--Qwen--Qwen3-0.6B/snapshots/{COMMIT}", ("Qwen/Qwen3-0.6B", COMMIT)),
        (f"/cache/models--gpt2/snapshots/{COMMIT}", ("gpt2", COMMIT)),
        (f"/cache/datasets--org--x/snapshots/{COMMIT}", None),
        (f"/cache/models--org--x/snapshots/{COMMIT}/sub", None),
        ("/models/org--x/snapshots/abc", None),
        ("/models/Qwen3-0.6B", None),
    ],
)
def test_name_on_the_hub_is_read_from_a_path_of_its_cache(folder, name):
    assert find_hub_name(folder) == name


WRONG_NAMES = [
    ("base_model.model.", "", "lacks PEFT's prefix 'base_model.model.'"),
    ("base_model.model.lm_head.", "base_model.model.model.unembed_tokens.", "Tinker's name"),
    (".model.layers.", ".model.language_model.layers.", "of a model with images"),
]
"""Parts of a saved tensor's name, what others write there, and what the error says.

redai-studio/Relax 262, thinking-machines-lab/tinker-cookbook 193, vllm-project/vllm 34186.
"""


@pytest.mark.parametrize(("part", "other", "message"), WRONG_NAMES)
def test_adapter_that_others_open_as_the_base_model_is_refused(
    untied, tmp_path, part, other, message
):
    spec, settings = small_spec(tie=False), SETTINGS["unembedding"]
    make_trained(untied, spec, **settings).save_adapter(str(tmp_path / "adapter"))
    file = tmp_path / "adapter" / WEIGHTS_FILE
    save_file({name.replace(part, other): t for name, t in load_file(file).items()}, file)
    with pytest.raises(ValueError, match=message) as error:
        make_trained(untied, spec, initial_adapter=str(tmp_path / "adapter"), **settings)
    assert "\n" not in str(error.value)
