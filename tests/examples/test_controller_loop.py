import asyncio
from dataclasses import replace

import pytest

from examples.controller_loop import train
from rl.observability.run_folder import read_status
from rl.tasks.sum_digits import SumDigits
from tests.support.faulty_configs import short
from tests.support.runs import SHORT, run_to_the_end


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_script_over_open_run_has_the_numbers_of_a_controller_run(tmp_path):
    options = ["--loop.drop_zero_advantage_groups", "False", "--limits.enable", "False"]
    run = run_to_the_end(tmp_path, "controller", *SHORT, *options, limit_s=200)
    assert run.status == 0, run.output
    config = short()
    assert isinstance(config.task, SumDigits.Config)
    config.dump_folder, config.name = str(tmp_path), "script"
    config.task = replace(config.task, reward="noise")
    config.limits.enable = False
    config.loop = replace(config.loop, drop_zero_advantage_groups=False)
    history = asyncio.run(train(config))
    rewards, norms = zip(*history, strict=True)
    assert list(rewards) == pytest.approx([step["reward/mean"] for step in run.steps], abs=1e-12)
    assert list(norms) == [step["loss/grad_norm"] for step in run.steps]
    assert min(norms) > 0
    assert read_status(tmp_path / "script") == "finished"
