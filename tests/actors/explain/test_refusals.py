"""What a run would be refused for, or load, is said before it: as the run itself would say it."""

import re
from pathlib import Path
from typing import Any

import pytest

from actors.explain.arithmetic import step_arithmetic
from actors.explain.effects import run_effects
from actors.explain.explain import explain
from actors.explain.explanation import StepArithmetic, Unknown
from actors.explain.known import find_out, not_foreseen
from actors.explain.loaded import Loaded, find_loaded
from actors.explain.machine import Machine
from actors.explain.memory import memory
from actors.explain.options import messages
from actors.explain.prompts import prompt_checks
from actors.plan import make_plan
from configs.alphabet_sort import tiny as alphabet_sort
from configs.sum_digits import qwen3_32b, tiny
from rl.config.cli import parse_cli
from rl.config.effect import idle_fields
from rl.config.entry import main
from rl.config.registry import ResolvedRun
from rl.distributed.mesh import Degrees
from rl.loop_config import LoopConfig
from tests.actors.explain.golden import LAPTOP
from tests.training.test_own_checkpoint import save, truncate


def changed(base: Any, **edits: object) -> Any:
    """Of a config; `__` stands for a dot."""
    for path, value in edits.items():
        *parents, name = path.split("__")
        owner = base
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, value)
    return base


def refused_prompts(config: Any, *, warms_up: bool = True) -> list[str]:
    return messages(prompt_checks(find_out(config), warms_up=warms_up))


# Prompts of the tiny task have 24 tokens.
NO_ROOM = {"generator__max_model_len": 40, "loop__sampling__max_tokens": 39}


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        (NO_ROOM, "has 24 tokens; the context leaves room for 1 "),
        ({**NO_ROOM, "loop__long_prompts": "drop"}, "has 24 tokens; the context leaves room for 1 "),
        ({"loop__sampling__max_tokens": 4}, "loop.sampling.max_tokens=4: no reply could be as long"),
        ({"loop__max_sample_tokens": 24}, "loop.max_sample_tokens=24: must be from 25, "),
    ],
    ids=["prompts are too long", "all are left out", "demonstrations", "no sample is short enough"],
)
def test_lengths_that_a_run_is_refused_for_are_refused_in_its_words(tmp_path, edits, says):
    config = changed(tiny(), dump_folder=str(tmp_path / "outputs"), **edits)
    first, *_ = refused_prompts(config)
    assert says in first
    with pytest.raises(ValueError, match=re.escape(says)) as refused:
        make_plan(config)
    assert str(refused.value) == first
    assert list(tmp_path.iterdir()) == []


def test_prompts_that_are_too_long_are_refused_on_any_machine(capsys):
    options = ["--generator.max_model_len", "40", "--loop.sampling.max_tokens", "39", "--loop.long_prompts"]
    argv = ["--explain", *options, "drop"]
    assert main(argv, default_module="sum_digits", default_config="tiny", prog="test") == 2
    assert "has 24 tokens; the context leaves room for 1 " in capsys.readouterr().err


def test_an_option_is_not_refused_for_want_of_one_that_is_refused_itself(capsys):
    argv = [
        "--explain",
        "--launch.trainer_hosts",
        "2",
        "--launch.hosts",
        "kubernetes",
        "--loop.num_prompts",
        "0",
    ]
    with pytest.raises(SystemExit):
        parse_cli(argv, default_module="sum_digits", default_config="tiny")
    one, other = capsys.readouterr().err.splitlines()
    assert one.startswith("error: loop: num_prompts=0")
    # Not that there is one host with hosts='this'.
    assert (
        other == "error: launch: kubernetes.image=None: hosts='kubernetes' needs an image with this project"
    )


def test_a_search_for_prompts_that_fit_ends():
    assert find_out(changed(tiny(), **NO_ROOM, loop__long_prompts="drop")).prompts(4) is None


def test_no_demonstration_has_to_fit_where_none_is_shown():
    config = changed(tiny(), loop__sampling__max_tokens=4)
    assert refused_prompts(config) != []
    assert refused_prompts(config, warms_up=False) == []


# What is loaded


def folder_of_a_run(folder: Path, *, status: str = "running") -> Path:
    folder.mkdir()
    (folder / "status.json").write_text(f'{{"status": "{status}"}}')
    return folder


def loaded(folder: Path, **edits: object) -> Loaded:
    return find_loaded(changed(tiny(), **edits), resumes=folder)


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_damaged_checkpoint_is_passed_over_and_left_where_it_is(tmp_path):
    folder = folder_of_a_run(tmp_path / "mine")
    save(folder / "checkpoints", 20)
    truncate(save(folder / "checkpoints", 40) / "__0_0.distcp")
    before = files(tmp_path)
    found = loaded(folder)
    assert (found.done_steps, found.faults) == (20, ())
    (said,) = found.damaged
    assert said.startswith("step-40 would be set aside, and an earlier one taken: ")
    assert "__0_0.distcp is truncated" in said
    assert files(tmp_path) == before


