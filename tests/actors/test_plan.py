import asyncio
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from actors.preflight.checks import Machine
from actors.preflight.explain import show
from actors.preflight.plan import collect_warmup_arithmetic, compute_dtypes, make_plan
from configs.sum_digits import tiny, tiny_fsdp2_tp2, tiny_moe
from examples.custom_trainer import tiny_annealed_clip
from rl.config.cli import parse_cli
from rl.config.json import write_json
from rl.models.float8 import Float8GroupedMM
from rl.tasks.fingerprint import make_fingerprint
from rl.training.checkpoints.files import read_state, sum_of_file, write_description
from rl.training.engine import TrainingEngine
from rl.training.optimizer import Optimizer
from rl.types import LoopPosition
from tests.support.fakes import FakePolicy
from tests.support.shared_client import Shared, asking


def test_dry_run_shows_the_placement_and_neither_starts_nor_writes_anything(tmp_path, capsys):
    options = [
        "--launch.dry_run",
        "true",
        "--generator.num_replicas",
        "2",
        "--dump_folder",
        str(tmp_path),
    ]
    hosts = ["--launch.hosts", "process", "--launch.trainer_hosts", "2"]
    request = parse_cli(
        [*options, *hosts], default_module="sum_digits", default_config="tiny_fsdp2", prog="relay"
    )
    request.config.build(request=request).run()
    assert capsys.readouterr().out.splitlines() == [
        "trainer: hosts 'trainer', 2 x 1 processes of 1 threads, no device of its own",
        "generator_0: hosts 'generator0', 1 x 1 processes of 2 threads, no device of its own",
        "generator_1: hosts 'generator1', 1 x 1 processes of 2 threads, no device of its own",
        "reward: where the controller runs, 1 x 1 processes of 1 threads, no device of its own",
    ]
    assert list(tmp_path.iterdir()) == []


# Runs that go on


