"""Recorded losses of ten steps of the tiny config, bit for bit, to show that a change of code changes no
number.

    make golden        # or: python -m tests.training.golden

writes those of this machine into golden.json and shows the old ones beside them. Bits depend on the build
of PyTorch and on which kernels it and its libraries take on a processor, so they are kept by these; all
are of one thread.
"""

from __future__ import annotations

import copy
import json
import platform
from pathlib import Path

import torch

from configs.sum_digits import tiny
from rl.training.engine import TrainingEngine
from rl.types import TrainingSample
from rl.utils.processes import use_threads
from tests.training.parts import make_sample

FILE = Path(__file__).with_name("golden.json")
NUM_STEPS = 10
NUM_SAMPLES = 8

Steps = list[list[float]]
"""Loss and gradient norm of each step."""


def machine() -> str:
    """Return the properties of this machine that the bits depend on."""
    capability = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {capability}, {_processor()}, 1 thread"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    names = [found[key] for key in ("model name", "cpu family", "model") if key in found]
    return " ".join(names) or platform.machine()


def samples_of(step: int) -> list[TrainingSample]:
    """Return random samples of 16 to 63 tokens."""
    return [
        make_sample(length=16 + (11 * i + 7 * step) % 48, seed=1000 * step + i) for i in range(NUM_SAMPLES)
    ]


def make_engine(option: str | None = None) -> TrainingEngine:
    """Return an engine of the tiny config with weights drawn from its seed."""
    root = tiny()
    config = copy.deepcopy(root.trainer)
    if option is not None:
        component, _, name = option.partition(".")
        if name == "selective_option":
            config.activation_checkpoint.mode = "selective"
        setattr(getattr(config, component), name, NEUTRAL[option])
    return TrainingEngine(config=config, model_spec=root.model, hf_assets_path=None, device="cpu")


def run_step(engine: TrainingEngine, step: int) -> list[float]:
    result = engine.forward_backward(samples_of(step))
    return [result.loss_mean, engine.optim_step().grad_norm]


def run_steps(option: str | None = None) -> Steps:
    engine = make_engine(option)
    try:
        return [run_step(engine, step) for step in range(NUM_STEPS)]
    finally:
        engine.close()
        torch.use_deterministic_algorithms(False)


NEUTRAL = {
    "reference.enable": True,
    "training.deterministic": True,
    "activation_checkpoint.mode": "full",
    "activation_checkpoint.selective_option": "op",
}
"""Options that must not change a bit, with a value; selective checkpointing needs its mode too."""


def recorded(file: Path = FILE) -> dict[str, Steps]:
    """Return the recorded numbers by machine."""
    return json.loads(file.read_text()) if file.exists() else {}


def renew(new: Steps, file: Path = FILE) -> None:
    """Write this machine's numbers and print them beside the old ones."""
    known = recorded(file)
    old = known.get(machine())
    print(machine())
    print(f"{'step':>4}  {'loss before':>24}  {'loss now':>24}  {'norm before':>24}  {'norm now':>24}")
    for step, (loss, norm) in enumerate(new):
        before = old[step] if old else ["-", "-"]
        mark = "" if before == [loss, norm] else "  changed" if old else "  new"
        print(f"{step:>4}  {before[0]!s:>24}  {loss!s:>24}  {before[1]!s:>24}  {norm!s:>24}{mark}")
    known[machine()] = new
    file.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


if __name__ == "__main__":
    use_threads(1)
    renew(run_steps())
