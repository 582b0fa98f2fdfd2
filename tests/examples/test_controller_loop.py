import asyncio
from dataclasses import replace

import pytest

from configs.sum_digits import tiny
from examples.controller_loop import train
from rl.observability.run_files import read_status
from tests.support.runs import run_to_the_end

NUM_STEPS = 3
OPTIONS = {
    "loop.num_steps": NUM_STEPS,
    "loop.eval_every": 0,
    "loop.groups_per_batch": 4,
    "loop.drop_zero_advantage_groups": False,
    "warmup.num_steps": 60,
    "limits.enable": False,
}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_script_over_open_run_has_the_numbers_of_a_controller_run(tmp_path):
    options = [word for name, value in OPTIONS.items() for word in (f"--{name}", str(value))]
    run = run_to_the_end(tmp_path, "controller", *options, limit_s=300)
    assert run.status == 0, run.output
    config = tiny()
    assert config.warmup is not None
    config.dump_folder, config.name, config.warmup.num_steps = str(tmp_path), "script", 60
    config.limits.enable = False
    config.loop = replace(
        config.loop, num_steps=NUM_STEPS, eval_every=0, groups_per_batch=4, drop_zero_advantage_groups=False
    )
    history = asyncio.run(train(config))
    rewards, norms = zip(*history, strict=True)
    assert list(rewards) == pytest.approx([step["reward/mean"] for step in run.steps], abs=1e-12)
    assert list(norms) == [step["loss/grad_norm"] for step in run.steps]
    assert read_status(tmp_path / "script") == "finished"
