"""The check `parity` with a CPU in place of the GPU."""

import math

import pytest
import torch

from tools.gpu_check import parity
from tools.gpu_check.parity import Case
from tools.gpu_check.report import Report


@pytest.mark.medium
def test_a_cpu_gives_its_own_numbers_in_every_case():
    report = Report()
    parity.parity(report, device="cpu")
    assert report.faults == []
    assert len(report.figures) == 2 * len(parity.GRADIENTS) + len(parity.UPDATES) + 6
    in_float32 = {name: value for name, value in report.figures.items() if "float16" not in name}
    assert max(in_float32.values()) < 1e-4


def test_another_gradient_and_an_error_are_faults_of_their_case(monkeypatch):
    monkeypatch.setattr(
        parity,
        "GRADIENTS",
        {
            "other weights": Case(training={"seed": 1}),
            "no option": Case(training={"no_option": 1}),
        },
    )
    monkeypatch.setattr(parity, "UPDATES", {})
    for name in ("_compare_early_steps", "_compare_after_sleep", "_compare_samplers"):
        monkeypatch.setattr(parity, name, lambda *_: None)
    report = Report()
    parity.parity(report, device="cpu")
    faults = "\n".join(report.faults)
    assert "the gradient, other weights differs by" in faults
    assert "gradient, no option: TypeError" in faults


def test_the_worst_parameter_counts_and_nan_stays():
    wanted = {"large": torch.tensor([30.0, 40.0]), "small": torch.tensor([0.3, 0.4])}
    got = {"large": torch.tensor([30.0, 40.0]), "small": torch.tensor([0.3, 0.5])}
    assert parity._find_worst_error(got, wanted) == pytest.approx(0.2)
    got["large"][0] = float("nan")
    assert math.isnan(parity._find_worst_error(got, wanted))
