"""What is said of a run before it starts, and what is not done for it."""

import dataclasses
import importlib
import json
import pkgutil
from pathlib import Path

import pytest

import configs
from actors.explain.explanation import Range, Unknown
from actors.explain.machine import Machine
from actors.explain.text import as_text
from configs.sum_digits import tiny
from rl.config.entry import main
from rl.config.registry import ResolvedRun, registry_functions
from rl.config.serialize import write_json
from rl.config.tree import walk
from tests.actors.explain.golden import FILE, LAPTOP, explained, text
from tests.training.test_own_checkpoint import save

GPU_MACHINE = Machine(num_gpus=8, gpu_bytes=141 * 10**9, num_cores=64, memory_bytes=10**12)


def start(*options, module="sum_digits", config="tiny"):
    return main(list(options), default_module=module, default_config=config, prog="test")


def test_the_tiny_config_is_explained_as_it_was():
    assert text() == FILE.read_text(), "if it is meant to differ: python -m tests.actors.explain.golden"


def children():
    tasks = Path("/proc/self/task").glob("*/children")
    return {child for task in tasks for child in task.read_text().split()}


def test_nothing_is_started_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = children()
    assert start("--explain") == 0
    assert "One step" in capsys.readouterr().out
    assert children() == before
    assert list(tmp_path.iterdir()) == []


def test_a_form_for_machines_holds_the_same(capsys):
    assert start("--explain", "json", "--loop.num_steps", "7") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"]["num_steps"] == 7
    assert found["step"]["samples"] == 256
    assert found["config"]["changes"] == [
        {"path": "loop.num_steps", "value": 7, "registry": 80, "source": "command line"}
    ]
    assert found["memory"]["trainer"]["parts"]["parameters"] == 4 * 779_328


def test_a_config_that_is_no_run_has_no_explanation(capsys):
    assert start("--explain", module="tinker") == 2
    assert capsys.readouterr().err == (
        "error: --explain: tinker.tiny is no training run: start it to see it\n"
    )


# Where values come from


def test_a_value_of_a_file_and_one_of_the_command_line_are_told_apart(tmp_path):
    config = tiny()
    config.loop.num_steps, config.trainer.optimizer.lr, config.warmup = 5, 1e-3, None
    file = tmp_path / "config.json"
    write_json(ResolvedRun(module="sum_digits", function="tiny", config=config), file)
    changes = explained("--from_json", str(file), "--loop.num_steps", "6").config.changes
    assert {(c.path, c.value, c.registry, c.source) for c in changes if not c.path.startswith("warmup.")} == {
        ("loop.num_steps", 6, 80, "command line"),
        ("trainer.optimizer.lr", 1e-3, 4e-5, str(file)),
        ("warmup", None, None, str(file)),
    }
    assert {c.source for c in changes if c.path.startswith("warmup.")} == {str(file)}


def test_a_component_that_the_command_line_turns_off_is_its_doing():
    changes = explained("--warmup", "None").config.changes
    assert {change.source for change in changes} == {"command line"}


def test_a_run_that_goes_on_says_after_which_step(tmp_path):
    folder = tmp_path / "mine"
    for step in (20, 40):
        save(folder / "checkpoints", step)
    (folder / "status.json").write_text('{"status": "running"}')
    config = tiny()
    config.name = "elsewhere"
    write_json(ResolvedRun(module="sum_digits", function="tiny", config=config), folder / "config.json")
    found = explained("--resume", str(folder), "--loop.num_steps", "100")
    assert (found.run.done_steps, found.run.num_steps) == (40, 100)
    assert {(c.path, c.source) for c in found.config.changes} == {
        ("name", str(folder / "config.json")),
        ("dump_folder", str(folder / "config.json")),
        ("loop.num_steps", "command line"),
    }
    assert {path.name for path in folder.iterdir()} == {"checkpoints", "config.json", "status.json"}


# GPU configs on a laptop


