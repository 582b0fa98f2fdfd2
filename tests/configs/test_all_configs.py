"""Every shipped config of a run is complete and can be laid out; none of this needs a GPU."""

import importlib
import json
import pkgutil
from dataclasses import replace

import pytest
import torch

import configs
from actors.layout_checks import check_layout
from actors.task_checks import check_demonstrations, has_turns
from rl.config.registry import ResolvedRun, registry_functions
from rl.config.serialize import read_json, write_json
from rl.models.tokenizer import build_byte_tokenizer
from rl.rollouts.renderer import make_renderer
from rl.rollouts.tokenizer import open_tokenizer
from rl.rollouts.tried_environments import TriedEnvironments
from rl.tasks.generated import GeneratedTask
from rl.tasks.verifiers_task import VerifiersTask
from tests.support import chat_templates

GPU_MEMORY_BYTES = 80e9
SERVERS = ("tinker",)
"""Their configs are no runs: test_tinker.py."""
MODULES = sorted(m.name for m in pkgutil.iter_modules(configs.__path__) if m.name not in SERVERS)
CONFIGS = [
    f"{module}.{function}"
    for module in MODULES
    for function in sorted(registry_functions(importlib.import_module(f"configs.{module}")))
]
GPU_CONFIGS = [name for name in CONFIGS if ".qwen3_" in name]


def config_of(name):
    module, function = name.split(".")
    return registry_functions(importlib.import_module(f"configs.{module}"))[function]()


WARMED_UP = [
    name
    for name in CONFIGS
    if config_of(name).warmup is not None and isinstance(config_of(name).task, GeneratedTask.Config)
]


def test_every_module_has_a_config_and_the_promised_tasks_are_there():
    assert {name.partition(".")[0] for name in CONFIGS} == set(MODULES)
    assert {"sum_digits", "reverse_text", "alphabet_sort", "countdown"} <= set(MODULES)
    learnt = ("sum_digits", "reverse_text", "alphabet_sort")
    assert {f"{task}.{config}" for task in learnt for config in ("tiny", "tiny_noise")} <= set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_layout_lengths_and_heads_are_valid(name):
    config = config_of(name)
    spec = replace(config.model, batch_invariant=config.batch_invariant)
    check_layout(config.fleet, model_spec=spec, loop=config.loop, num_gpus=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_survives_its_json(name, tmp_path):
    config = config_of(name)
    path = tmp_path / "config.json"
    module, function = name.split(".")
    write_json(ResolvedRun(module=module, function=function, config=config), path)
    assert json.loads(path.read_text())["values"]["model"] == f"{config.model.name}/{config.model.flavor}"
    assert read_json(path).config == config


@pytest.mark.parametrize("name", CONFIGS)
def test_a_call_makes_a_config_of_its_own(name):
    first, second = config_of(name), config_of(name)
    assert first == second
    assert first.loop is not second.loop
    assert first.task is not second.task
    first.loop.num_steps += 1
    assert config_of(name) == second


@pytest.mark.parametrize("name", GPU_CONFIGS)
def test_gpu_configs_fit_80_gb_in_trainer_and_generator(name):
    config = config_of(name)
    degrees = config.trainer.parallelism.degrees(config.trainer.num_procs)
    need = config.trainer.estimate_memory(config.model, degrees=degrees, on_gpu=True)
    assert need.total < 0.9 * GPU_MEMORY_BYTES
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in config.model.model.build().parameters())
    per_rank = 2 * num_parameters / config.generator.tensor_parallel_degree
    assert per_rank < 0.6 * config.generator.gpu_memory_utilization * GPU_MEMORY_BYTES


@pytest.mark.parametrize("name", GPU_CONFIGS)
def test_a_task_for_a_model_that_was_not_taught_it_says_what_to_do(name):
    config = config_of(name)
    assert config.warmup is None
    if isinstance(config.task, GeneratedTask.Config):
        assert getattr(config.task, "instruction")  # noqa: B009  (of each of them, not of their base)


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    """Of the models that runs make themselves, with the tokens that end a reply."""
    folder = tmp_path_factory.mktemp("tokenizer")
    build_byte_tokenizer(folder)
    return open_tokenizer(folder)


@pytest.mark.parametrize("name", WARMED_UP)
def test_demonstrations_fit_the_lengths_of_a_config_that_warms_up_on_them(name, byte_tokenizer):
    config = config_of(name)
    tokenizer, ends = byte_tokenizer
    renderer = make_renderer(config.renderer, tokenizer=tokenizer, stop_token_ids=ends)
    task = config.task.build()
    check_demonstrations(
        task.warmup_problems(seed=config.seed),
        environments=TriedEnvironments(make=task.environment),
        renderer=renderer,
        max_tokens=config.loop.sampling.max_tokens,
        max_model_len=config.generator.max_model_len,
    )


def may_have_turns(config):
    """By an episode of the task where it can be made here: those of files and packages have one turn, but
    for verifiers', which may have any number."""
    if not isinstance(config.task, GeneratedTask.Config):
        return isinstance(config.task, VerifiersTask.Config)
    task = config.task.build()
    return has_turns(TriedEnvironments(make=task.environment), next(task.train_problems(seed=0)))


MULTI_TURN = [name for name in GPU_CONFIGS if may_have_turns(config_of(name))]


def test_gpu_configs_with_turns_are_these():
    assert {name.partition(".")[0] for name in MULTI_TURN} == {"alphabet_sort", "verifiers_env"}


@pytest.fixture(scope="module")
def qwen3_tokenizer(tmp_path_factory):
    """Bytes, with the chat template of Qwen3."""
    return chat_templates.byte_tokenizer(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.mark.parametrize("name", MULTI_TURN)
def test_gpu_configs_with_turns_go_on_after_a_reply_of_qwen3(name, qwen3_tokenizer):
    ends = (qwen3_tokenizer.eos_token_id,)
    renderer = make_renderer(config_of(name).renderer, tokenizer=qwen3_tokenizer, stop_token_ids=ends)
    renderer.check_multi_turn()


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.endswith(".tiny_noise")])
def test_a_control_differs_from_the_run_in_its_reward_alone(name):
    control, run = config_of(name), config_of(name.removesuffix("_noise"))
    assert (control.task.reward, run.task.reward) == ("noise", "answer")
    control.task.reward = "answer"
    control.description = run.description
    assert control == run
