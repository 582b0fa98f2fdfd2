"""The snippets of docs/stopped_runs.md, run as they stand."""

import re
from pathlib import Path

import pytest

from configs.sum_digits import tiny
from rl.models.qwen3 import model_registry
from rl.models.starting_point import write_random_model
from rl.training.engine import TrainingEngine
from rl.training.failures import write_batch
from tests.training.parts import make_samples

DOCUMENT = Path(__file__).parents[2] / "docs" / "stopped_runs.md"
SAMPLES = make_samples(3)


def start_engine(start: Path) -> TrainingEngine:
    return TrainingEngine(
        config=tiny().trainer, model_spec=model_registry("tiny"), hf_assets_path=str(start), device="cpu"
    )


def losses(engine: TrainingEngine) -> list[float]:
    return [engine.forward_backward([sample]).loss_sum for sample in SAMPLES]


@pytest.fixture
def stopped(tmp_path):
    """What the snippets name: a batch, the folder that the run started from, a checkpoint of step 12."""
    run = tmp_path / "outputs" / "try-1"
    write_batch(run / "nan_batch_version_12.npz", SAMPLES)
    start = write_random_model(
        tmp_path / "outputs" / "starting_points" / "qwen3-tiny-warm-0123456789ab",
        spec=model_registry("tiny"),
        seed=0,
    )
    engine = start_engine(start)
    for _ in range(12):
        engine.forward_backward(SAMPLES)
        engine.optim_step()
    engine.save_checkpoint(str(run / "checkpoints" / "step-12"))
    return start, engine


def test_snippets_find_each_samples_loss_from_the_start_and_from_a_checkpoint(
    stopped, tmp_path, monkeypatch, capsys
):
    start, trained = stopped
    whole, loading = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(whole, names)
    largest, *printed = capsys.readouterr().out.splitlines()
    assert float(largest) == max(abs(s.advantages).max() for s in SAMPLES)
    assert printed == [f"{number} {loss}" for number, loss in enumerate(losses(start_engine(start)))]
    exec(loading, names)
    engine = names["engine"]
    assert isinstance(engine, TrainingEngine)
    assert engine.policy_version == 12
    assert losses(engine) == losses(trained)
