"""Checks of every shipped config, without a GPU."""

import json
import pkgutil
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import configs
from actors.launch.placement import fit_to_devices
from actors.preflight.checks import Machine, find_config_faults
from actors.preflight.explain import explain
from actors.preflight.task import check_demonstrations
from configs import gpu
from examples.custom_model import model_registry
from rl.config.cli import parse_cli
from rl.config.json import read_json, write_json
from rl.config.registry import RunRequest, list_registry_functions, load_module
from rl.models.files.tokenizer import build_byte_tokenizer, open_tokenizer
from rl.rollouts.environment import Environments
from rl.rollouts.renderer import make_renderer
from rl.tasks.generated import GeneratedTask
from rl.tasks.verifiers_task import VerifiersTask
from rl.tinker.backend import TinkerBackend
from tests.support import chat_templates

MODULES = [*sorted(m.name for m in pkgutil.iter_modules(configs.__path__)), "examples.custom_model"]
CONFIGS = [
    f"{module}.{function}"
    for module in MODULES
    for function in sorted(list_registry_functions(load_module(module)))
]
RUNS = [name for name in CONFIGS if not name.startswith("tinker.")]
GPU_CONFIGS = [name for name in RUNS if ".qwen3_" in name or ".math_" in name]


def config_of(name):
    module, _, function = name.rpartition(".")
    return list_registry_functions(load_module(module))[function]()


def test_every_task_and_size_has_a_config():
    learnt = ("sum_digits", "reverse_text", "alphabet_sort")
    expected = {f"{task}.{config}" for task in learnt for config in ("tiny", "tiny_noise")}
    layouts = ("async", "fsdp2", "tp2", "ddp2", "pp2", "fsdp2_tp2", "moe")
    expected |= {f"sum_digits.tiny_{name}" for name in layouts} | {
        "countdown.tiny",
        "tinker.tiny_actors",
    }
    sizes = ("0_6b_lora_24gb", "0_6b_24gb", "0_6b", "1_7b", "4b_lora", "4b", "8b", "14b", "30b_a3b")
    on_gpus = ("sum_digits", "gsm8k", "reverse_text")
    expected |= {f"{task}.qwen3_{size}" for task in on_gpus for size in sizes} | {
        "sum_digits.qwen3_32b"
    }
    assert expected <= set(CONFIGS)
    on = {n for n in RUNS if n.startswith("sum_digits.") and config_of(n).batch_invariant is None}
    assert on == {
        f"sum_digits.tiny{suffix}" for suffix in ("", "_async", "_fsdp2", "_ddp2", "_pp2", "_noise")
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_every_call_returns_a_new_config_that_survives_its_json(name, tmp_path):
    first, second = config_of(name), config_of(name)
    module, _, function = name.rpartition(".")
    path = tmp_path / "config.json"
    write_json(RunRequest(module=module, function=function, config=first), path)
    assert read_json(path).config == first == second
    if name in RUNS:
        values = json.loads(path.read_text())["values"]
        assert values["model"] == (first.model and f"{first.model.name}/{first.model.flavor}")
        assert (first.loop is second.loop, first.task is second.task) == (False, False)
        first.loop.num_steps += 1
    else:
        first.backend.cache = "elsewhere"
    assert config_of(name) == second


@pytest.mark.parametrize("name", RUNS)
def test_every_config_has_a_valid_layout(name):
    config = fit_to_devices(config_of(name), num_gpus=0)
    spec = replace(
        config.model or model_registry("tiny"), batch_invariant=bool(config.batch_invariant)
    )
    assert list(find_config_faults(config, spec=spec, num_gpus=0)) == []


@pytest.mark.parametrize("name", GPU_CONFIGS)
def test_gpu_configs_fit_their_gpus_and_have_an_instruction(name):
    module, _, function = name.partition(".")
    config, layout = config_of(name), getattr(gpu, function.removeprefix("math_").upper())
    here = Machine(
        num_gpus=layout.num_gpus,
        gpu_bytes=layout.gpu_gb * 10**9,
        gpu_capability=(8, 0),
        num_cores=64,
        memory_bytes=10**12,
    )
    found = explain(RunRequest(module=module, function=function, config=config), here=here)
    assert (found["options"]["refused"], found["devices"]) == ([], "GPUs of this machine")
    trainer = found["memory"]["trainer_rank"]
    assert trainer["peak_gb"] < 0.9 * layout.gpu_gb
    assert found["memory"]["generator_rank"]["fits"]
    # Disjoint GPUs are all used, and generation is ahead; others are shared.
    used = {
        gpu
        for role, at in found["layout"].items()
        if role != "trainer_mesh"
        for gpu in at["gpus"] or ()
    }
    assert used == {*range(layout.num_gpus)}
    is_ahead = found["values"]["loop.max_off_policy_steps"] > 0
    assert found["values"]["launch.share_gpus"] == (not is_ahead)
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in config.model.model.build().parameters())
    billions = float(name.partition("qwen3_")[2].partition("b")[0].replace("_", "."))
    assert num_parameters / 1e9 == pytest.approx(billions, rel=0.06)
    assert found["memory"]["generator_rank"]["weights_gb"] < 0.6 * 0.85 * layout.gpu_gb
    assert config.warmup is None
    if isinstance(config.task, GeneratedTask.Config):
        assert getattr(config.task, "instruction")  # noqa: B009  (of each of them, not of their base)


