"""Short chaos test: a generator, the trainer, a generator's host and the controller are killed."""

import json

import pytest

from tools.chaos import main


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_loss_is_recovered_with_the_same_numbers(tmp_path, capsys):
    status = main(["--cases", "fixed", "--folder", str(tmp_path), "--limit_s", "200"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert len(json.loads(printed.splitlines()[-1])["recovery_s"]) == 4