def test_a_run_that_has_no_steps_left_is_refused(tmp_path):
    folder = folder_of_a_run(tmp_path / "mine", status="finished")
    save(folder / "checkpoints", 80)
    assert loaded(folder).faults == (
        f"{folder} holds a finished run of 80 steps: raise loop.num_steps=80 to go on with it",
    )
    assert (loaded(folder, loop__num_steps=100).faults, loaded(folder, loop__num_steps=100).done_steps) == (
        (), 80,
    )  # fmt: skip
    (fault,) = loaded(folder, loop__num_steps=60).faults
    assert "has done 80 steps already" in fault


def test_where_a_run_started_from_may_be_gone_when_it_goes_on(tmp_path):
    folder, gone = folder_of_a_run(tmp_path / "mine"), str(tmp_path / "gone")
    (fault,) = loaded(folder, trainer__checkpoint__initial_load_path=gone).faults
    assert fault == f"initial_load_path={gone}: there is no such folder"
    save(folder / "checkpoints", 20)
    assert loaded(folder, trainer__checkpoint__initial_load_path=gone).faults == ()


def test_a_folder_that_is_no_runs_is_refused(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    assert loaded(folder).faults == (f"{folder} is not the folder of a run: it has no status.json",)


def test_the_name_of_a_run_that_is_there_is_refused_unless_it_may_be_replaced(tmp_path):
    folder = folder_of_a_run(tmp_path / "mine", status="finished")
    config = changed(tiny(), dump_folder=str(tmp_path), name="mine")
    assert find_loaded(config, resumes=None).faults == (
        f"{folder} holds a finished run; choose another name, or --overwrite to replace it",
    )
    config.overwrite = True
    assert find_loaded(config, resumes=None).faults == ()


def test_what_is_loaded_is_part_of_the_explanation(tmp_path):
    folder = folder_of_a_run(tmp_path / "mine")
    truncate(save(folder / "checkpoints", 20) / "__0_0.distcp")
    save(folder / "checkpoints", 10, position=False)
    run = ResolvedRun(module="sum_digits", function="tiny", config=tiny(), resumes=folder)
    found = explain(run, here=LAPTOP)
    assert found.unknown[0].startswith("step-20 would be set aside")
    assert any("was not saved by a loop" in why for why in found.options.refused_here)


# What is beyond the numbers


def test_groups_and_samples_that_only_the_rollouts_leave_out_are_said_to_be_unknown():
    loop = LoopConfig(equal_groups="drop", max_sample_tokens=60, max_failed_rewards=0.5)
    assert [line.partition(" (")[0].partition(":")[0] for line in not_foreseen(loop)] == [
        "how many groups have equal rewards",
        "how many groups have a longer sample than loop.max_sample_tokens=60",
        "how many rewards fail",
    ]
    assert list(not_foreseen(LoopConfig())) == []


def test_replies_of_several_turns_are_bounded_by_the_turns_and_by_what_is_drawn():
    def step(**edits: object) -> StepArithmetic:
        known = find_out(changed(alphabet_sort(), **edits))
        return step_arithmetic(known, degrees=Degrees(dp_replicate=1, dp_shard=1, tp=1))

    found = step(loop__max_sample_tokens=100)
    # Longer ones are drawn as well: up to generator.max_model_len=160, less one token of the first prompt.
    assert (found.sample_tokens_most, found.reply_tokens_most) == (100, 256 * 159)
    found = step(loop__episode__max_turns=2, loop__sampling__max_tokens=20)
    assert found.reply_tokens_most == 256 * 2 * 20


def test_a_generator_without_room_for_its_longest_request_does_not_fit():
    config = changed(qwen3_32b(), generator__gpu_memory_utilization=1.0)
    known = find_out(config)
    refused = Unknown(why="not asked for")

    def generator(gpu_gb: float) -> Any:
        here = Machine(num_gpus=20, gpu_bytes=int(gpu_gb * 1e9), num_cores=64, memory_bytes=10**12)
        return memory(known, degrees=refused, machine=here, on_gpu=True).generator

    # 16.4 GB of weights on each of 4 ranks, and 65,536 bytes a token.
    small, large = generator(16.42), generator(16.6)
    assert 0 < small.cache_tokens < 1024 <= large.cache_tokens
    assert not small.fits
    assert large.fits


def test_settings_of_sinks_that_are_off_are_without_effect():
    config = changed(tiny(), limits__enable=False)
    idle = {idle.path for idle in idle_fields(config)}
    idle |= {path for path, _ in run_effects(find_out(config), on_gpu=False)}
    assert idle >= {"sinks.wandb.project", "sinks.trackio.group", "limits.cache", "sinks.write_s"}
    assert not idle & {"timeline.max_megabytes", "sinks.console.num_rows"}
    config.sinks.tensorboard.enable = True
    assert "sinks.write_s" not in {path for path, _ in run_effects(find_out(config), on_gpu=False)}