def write_rows(folder, *, first=0):
    rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(first, 40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run of a file's problems that stopped after step 2."""
    folder = tmp_path_factory.mktemp("stopped")
    write_rows(folder)
    options = [
        "--task.train_files", str(folder / "rows.jsonl"), "--task.cache_folder",
        str(folder / "cache"),
        "--task.columns.demonstration", "None", "--dump_folder", str(folder), "--name", "run",
        "--warmup", "None",
    ]  # fmt: skip
    request = parse_cli(options, default_module="gsm8k", default_config="tiny", prog="relay")
    path = folder / "run"
    path.mkdir()
    write_json(request, path / "config.json")
    (path / "status.json").write_text('{"status": "running"}')
    engine = TrainingEngine(
        config=request.config.trainer,
        model_spec=request.config.model,
        hf_assets_path=None,
        device="cpu",
    )
    problems = make_fingerprint(request.config.task.build(), seed=request.config.seed)
    position = LoopPosition(step=2, num_problems=64, problems=problems)
    engine.save_checkpoint(str(path / "checkpoints" / "step-2"), position=position)
    return folder


def try_resume(folder, *options):
    arguments = ["--resume", str(folder / "run"), "--launch.dry_run", "true", *options]
    request = parse_cli(arguments, default_module="gsm8k", default_config="tiny", prog="relay")
    request.config.build(request=request).run()


def test_dry_run_of_a_resume_reads_the_checkpoint(stopped, capsys):
    before = {path: path.stat().st_mtime_ns for path in sorted((stopped / "run").rglob("*"))}
    try_resume(stopped, "--loop.num_steps", "77")
    said = capsys.readouterr().out
    assert f"going on after step 2 from {stopped}/run/checkpoints/step-2, which fits" in said
    assert "changed: loop.num_steps: " in said
    assert "dry_run" not in said
    assert {
        path: path.stat().st_mtime_ns for path in sorted((stopped / "run").rglob("*"))
    } == before
    with pytest.raises(ValueError, match=r"loop\.num_steps=1: must be at least 2"):
        try_resume(stopped, "--loop.num_steps", "1")


def test_resume_with_other_problems_is_refused_unless_it_is_accepted(stopped, tmp_path, capsys):
    folder = Path(shutil.copytree(stopped, tmp_path / "copy"))
    write_rows(folder, first=-1)
    file = ("--task.train_files", str(folder / "rows.jsonl"))
    with pytest.raises(
        ValueError, match=r"step-2 was saved by a run with other training problems: "
    ) as caught:
        try_resume(folder, *file)
    assert "the first difference is problem 1 (rows.jsonl:" in str(caught.value)
    assert "add problems to trainer.checkpoint.exclude_from_loading" in str(caught.value)
    with pytest.raises(
        ValueError, match="were shuffled by seed 'train 0', and are shuffled by seed 'train 5' now"
    ):
        try_resume(stopped, "--seed", "5")
    request = parse_cli(
        ["--resume", str(folder / "run"), *file],
        default_module="gsm8k",
        default_config="tiny",
        prog="relay",
    )
    capsys.readouterr()
    show(request, form="json", here=Machine.here())
    explained = json.loads(capsys.readouterr().out)
    assert any(
        "other training problems" in reason for reason in explained["options"]["refused_here"]
    )
    try_resume(folder, *file, "--trainer.checkpoint.exclude_from_loading", "problems")
    said = capsys.readouterr().out
    assert "going on after step 2" in said
    assert "going on with other problems: the first difference is problem 1 (rows.jsonl:" in said


def test_checkpoint_of_an_earlier_version_is_not_compared(stopped, tmp_path, capsys):
    folder = Path(shutil.copytree(stopped, tmp_path / "copy"))
    step = folder / "run" / "checkpoints" / "step-2"
    state = read_state(step)
    assert state.position is not None
    position = replace(state.position, problems=None)
    sums = {file.name: sum_of_file(file) for file in step.iterdir() if file.suffix != ".json"}
    write_description(step, replace(state, position=position), sums)
    text = json.loads((step / "state.json").read_text())
    del text["position"]["problems"]  # as it was written then
    (step / "state.json").write_text(json.dumps(text))
    write_manifest(step)
    try_resume(folder, "--seed", "5")
    assert (
        "does not say with which problems it was saved, so they are not compared"
        in capsys.readouterr().out
    )


def write_manifest(step):
    """Renew the checksum of state.json."""
    manifest = json.loads((step / "manifest.json").read_text())
    manifest["files"]["state.json"] = asdict(sum_of_file(step / "state.json"))
    (step / "manifest.json").write_text(json.dumps(manifest))


def test_warm_ups_are_told_apart_by_arithmetic_and_not_by_layout_or_learning_rate():
    config = tiny_fsdp2_tp2()
    config.trainer.optimizer = Optimizer.Config(lr=1.0)
    assert collect_warmup_arithmetic(config.trainer) == collect_warmup_arithmetic(tiny().trainer)
    # The effect of a custom trainer's own settings is unknown.
    first, second = tiny_annealed_clip().trainer, tiny_annealed_clip().trainer
    assert collect_warmup_arithmetic(first) == collect_warmup_arithmetic(second)
    second.final_max_norm = 0.05  # type: ignore[attr-defined]
    assert collect_warmup_arithmetic(first) != collect_warmup_arithmetic(second)


def test_bound_of_parity_knows_converters_to_float8():
    config = tiny_moe()
    assert compute_dtypes(config.trainer, generator_dtype="float32") == ("float32", "float32")
    config.trainer.converters = (Float8GroupedMM.Config(emulate=True),)
    dtypes = compute_dtypes(config.trainer, generator_dtype="float32")
    assert dtypes == ("float32", "float32", "float8")


def test_warm_up_runs_in_the_threads_that_checked_the_task(tmp_path):
    config = asking()
    config.dump_folder = str(tmp_path)
    plan = make_plan(config)
    assert isinstance(plan.task, Shared)
    assert config.warmup is not None
    (client,) = plan.task.clients
    policy = FakePolicy(reply=lambda prompt, sample: "")
    warmup = config.warmup.build(
        trainer=policy, renderer=plan.renderer, environments=plan.environments
    )
    losses: list[float] = []
    asyncio.run(warmup.run(plan.task.warmup_problems(seed=0), on_step=losses.append))
    assert len(losses) == 2
    assert plan.task.clients == [client]
    assert plan.environments.step_timeout_s == 20.0
