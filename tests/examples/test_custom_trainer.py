import math

import pytest

from examples.custom_trainer import AnnealedClipEngine, AnnealedClipTrainer, tiny_annealed_clip
from losses.cross_entropy import CrossEntropyLoss
from rl.config.cli import parse_cli
from rl.config.json import read_json, write_json
from rl.training.config import TrainingConfig
from rl.training.optimizer import Optimizer
from rl.types import OptimParams
from tests.training.parts import make_samples, small_spec

ARGV = ["--module", "examples.custom_trainer", "--config", "tiny_annealed_clip"]
SAMPLES = make_samples()
LR = 1e4
"""Adam whose step is the clipped gradient itself: a huge eps and no running means."""


@pytest.fixture
def engine():
    """The clip norm falls from 0.4 to 0.1 in four steps."""
    config = AnnealedClipTrainer.Config(
        optimizer=Optimizer.Config(lr=LR, betas=(0.0, 0.0), eps=LR, weight_decay=0.0),
        training=TrainingConfig(max_norm=0.4),
        final_max_norm=0.1,
        anneal_steps=4,
    )
    return AnnealedClipEngine(config=config, model_spec=small_spec(), hf_assets_path=None, device="cpu")


def step_norm(engine, params=None):
    """Return how far one step moves the weights; its gradient exceeds every clip norm here."""
    before = {name: p.detach().clone() for name, p in engine.policy.parameters.items()}
    engine.forward_backward(SAMPLES, loss=CrossEntropyLoss())
    assert engine.optim_step(params).grad_norm > 0.5
    moved = [(p.detach() - before[name]).double() for name, p in engine.policy.parameters.items()]
    return math.sqrt(sum(float(difference.square().sum()) for difference in moved))


def test_new_field_is_an_option_and_survives_the_config_file(tmp_path):
    run = parse_cli([*ARGV, "--trainer.final_max_norm", "0.05"], default_module="sum_digits")
    assert type(run.config.trainer) is AnnealedClipTrainer.Config
    expected = tiny_annealed_clip()
    assert isinstance(expected.trainer, AnnealedClipTrainer.Config)
    assert expected.trainer.final_max_norm == 0.2
    expected.trainer.final_max_norm = 0.05
    assert run.config == expected

    write_json(run, tmp_path / "config.json")
    again = read_json(tmp_path / "config.json")
    assert type(again.config.trainer) is AnnealedClipTrainer.Config
    assert again == run


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("anneal_steps", "0", "anneal_steps=0: must be at least 1"),
        ("final_max_norm", "0", "final_max_norm=0.0: must be above 0"),
        ("final_max_norm", "nan", "final_max_norm=nan: must be above 0"),
        ("num_procs", "0", "num_procs=0: must be at least 1"),  # the parent's check
    ],
)
def test_invalid_settings_are_refused(option, value, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_cli([*ARGV, f"--trainer.{option}", value], default_module="sum_digits")
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"error: trainer: {message}\n"


def test_clip_norm_falls_to_its_final_value_and_stays_there(engine):
    norms = [step_norm(engine) for _ in range(6)]
    assert norms == pytest.approx([0.4, 0.325, 0.25, 0.175, 0.1, 0.1], rel=1e-3)


def test_clip_norm_of_the_call_goes_before_the_annealed_one(engine):
    assert step_norm(engine, OptimParams(max_norm=0.3)) == pytest.approx(0.3, rel=1e-3)
    # Other settings of the call leave the annealing as it is.
    assert step_norm(engine, OptimParams(lr=LR / 2)) == pytest.approx(0.325 / 2, rel=1e-3)
