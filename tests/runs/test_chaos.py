"""Short chaos test: the trainer, twice, and a generator die in one run, a host and the controller
in another.
"""

import json

import pytest

from rl.observability.metrics import read_metrics
from tools.chaos import main


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_each_loss_is_recovered_with_the_same_numbers(tmp_path, capsys):
    status = main(["--cases", "fixed", "--folder", str(tmp_path), "--limit_s", "300"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    names = json.loads(printed.splitlines()[-1])["recovery_s"]
    assert len(names) == 2
    steps = [
        r for r in read_metrics(tmp_path / "undisturbed" / "metrics.jsonl") if "reward/mean" in r
    ]
    for step in steps:  # trainer and generator agree in every bit although the weights change
        assert step["logprob_diff/identical"] == 1
        assert step["logprob_diff/max"] == step["logprob_diff/mean"] == 0.0
        assert step["loss/grad_norm"] > 0
    weights = {
        (tmp_path / name / "checkpoints" / "hf" / "model.safetensors").read_bytes()
        for name in ("undisturbed", *names)
    }
    assert len(weights) == 1
