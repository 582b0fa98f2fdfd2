from actors.plan import starting_point, tried_environments, warmup_arithmetic
from configs.sum_digits import tiny, tiny_fsdp2_tp2
from examples.custom_trainer import tiny_annealed_clip
from rl.config.cli import parse_cli
from rl.rollouts.renderer import RendererConfig
from rl.training.optimizer import Optimizer


def test_a_dry_run_shows_who_runs_where_and_neither_starts_nor_writes_anything(tmp_path, capsys):
    options = ["--launch.dry_run", "true", "--generator.num_replicas", "2", "--dump_folder", str(tmp_path)]
    hosts = ["--launch.hosts", "process", "--launch.trainer_hosts", "2"]
    run = parse_cli(
        [*options, *hosts], default_module="sum_digits", default_config="tiny_fsdp2", prog="relay"
    )
    run.config.build(run=run).run()
    assert capsys.readouterr().out.splitlines() == [
        "# trainer: hosts 'trainer', 2 x 1 processes of 1 threads, no device of its own",
        "# generator_0: hosts 'generator0', 1 x 1 processes of 2 threads, no device of its own",
        "# generator_1: hosts 'generator1', 1 x 1 processes of 2 threads, no device of its own",
        "# reward: where the controller runs, 1 x 1 processes of 1 threads, no device of its own",
    ]
    assert list(tmp_path.iterdir()) == []


def test_every_layout_and_learning_rate_shares_the_warm_up():
    config = tiny_fsdp2_tp2()
    config.trainer.optimizer = Optimizer.Config(lr=1.0)
    assert warmup_arithmetic(config.trainer) == warmup_arithmetic(tiny().trainer)
    assert "added" not in warmup_arithmetic(tiny().trainer)


def test_a_trainer_of_ones_own_has_a_warm_up_for_every_setting_that_it_adds():
    first, second = tiny_annealed_clip().trainer, tiny_annealed_clip().trainer
    assert warmup_arithmetic(first) == warmup_arithmetic(second)
    second.final_max_norm = 0.05  # type: ignore[attr-defined]
    assert warmup_arithmetic(first)["added"]["final_max_norm"] == 0.2
    assert warmup_arithmetic(second)["added"]["final_max_norm"] == 0.05


def test_demonstrations_that_become_other_tokens_have_a_warm_up_of_their_own(tmp_path):
    config = tiny()
    config.dump_folder = str(tmp_path)
    folders = []
    for renderer in (RendererConfig(), RendererConfig(kind="raw"), RendererConfig(kind="raw", system="Add.")):
        config.renderer = renderer
        task = config.task.build()
        environments = tried_environments(config, task=task)
        start = starting_point(config, task=task, environments=environments, source=None)
        folders.append(start.warmed_up)
    assert len(set(folders)) == 3