def test_the_32b_config_is_laid_out_on_gpus_that_a_laptop_has_not():
    found = explained("--config", "qwen3_32b")
    assert (found.devices.on_gpu, found.devices.num_gpus, found.devices.gpu_bytes) == (True, 20, 80 * 10**9)
    assert found.devices.assumed.startswith("20 GPUs of 80 GB, as this machine has none, and 16 GB of memory")
    trainer, generator, _ = found.layout
    assert [(rank.gpu, rank.group) for rank in trainer.ranks] == [
        (gpu, f"shard {gpu // 4}") for gpu in range(16)
    ]
    assert [rank.gpu for rank in generator.ranks] == [16, 17, 18, 19]
    # 32,762,123,264 parameters: in float32 over 16 ranks, and in bfloat16 over 4.
    assert found.memory.trainer.parts["parameters"] == 4 * 32_762_123_264 // 16
    assert found.memory.trainer.parts["optimizer"] == 2 * found.memory.trainer.parts["gradients"]
    assert found.memory.trainer.fits
    assert found.sync.pushed == 2 * 32_762_123_264
    assert found.sync.pulled_by_rank == pytest.approx(found.sync.pushed / 4, rel=1e-4)
    assert found.options.refused == ()
    missing, large = found.options.refused_here
    assert missing == (
        "hf_assets_path='assets/Qwen3-32B': Hugging Face folder assets/Qwen3-32B does not exist"
    )
    assert large.startswith("qwen3 32B needs ")


def test_the_30b_a3b_config_says_where_its_experts_are():
    found = explained("--config", "qwen3_30b_a3b")
    trainer = found.layout[0]
    assert trainer.shape == "16 shards, experts over groups of 8"
    assert found.devices.num_gpus == 18
    # 30,532,122,624 parameters, and a float32 bias for each of 128 experts of 48 layers.
    assert found.sync.pushed == 2 * 30_532_122_624 + 4 * 48 * 128
    assert found.memory.trainer.fits
    assert found.memory.generator.fits
    (note,) = [note for note in found.options.idle if note.path == "trainer.training.share_prompts"]
    assert note.why == "a mixture of experts counts each sample's prompt"


def test_prompts_of_a_model_that_is_not_there_are_bounds_and_said_to_be():
    found = explained("--config", "qwen3_32b")
    assert isinstance(found.step.prompt_tokens, Unknown)
    assert not found.step.exact_prompts
    assert found.step.trained_tokens == Range(fewest=256, most=256 * 1023)
    assert found.step.micro_batches == Range(fewest=1, most=16)
    assert any(said.startswith("the lengths of prompts: there is no tokenizer") for said in found.unknown)
    assert found.run.eval_problems == {"held_out": 256}


def test_a_machine_with_gpus_is_taken_as_it_is_if_it_has_enough():
    found = explained("--config", "qwen3_8b", here=GPU_MACHINE)
    assert (found.devices.assumed, found.devices.num_gpus) == ("", 8)
    assert found.memory.trainer.available == 141 * 10**9
    found = explained("--config", "qwen3_32b", here=GPU_MACHINE)
    assert found.devices.assumed == "20 GPUs of this machine's kind, which has 8"
    assert "need 20 GPUs, this machine has 8" in " ".join(found.options.refused_here)


def test_a_gpu_that_is_too_small_is_named_with_both_sizes():
    small = dataclasses.replace(GPU_MACHINE, gpu_bytes=24 * 10**9)
    found = explained("--config", "qwen3_8b", here=small)
    assert not found.memory.trainer.fits
    assert any("its device has 24 GB" in reason for reason in found.options.refused_here)


def test_hosts_of_a_cluster_bring_their_gpus():
    hosts = ["--launch.hosts", "slurm", "--launch.trainer_hosts", "2"]
    found = explained("--config", "qwen3_32b", *hosts)
    assert found.devices.assumed == "GPUs of 80 GB on the hosts of slurm"
    trainer, generator, reward = found.layout
    assert [(rank.host, rank.gpu) for rank in trainer.ranks] == [
        (host, gpu) for host in range(2) for gpu in range(8)
    ]
    assert (trainer.hosts, generator.hosts, reward.hosts) == ("trainer", "generator0", None)


def names_of_runs():
    modules = [m.name for m in pkgutil.iter_modules(configs.__path__) if m.name != "tinker"]
    for module in sorted(modules):
        for function in registry_functions(importlib.import_module(f"configs.{module}")):
            yield pytest.param(module, function, id=f"{module}.{function}")


@pytest.mark.medium
@pytest.mark.parametrize(("module", "function"), list(names_of_runs()))
def test_every_shipped_config_is_explained_on_a_laptop_and_could_run_somewhere(module, function):
    found = explained("--module", module, "--config", function)
    assert found.options.refused == ()
    # What is made here needs no files.
    assert found.options.refused_here == () or not function.startswith("tiny")
    assert found.memory.trainer.fits
    assert found.memory.generator.fits
    assert found.devices.on_gpu == bool(found.devices.assumed)
    assert found.devices.on_gpu or found.memory.trainer.available == LAPTOP.memory_bytes
    assert f"{module}.{function}: " in as_text(found)


