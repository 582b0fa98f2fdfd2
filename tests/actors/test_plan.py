import asyncio

from actors.plan import compute_dtypes, make_plan, warmup_arithmetic
from configs.sum_digits import tiny, tiny_fsdp2_tp2, tiny_moe
from examples.custom_trainer import tiny_annealed_clip
from rl.config.cli import parse_cli
from rl.models.float8 import Float8GroupedMM
from rl.training.optimizer import Optimizer
from tests.support.fakes import FakePolicy
from tests.support.shared_client import Shared, asking


def test_dry_run_shows_the_placement_and_neither_starts_nor_writes_anything(tmp_path, capsys):
    options = ["--launch.dry_run", "true", "--generator.num_replicas", "2", "--dump_folder", str(tmp_path)]
    hosts = ["--launch.hosts", "process", "--launch.trainer_hosts", "2"]
    run = parse_cli(
        [*options, *hosts], default_module="sum_digits", default_config="tiny_fsdp2", prog="relay"
    )
    run.config.build(run=run).run()
    assert capsys.readouterr().out.splitlines() == [
        "trainer: hosts 'trainer', 2 x 1 processes of 1 threads, no device of its own",
        "generator_0: hosts 'generator0', 1 x 1 processes of 2 threads, no device of its own",
        "generator_1: hosts 'generator1', 1 x 1 processes of 2 threads, no device of its own",
        "reward: where the controller runs, 1 x 1 processes of 1 threads, no device of its own",
    ]
    assert list(tmp_path.iterdir()) == []


def test_warm_ups_are_told_apart_by_arithmetic_and_not_by_layout_or_learning_rate():
    config = tiny_fsdp2_tp2()
    config.trainer.optimizer = Optimizer.Config(lr=1.0)
    assert warmup_arithmetic(config.trainer) == warmup_arithmetic(tiny().trainer)
    # The effect of a custom trainer's own settings is unknown.
    first, second = tiny_annealed_clip().trainer, tiny_annealed_clip().trainer
    assert warmup_arithmetic(first) == warmup_arithmetic(second)
    second.final_max_norm = 0.05  # type: ignore[attr-defined]
    assert warmup_arithmetic(first) != warmup_arithmetic(second)


def test_bound_of_parity_knows_converters_to_float8():
    config = tiny_moe()
    assert compute_dtypes(config) == ("float32", "float32")
    config.trainer.converters = (Float8GroupedMM.Config(emulate=True),)
    assert compute_dtypes(config) == ("float32", "float32", "float8")


def test_warm_up_runs_in_the_threads_that_checked_the_task(tmp_path):
    config = asking()
    config.dump_folder = str(tmp_path)
    plan = make_plan(config)
    assert isinstance(plan.task, Shared)
    assert config.warmup is not None
    (client,) = plan.task.clients
    policy = FakePolicy(reply=lambda prompt, sample: "")
    warmup = config.warmup.build(trainer=policy, renderer=plan.renderer, environments=plan.environments)
    losses: list[float] = []
    asyncio.run(warmup.run(plan.task.warmup_problems(seed=0), on_step=losses.append))
    assert len(losses) == 2
    assert plan.task.clients == [client]
    assert plan.environments.step_timeout_s == 20.0
