"""Components of a run in the wrong place: refused in one line, before anything starts."""

import functools
import itertools

import pytest

from actors.trainer import PolicyTrainer
from configs import sum_digits
from losses.policy import GRPOLoss
from rl.config.cli import main
from rl.config.tree import ConfigError, rebuild
from rl.loop.warmup import SupervisedWarmup
from rl.models.float8 import Float8
from rl.models.lora import LoRA
from rl.training.optimizer import Optimizer

COMPONENTS = (
    "trainer", "generator", "reward", "timeouts", "launch", "recovery", "task", "warmup",
    "renderer", "weights",
    "loop", "recorder", "timeline", "limits", "sinks", "parity",
)  # fmt: skip


def changed(path, value):
    config = sum_digits.tiny()
    *parents, name = path.split(".")
    setattr(functools.reduce(getattr, parents, config), name, value)
    return config


def test_no_component_passes_for_another():
    right = sum_digits.tiny()
    for place, other in itertools.permutations(COMPONENTS, 2):
        with pytest.raises(ConfigError, match=f"^{place}="):
            rebuild(changed(place, getattr(right, other)))


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("trainer.loss", "grpo", "trainer.loss='grpo': must be Loss"),
        (
            "trainer.loss",
            GRPOLoss,
            "trainer.loss=GRPOLoss (the class; GRPOLoss() is an instance): must be Loss",
        ),
        ("trainer.loss", Optimizer.Config(), "trainer.loss=Optimizer.Config: must be Loss"),
        ("trainer.loss", None, "trainer.loss=None: must be Loss"),
        ("trainer.optimizer", Optimizer, "trainer.optimizer=Optimizer (the class; "),
        (
            "trainer.converters",
            (Optimizer.Config(),),
            "trainer.converters=tuple: must be tuple[ModelConverter.Config",
        ),
        ("trainer.converters", Float8.Config(), "trainer.converters=Float8.Config: must be tuple["),
        (
            "generator",
            PolicyTrainer.Config(),
            "generator=PolicyTrainer.Config: must be VLLMGenerator.Config",
        ),
        ("generator", None, "generator=None: must be VLLMGenerator.Config"),
        ("model", None, "hf_assets_path=None: must name a model"),
        ("model", "0.6B", "model='0.6B': must be ModelSpec | None"),
        ("loop.sampling", "greedy", "loop.sampling='greedy': must be Sampling"),
        ("task", None, "task=None: must be"),
        (
            "warmup",
            SupervisedWarmup,
            "warmup=SupervisedWarmup (the class; SupervisedWarmup() is an instance): must be",
        ),
        ("trainer.converters", LoRA, "trainer.converters=LoRA (the class; "),
        ("loop.num_steps", len, "loop.num_steps=<built-in function len>: must be int"),
    ],
)
def test_a_wrong_component_ends_the_command_in_one_line(
    monkeypatch, capsys, tmp_path, path, value, says
):
    config = changed(path, value)
    config.dump_folder = str(tmp_path)
    made = functools.wraps(sum_digits.tiny)(lambda: config)
    monkeypatch.setattr(sum_digits, "tiny", made)
    argv = ["--module", "sum_digits", "--config", "tiny"]
    try:
        status = main(argv, default_module="sum_digits", default_config="tiny", prog="test")
    except SystemExit as ended:
        status = int(ended.code or 0)
    error = capsys.readouterr().err
    assert status == 2
    assert error.startswith(f"error: {says}")
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())
