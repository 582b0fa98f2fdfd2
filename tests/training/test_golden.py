"""Losses of ten steps of the tiny config, so that a refactoring shows whether it changes a number.

    make golden        # or: python -m tests.training.test_golden

writes the losses of this machine into golden.json and shows the old ones beside them. Bits depend
on the build of PyTorch and on which kernels it and its libraries take on a processor, so the record
is kept by these; all are of one thread. A machine that has a record must have its bits; any other
must agree with one of the records to 1e-5. Two virtual machines with one processor may differ by
1e-7, as their caches or flags do: then their record's name ends in a number, and a machine must
have the bits of one of them.
"""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.sum_digits import tiny
from losses.policy import GRPOLoss
from losses.types import LossInputs, LossOutput
from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.training.config import ReferenceConfig
from rl.training.engine import TrainingEngine
from rl.utils.processes import use_threads
from tests.support.distributed import run_ranks
from tests.training.parts import make_sample

pytestmark = pytest.mark.medium

FILE = Path(__file__).with_name("golden.json")
NUM_STEPS, NUM_SAMPLES = 10, 8
Steps = list[list[float]]
"""Loss and gradient norm of each step."""
TOLERANCE = 1e-5
"""Largest relative difference between two machines; records differ by less than 1e-6."""
NEUTRAL: dict[str, dict[str, Any]] = {
    "again": {},
    "reference policy": {"reference": ReferenceConfig(enable=True)},
    "deterministic": {"training": replace(tiny().trainer.training, deterministic=True)},
    "full checkpointing": {"activation_checkpoint": ActivationCheckpointConfig(mode="full")},
    "selective checkpointing": {
        "activation_checkpoint": ActivationCheckpointConfig(mode="selective")
    },
}
"""Fields of the trainer's config that must not change a bit."""


def machine() -> str:
    """Return the properties of this machine that the bits depend on."""
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    found = {key.strip(): value.strip() for key, _, value in lines}
    names = [found[key] for key in ("model name", "cpu family", "model") if key in found]
    processor = " ".join(names) or platform.machine()
    return (
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {processor}, 1 "
        "thread"
    )


@dataclass(kw_only=True, slots=True)
class PlantedLoss(GRPOLoss):
    """Loss that is wrong by a ten-thousandth."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        output = GRPOLoss.__call__(self, inputs)
        return replace(output, loss_sum=output.loss_sum * (1 + 1e-4))


def run_steps(**fields: Any) -> Steps:
    """Return loss and gradient norm of each step, on random samples of 16 to 63 tokens."""
    root = tiny()
    engine = TrainingEngine(
        config=replace(root.trainer, **fields),
        model_spec=root.model,
        hf_assets_path=None,
        device="cpu",
    )
    steps = []
    try:
        for step in range(NUM_STEPS):
            samples = [
                make_sample(length=16 + (11 * i + 7 * step) % 48, seed=1000 * step + i)
                for i in range(NUM_SAMPLES)
            ]
            steps.append(
                [engine.forward_backward(samples).loss_mean, engine.optim_step().grad_norm]
            )
    finally:
        engine.close()
        torch.use_deterministic_algorithms(False)
    return steps


def run_all() -> tuple[str, dict[str, Steps]]:
    """Return machine and steps by option, from a process with one thread from its start."""
    runs = {"plain": {}, **NEUTRAL, "planted": {"loss": PlantedLoss()}}
    return machine(), {name: run_steps(**fields) for name, fields in runs.items()}


def difference(steps: Steps, records: dict[str, Steps]) -> float:
    """Return the largest relative difference from the nearest record."""
    return min(
        max(
            abs(now - then) / abs(then)
            for pair in zip(steps, old, strict=True)
            for now, then in zip(*pair, strict=True)
        )
        for old in records.values()
    )


@pytest.fixture(scope="module")
def ran():
    ((machine, runs),) = run_ranks(run_all, 1, timeout_s=55)
    records = json.loads(FILE.read_text())
    own = {name: steps for name, steps in records.items() if name.partition(" #")[0] == machine}
    others = {name: steps for name, steps in records.items() if name not in own}
    return runs, list(own.values()), others or records


def test_two_runs_and_runs_with_neutral_options_have_the_same_bits(ran):
    runs, _, _ = ran
    assert len({loss for loss, _ in runs["plain"]}) == NUM_STEPS  # each step has other samples
    assert [name for name, steps in runs.items() if steps != runs["plain"]] == ["planted"]


def test_losses_are_those_recorded(ran):
    runs, own, others = ran
    hint = "if numbers were meant to change, `make golden` renews the record"
    assert not own or runs["plain"] in own, hint
    assert difference(runs["plain"], others) <= TOLERANCE, hint


def test_a_change_of_a_ten_thousandth_is_found_without_a_record_of_this_machine(ran):
    runs, _, others = ran
    assert difference(runs["planted"], others) > 5 * TOLERANCE


def renew() -> None:
    """Write this machine's numbers, print them beside the old ones, and drop the records that they
    contradict.
    """
    known, new = json.loads(FILE.read_text()), run_steps()
    old = known.get(machine(), [["-", "-"]] * NUM_STEPS)
    print(machine())
    print(
        f"{'step':>4}  {'loss before':>24}  {'loss now':>24}  {'norm before':>24}  {'norm now':>24}"
    )
    for step, (before, now) in enumerate(zip(old, new, strict=True)):
        columns = (before[0], now[0], before[1], now[1])
        print(
            f"{step:>4}",
            *(f"{number!s:>24}" for number in columns),
            "" if before == now else "changed",
            sep="  ",
        )
    known = {
        name: steps for name, steps in known.items() if difference(new, {name: steps}) <= TOLERANCE
    }
    known[machine()] = new
    FILE.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


if __name__ == "__main__":
    use_threads(1)
    renew()