# What is refused


def test_all_that_is_refused_is_said_and_the_exit_status_is_that_of_a_refused_run(capsys):
    options = [
        "--trainer.num_procs", "3", "--trainer.parallelism.tensor_parallel_degree", "3",
        "--generator.max_model_len", "4096", "--loop.kl_reward.coef", "0.5",
        "--weights.timeout_s", "900",
    ]  # fmt: skip
    assert start("--explain", *options) == 2
    captured = capsys.readouterr()
    faults = [line.removeprefix("error: ") for line in captured.err.splitlines()]
    for said in (
        "trainer.parallelism.tensor_parallel_degree=3 does not divide the 4 key-value heads of qwen3 tiny",
        "generator.max_model_len=4096 is more than the model's max_positions=1024",
        "trainer.training.max_tokens_per_microbatch=2048 is less than generator.max_model_len=4096",
        "loop.kl_reward.coef=0.5 needs the reference policy",
        "weights.timeout_s=900 is more than timeouts.sync_s=600",
    ):
        assert sum(fault.startswith(said) for fault in faults) == 1, said
    # A run says the first of them.
    assert start(*options) == 2
    assert capsys.readouterr().err == f"error: {faults[0]}\n"
    # What does not depend on them is there.
    assert "32 prompts x 8 = 256" in captured.out


def test_degrees_that_do_not_multiply_leave_the_rest_to_be_seen(capsys):
    assert start("--explain", "--trainer.num_procs", "2", "--trainer.parallelism.data_parallel_shard_degree",
                 "3") == 2  # fmt: skip
    captured = capsys.readouterr()
    assert captured.err.count("does not multiply to the world size of 2 processes") == 1
    assert captured.out.count("not known: parallelism.data_parallel_replicate_degree=1 x") == 3
    assert "publishes    81 of the weights" in captured.out


def test_a_bad_value_is_the_error_of_a_run(capsys):
    for options in (["--loop.num_prompts", "0"], ["--loop.num_steps", "many"], ["--loop.nonsense", "1"]):
        said = []
        for argv in (options, ["--explain", *options]):
            with pytest.raises(SystemExit) as stopped:
                start(*argv)
            assert stopped.value.code == 2
            said.append(capsys.readouterr().err)
        assert said[0] == said[1]
        assert said[0].startswith("error: ")


def test_files_that_are_missing_are_refused_here_and_nowhere_else(capsys):
    assert start("--explain", "--config", "qwen3_0_6b", module="gsm8k") == 0
    out = capsys.readouterr().out
    assert "task: 'data/gsm8k/" in out
    assert "refused on any machine: none" in out
    assert "of how many problems is not known: the task is not loaded here" in out


def test_an_option_that_is_set_in_vain_is_set_apart_from_others_without_effect():
    found = explained("--canary.enable", "false", "--canary.num_tokens", "5", "--loop.max_policy_age", "1")
    in_vain = {note.path: note.why for note in found.options.set_in_vain}
    assert in_vain["canary.num_tokens"] == "with canary.enable=False"
    idle = {note.path: note.why for note in found.options.idle}
    assert idle["canary.max_logprob_diff"] == "with canary.enable=False"
    assert idle["launch.slurm.*"] == "with launch.hosts='this'"
    assert "generator.on_update" not in idle
    assert "generator.on_update" in {note.path for note in explained().options.idle}


def test_every_option_whose_docstring_says_that_it_is_refused_is_among_those_that_are():
    says_so = {entry.path for entry in walk(tiny()) if "refused" in entry.doc.lower()}
    found = explained().options
    named = {note.path for note in (*found.fixed, *found.idle, *found.set_in_vain)}
    # Of these numbers one alone is refused.
    assert says_so - named == {"trainer.checkpoint.keep_latest_k"}
    assert len(says_so) >= 9


def test_options_that_have_no_effect_or_are_refused_beside_others_are_told_from_those_that_can_be_set():
    fixed = {note.path for note in explained().options.fixed}
    assert fixed >= {
        "trainer.lr_scheduler.min_ratio", "trainer.loss.kl_estimator", "trainer.experts.load_balance_rate",
        "trainer.optimizer.muon.momentum", "loop.sampling.top_p", "weights.folder",
    }  # fmt: skip
    assert not {"loop.num_steps", "trainer.optimizer.lr", "generator.dtype", "batch_invariant"} & fixed