def is_warmed_up(name):
    config = config_of(name)
    return config.warmup is not None and isinstance(config.task, GeneratedTask.Config)


@pytest.mark.parametrize("name", [name for name in RUNS if is_warmed_up(name)])
def test_demonstrations_fit_the_config(name, tmp_path):
    config = config_of(name)
    build_byte_tokenizer(tmp_path)
    tokenizer, ends = open_tokenizer(tmp_path)
    task = config.task.build()
    check_demonstrations(
        task.warmup_problems(seed=config.seed),
        environments=Environments(make=task.environment),
        renderer=make_renderer(config.renderer, tokenizer=tokenizer, stop_token_ids=ends),
        max_tokens=config.loop.sampling.max_tokens,
        max_model_len=config.generator.max_model_len,
    )


def test_renderers_of_gpu_configs_support_several_turns(tmp_path):
    tokenizer = chat_templates.byte_tokenizer(tmp_path / "qwen3", "qwen3")
    found = set()
    for name in GPU_CONFIGS:
        config = config_of(name)
        if isinstance(config.task, GeneratedTask.Config):
            task = config.task.build()
            environment = task.environment(next(task.train_problems(seed=0)))
            several = not getattr(environment, "single_turn", False)
        else:
            several = isinstance(config.task, VerifiersTask.Config)
        if several:
            found.add(name.partition(".")[0])
            ends = (tokenizer.eos_token_id,)
            make_renderer(
                config.renderer, tokenizer=tokenizer, stop_token_ids=ends
            ).check_multi_turn()
    assert found == {"alphabet_sort", "verifiers_env"}


@pytest.mark.parametrize("name", [name for name in RUNS if name.endswith(".tiny_noise")])
def test_a_control_differs_only_in_its_reward(name):
    control, run = config_of(name), config_of(name.removesuffix("_noise"))
    assert (control.task.reward, run.task.reward) == ("noise", "answer")
    control.task.reward = "answer"
    control.description = run.description
    assert control == run


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in RUNS])
def test_backend_of_a_server_is_built_from_options(name):
    argv = [
        "--config",
        name.partition(".")[2],
        "--port",
        "0",
        "--backend.cache",
        "x",
        "--limits.models",
        "3",
    ]
    config = parse_cli(argv, default_module="tinker").config
    backend: TinkerBackend = config.backend.build()
    assert (config.port, config.limits.models, config.backend.cache) == (0, 3, "x")
    assert not hasattr(backend, "base_model")  # nothing is loaded before it starts


def commands_of_the_docs():
    text = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text().replace("\\\n", " ")
    found = [
        shlex.split(line)[3:]
        for line in re.findall(r"^ *python -m rl\.train .*$", text, re.MULTILINE)
    ]
    return [argv for argv in found if argv[1] in ("gsm8k", "reasoning", "verifiers_env")]


@pytest.mark.parametrize("argv", commands_of_the_docs(), ids=lambda argv: argv[1])
def test_commands_of_the_docs_are_parsed(argv):
    task = parse_cli(argv, default_module="sum_digits").config.task
    for option, value in zip(argv[::2], argv[1::2], strict=False):
        if option in ("--task.dataset", "--task.taskset"):
            assert value == getattr(task, option.removeprefix("--task."))
