"""The short chaos test: a generator, the trainer, a generator's host and the controller are killed."""

import json

import pytest

from tools.chaos.main import main


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_loss_is_recovered_with_the_same_numbers_and_no_rollout_lost_or_doubled(tmp_path, capsys):
    status = main(["--cases", "fixed", "--folder", str(tmp_path), "--limit_s", "200"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    told = json.loads(printed.splitlines()[-1])
    assert (told["cases"], told["good"], told["lost"], told["doubled"], told["unequal"]) == (4, 4, 0, 0, 0)
    # How long they took is for `make chaos` on a machine that does nothing else.
    assert set(told["slowest_recovery_s"]) == {"generator", "trainer", "host", "controller"}, told
