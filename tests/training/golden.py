"""Losses of ten steps of the tiny config, bit for bit: what a change of code that should change no number
is held against.

    make golden        # or: python -m tests.training.golden

writes those of this machine into golden.json and shows the old ones beside them. Bits depend on the build
of PyTorch and on which kernels it and its libraries take on a processor, so they are kept by these; all
are of one thread.
"""

from __future__ import annotations

import copy
import json
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from configs.sum_digits import tiny
from rl.distributed.threads import use_threads
from rl.training.engine import TrainingEngine
from rl.types import TrainingSample
from tests.training.parts import make_sample

FILE = Path(__file__).with_name("golden.json")
NUM_STEPS = 10
NUM_SAMPLES = 8

Steps = list[list[float]]
"""Loss and gradient norm of each step."""


def machine() -> str:
    """What the bits depend on."""
    capability = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {capability}, {_processor()}, 1 thread"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    names = [found[key] for key in ("model name", "cpu family", "model") if key in found]
    return " ".join(names) or platform.machine()


def samples_of(step: int) -> list[TrainingSample]:
    """Random tokens, between 16 and 63 of them."""
    return [
        make_sample(length=16 + (11 * i + 7 * step) % 48, seed=1000 * step + i) for i in range(NUM_SAMPLES)
    ]


def make_engine(edit: Callable[[TrainingEngine.Config], None] | None = None) -> TrainingEngine:
    """Of the tiny config, with weights from its seed."""
    root = tiny()
    config = copy.deepcopy(root.trainer)
    if edit is not None:
        edit(config)
    return TrainingEngine(config=config, model_spec=root.model, hf_assets_path=None, device="cpu")


def run_step(engine: TrainingEngine, step: int) -> list[float]:
    result = engine.forward_backward(samples_of(step))
    return [result.loss_mean, engine.optim_step().grad_norm]


def run_steps(edit: Callable[[TrainingEngine.Config], None] | None = None) -> Steps:
    engine = make_engine(edit)
    try:
        return [run_step(engine, step) for step in range(NUM_STEPS)]
    finally:
        engine.close()
        torch.use_deterministic_algorithms(False)


def run_steps_with_a_resume() -> Steps:
    """Half of them, a checkpoint, and the rest in another engine."""
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine()
        steps = [run_step(engine, step) for step in range(NUM_STEPS // 2)]
        engine.save_checkpoint(f"{folder}/half")
        other = make_engine()
        other.load_checkpoint(f"{folder}/half")
        return steps + [run_step(other, step) for step in range(NUM_STEPS // 2, NUM_STEPS)]


def _collect_garbage(config: TrainingEngine.Config) -> None:
    config.training.gc_every_steps = 1


def _watch_reference(config: TrainingEngine.Config) -> None:
    config.reference.enable = True


def _deterministic(config: TrainingEngine.Config) -> None:
    config.training.deterministic = True


def _bound_lengths(config: TrainingEngine.Config) -> None:
    config.training.max_sequence_length = 63


def _checkpoint_activations(config: TrainingEngine.Config) -> None:
    config.activation_checkpoint.mode = "full"


def _checkpoint_activations_by_op(config: TrainingEngine.Config) -> None:
    config.activation_checkpoint.mode = "selective"


NEUTRAL = {
    "gc_every_steps": _collect_garbage,
    "reference without weight": _watch_reference,
    "deterministic": _deterministic,
    "max_sequence_length": _bound_lengths,
    "activation_checkpoint full": _checkpoint_activations,
    "activation_checkpoint selective": _checkpoint_activations_by_op,
}
"""Options that must not change a bit, and how they are set."""


def recorded(file: Path = FILE) -> dict[str, Steps]:
    """By machine."""
    return json.loads(file.read_text()) if file.exists() else {}


def renew(new: Steps, file: Path = FILE) -> None:
    """Write this machine's numbers; print them beside those that were there."""
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
