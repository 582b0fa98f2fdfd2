"""Explanations of a run that has not started."""

import json

import psutil
import pytest

from actors.preflight.arithmetic import bound_staleness, compute_step_arithmetic, describe_memory
from actors.preflight.checks import Machine
from actors.preflight.explain import explain, show
from actors.preflight.summary import summarize
from configs.sum_digits import qwen3_32b, tiny
from rl.config.cli import main, parse_cli
from rl.config.configurable import find_idle_options
from rl.config.json import write_json
from rl.config.registry import RunRequest
from rl.config.tree import rebuild
from rl.loop.config import LoopConfig
from rl.run_rules import RULES
from tests.support.checkpoints import save, truncate
from tests.support.explained import LAPTOP, explained
from tests.support.fakes import SimulatedPolicy
from tests.support.gguf_files import random_tensors, write_gguf
from tests.support.loops import run, some_right


def start(*options):
    return main(list(options), default_module="sum_digits", default_config="tiny", prog="test")


def changed(**edits):
    """Edit the tiny config; `__` in a keyword stands for a dot."""
    return rebuild(tiny(), {path.replace("__", "."): value for path, value in edits.items()})


def test_explaining_neither_starts_nor_writes_anything(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    children = set(psutil.Process().children())
    assert start("--explain", "json", "--loop.num_steps", "7") == 0
    assert set(psutil.Process().children()) == children
    assert list(tmp_path.iterdir()) == []
    found = json.loads(capsys.readouterr().out)
    assert (found["values"]["loop.num_steps"], found["step"]["samples"]) == (7, 256)
    assert found["changes"] == {"loop.num_steps": {"value": 7, "registry": 80}}
    assert found["values"]["trainer.optimizer.betas"] == [0.9, 0.95]
    assert found["memory"]["trainer_rank"]["parameters_gb"] == 0.00312  # 4 * 779,328 bytes
    assert (found["devices"], found["options"]["refused"]) == ("CPU cores of this machine", [])
    assert found["options"]["refused_here"] == []
    assert start("--explain", "full") == 0
    assert "\nstaleness:\n  steps_most: 0\n  policy_versions_most: 0\n" in capsys.readouterr().out


def test_explanation_without_a_form_is_twelve_lines(capsys):
    options = ("--steps", "7", "--parity.enable", "false", "--parity.num_tokens", "5")
    assert start("--explain", *options) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 12
    summary = {line[0]: line[1] for line in lines}
    assert summary["config"] == "sum_digits.tiny; --explain full has every value"
    assert summary["model"] == "qwen3 tiny, 779 thousand parameters"
    assert summary["devices"] == "CPU cores of this machine"
    assert summary["processes"] == "trainer 1, generators 1, reward 1"
    assert summary["step"] == (
        "32 prompts x 8 = 256 samples, 1 optimizer step, at most 0 steps off-policy"
    )
    assert summary["run"] == (
        "7 steps, 1,792 samples, evaluated every 20 steps, saved every 500 and at the end"
    )
    assert summary["changed"] == (
        "loop.num_steps 7 instead of 80, parity.enable False instead of True, parity.num_tokens 5 "
        "instead of 32; without effect: parity.num_tokens"
    )
    assert summary["data"] == "problems of SumDigits"
    assert summary["refused"] == "nothing: this run can start here"


def test_summary_names_the_layout_the_memory_and_what_is_refused():
    found = explained("--config", "qwen3_32b")
    summary = dict(line.split(maxsplit=1) for line in summarize(found).splitlines())
    assert summary["model"] == "qwen3 32B, 32.8 billion parameters"
    assert summary["devices"] == "20 GPUs of 80 GB: this machine has 0"
    assert summary["processes"] == (
        "trainer 16 (dp_shard 4 x tp 4), generators 1 of 4 each, reward 1, on GPUs 0 to 19"
    )
    assert summary["refused"] == "here for 1 reason, below"
    assert summary["memory"].endswith("of 80.0 GB")
    refused = explained("--loop.kl_reward.coef", "0.5")
    assert "\nrefused      anywhere for 1 reason, below" in summarize(refused)


def test_many_changes_are_counted():
    options = ["--loop.num_steps", "7", "--loop.eval_every", "3", "--seed", "4", "--name", "x" * 60]
    (line,) = [line for line in summarize(explained(*options)).splitlines() if "changed" in line]
    assert line.count(" instead of ") == 3
    assert line.endswith(" and 1 more")


def test_run_that_could_not_start_here_ends_with_the_reason_and_status_2(capsys):
    request = parse_cli(
        ["--config", "qwen3_32b"], default_module="sum_digits", default_config="tiny"
    )
    for form in ("text", "full", "json"):
        assert show(request, form=form, here=LAPTOP) == 2
        captured = capsys.readouterr()
        assert "20 GPUs of 80 GB" in captured.out
        assert captured.err == (
            "error: this run could not start here: it needs 20 GPUs, and this machine has 0\n"
        )


def test_gpu_that_is_too_small_is_a_reason():
    small = Machine(
        num_gpus=8, gpu_bytes=10**9, gpu_capability=(8, 0), num_cores=8, memory_bytes=10**12
    )
    (reason,) = explained("--config", "qwen3_8b", here=small)["options"]["refused_here"]
    assert reason.startswith("qwen3 8B needs ")
    assert reason.endswith("; a GPU of this machine has 1 GB")


def test_missing_model_is_a_reason_and_status_2(tmp_path, capsys):
    assert start("--explain", "--hf_assets_path", str(tmp_path / "nowhere")) == 2
    captured = capsys.readouterr()
    assert "refused      here for 1 reason, below" in captured.out
    says = f"error: this run could not start here: hf_assets_path='{tmp_path}/nowhere': "
    assert captured.err.startswith(says)


def test_resumed_run_lists_what_differs_from_its_registry_function(tmp_path):
    folder = tmp_path / "mine"
    save(folder / "checkpoints", 20)
    (folder / "status.json").write_text('{"status": "running"}')
    config = changed(name="elsewhere", trainer__optimizer__lr=1e-3, warmup=None)
    write_json(
        RunRequest(module="sum_digits", function="tiny", config=config), folder / "config.json"
    )
    found = explained("--resume", str(folder), "--loop.num_steps", "100")
    assert {
        "loop.num_steps",
        "name",
        "dump_folder",
        "trainer.optimizer.lr",
        "warmup.num_steps",
    } < set(found["changes"])
    assert {path.name for path in folder.iterdir()} == {"checkpoints", "config.json", "status.json"}


def test_32b_config_on_a_laptop_is_laid_out_on_assumed_gpus():
    found = explained("--config", "qwen3_32b")
    assert found["devices"] == "20 GPUs of 80 GB: this machine has 0"
    layout = found["layout"]
    assert layout["trainer"]["gpus"] == (*range(16),)
    assert layout["trainer_mesh"] == {"dp_shard": 4, "tp": 4}
    assert layout["generator"]["gpus"] == (16, 17, 18, 19)
    assert (found["values"]["batch_invariant"], found["values"]["launch.share_gpus"]) == (
        False,
        False,
    )
    # 32,762,123,264 parameters: in float32 over 16 ranks, and in bfloat16 over 4.
    rank, publish = found["memory"]["trainer_rank"], found["memory"]["publish"]
    assert (rank["parameters_gb"], rank["gradients_gb"], rank["optimizer_gb"]) == (8.19, 8.19, 16.4)
    assert rank["fits"]
    assert publish == {"pushed_gb": 65.5, "pulled_by_rank_gb": 16.4}
    assert found["options"]["refused"] == []
    assert found["options"]["refused_here"] == ["it needs 20 GPUs, and this machine has 0"]
    assert "Qwen/Qwen3-32B, which a run would download" in found["not_checked"]
    assert found["step"]["trained_tokens_most"] == 256 * 1023


def test_model_that_only_a_file_describes_is_not_prepared(tmp_path, capsys):
    file = write_gguf(tmp_path / "a.gguf", random_tensors())
    options = ("--module", "examples.custom_model", "--config", "granite")
    location = ("--dump_folder", str(tmp_path))
    start("--explain", "json", *options, *location, "--hf_assets_path", str(file))
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["model"].startswith("llama")
    assert f"{file}, which a run would convert" in found["not_checked"]
    assert "Converting" not in captured.err
    assert list(tmp_path.iterdir()) == [file]


def test_all_refusals_are_printed_and_a_run_stops_at_the_first(capsys):
    options = [
        "--trainer.num_procs", "3", "--trainer.parallelism.tensor_parallel_degree", "3",
        "--generator.max_model_len", "4096", "--loop.kl_reward.coef", "0.5",
    ]  # fmt: skip
    assert start("--explain", "full", *options) == 2
    captured = capsys.readouterr()
    faults = [line.removeprefix("error: ") for line in captured.err.splitlines()]
    for message in (
        "trainer.training.max_tokens_per_microbatch=2048: must be at least "
        "generator.max_model_len=4096",
        "trainer.reference.enable=False: must be True with loop.kl_reward.coef=0.5",
        "trainer.parallelism.tensor_parallel_degree=3 does not divide num_kv_heads=4",
        "generator.max_model_len=4096 is more than the model's max_positions=1024",
    ):
        assert sum(fault.startswith(message) for fault in faults) == 1, message
    assert start(*options) == 2
    assert capsys.readouterr().err == f"error: {faults[0]}\n"
    # Values that do not depend on the refused options are still shown.
    assert "samples_of_run: 20480" in captured.out


def test_damaged_checkpoint_and_load_errors_are_named_and_left_in_place(tmp_path):
    folder = tmp_path / "mine"
    truncate(save(folder / "checkpoints", 20) / "__0_0.distcp")
    save(folder / "checkpoints", 10, position=False)
    (folder / "status.json").write_text('{"status": "running"}')
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    run = RunRequest(module="sum_digits", function="tiny", config=tiny(), resumes=folder)
    found = explain(run, here=LAPTOP)
    assert found["not_checked"][0].startswith("step-20 would be set aside")
    assert any("was not saved by a loop" in fault for fault in found["options"]["refused_here"])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_options_without_effect_are_told_apart():
    found = explained("--parity.enable", "false", "--parity.num_tokens", "5")["options"]
    assert found["set_without_effect"] == ["parity.num_tokens"]
    idle = {
        "parity.max_logprob_diff", "launch.slurm.*", "generator.rank_timeout_s",
        "trainer.parallelism.loss_parallel", "sinks.close_s",
    }  # fmt: skip
    assert idle < set(found["without_effect"])
    assert "sinks.close_s" not in find_idle_options(changed(sinks__tensorboard__enable=True))


def test_every_rule_is_shown_with_its_state():
    rules = explained("--loop.kl_reward.coef", "0.5")["rules"]
    reference = "trainer.reference.enable True with"
    assert rules[f"{reference} loop.kl_reward.coef above 0"] == "broken"
    assert rules[f"{reference} trainer.loss.kl_coef above 0"] == "not applying"
    assert rules["loop.sampling.max_tokens below generator.max_model_len"] == "held"
    assert len(rules) == len(RULES)


def test_long_samples_and_minibatches_count_in_the_arithmetic_of_a_step():
    config = changed(loop__max_sample_tokens=100, loop__num_minibatches=2)
    step = compute_step_arithmetic(config.loop, max_model_len=config.generator.max_model_len)
    assert (step["samples_of_optimizer_step"], step["trained_tokens_most"]) == (128, 256 * 99)


def test_generator_without_room_for_its_longest_request_does_not_fit():
    config = qwen3_32b()
    spec = config.model
    assert spec is not None
    config.generator.gpu_memory_utilization = 1.0

    def generator(gpu_gb):
        machine = Machine(
            num_gpus=20, gpu_bytes=int(gpu_gb * 1e9), num_cores=64, memory_bytes=10**12
        )
        described = describe_memory(
            config.trainer, config.generator, spec=spec, machine=machine, on_gpu=True
        )
        return described["generator_rank"]

    # 16.4 GB of weights on each of 4 ranks, and 65,536 bytes of cache a token.
    small, large = generator(16.42), generator(16.6)
    assert 0 < small["cache_tokens"] < 1024 <= large["cache_tokens"]
    assert not small["fits"]
    assert large["fits"]


@pytest.mark.parametrize(("max_off_policy_steps", "num_minibatches"), [(0, 2), (2, 2)])
def test_staleness_bound_is_kept_and_reached(max_off_policy_steps, num_minibatches):
    settings = {"max_off_policy_steps": max_off_policy_steps, "num_minibatches": num_minibatches}
    bound = bound_staleness(LoopConfig(**settings))
    policy = SimulatedPolicy(reply=some_right, generate_s=lambda prompt: 0.5, train_s=2.0)
    records, _ = run(policy, num_steps=8, groups_per_batch=2, **settings)
    assert max(policy.staleness_of_tokens) == bound["policy_versions_most"]
    assert max(record["staleness/max"] for record in records) == bound["steps_most"]
