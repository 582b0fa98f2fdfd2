from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.preflight.plan import find_untrained_start
from configs import sum_digits
from rl.config.tree import rebuild
from rl.loop.warmup import SupervisedWarmup
from rl.models.files.hf import write_random_model
from rl.models.qwen3 import model_registry
from rl.models.spec import model_spec
from rl.protocols import Environment
from rl.rollouts.environment import Environments, SingleTurn
from rl.rollouts.samples import make_demonstration_samples_now
from rl.starting_point import (
    NUM_KEYED_DEMONSTRATIONS,
    StartingPoint,
    describe_random_model,
    find_warm_model,
    open_model_folder,
)
from rl.tasks.sum_digits import SumDigits
from rl.training.engine import TrainingEngine
from rl.types import Problem
from tests.support.conversations import Factory
from tests.support.fakes import RENDERER

SPEC = model_registry("tiny")


def planned(
    cache: Path,
    *,
    task: SumDigits.Config | None = None,
    environment: Callable[[Problem], Environment] | None = None,
    **changes: Any,
) -> StartingPoint:
    built = (task or SumDigits.Config(num_integers=2)).build()
    problems = islice(built.warmup_problems(seed=0), NUM_KEYED_DEMONSTRATIONS)
    arguments: dict[str, Any] = {
        "spec": SPEC,
        "seed": 0,
        "warmup": SupervisedWarmup.Config(),
        "demonstrations": make_demonstration_samples_now(
            problems, Environments(make=environment or built.environment), renderer=RENDERER
        ),
        "arithmetic": {"dtypes": "float32"},
    }
    return find_warm_model(cache, **(arguments | changes))


def test_planning_writes_nothing_and_knows_its_tokenizer(tmp_path):
    start = planned(tmp_path / "cache")
    _, stop_ids = start.tokenizer()
    assert stop_ids == (256, 258)
    assert not (tmp_path / "cache").exists()


def test_a_kept_warm_up_is_the_start_of_the_next_run(tmp_path):
    first = planned(tmp_path)
    assert first.warmed_up is not None
    assert first.folder == describe_random_model(tmp_path, spec=SPEC, seed=0).folder
    write_random_model(first.warmed_up, spec=SPEC, seed=7)  # stands for the warmed-up weights
    second = planned(tmp_path)
    assert second == StartingPoint(folder=first.warmed_up, spec=SPEC)
    second.make()  # nothing left to make


@pytest.mark.parametrize(
    ("change", "shared"),
    [
        ({"task": SumDigits.Config(num_integers=2, reward="noise")}, True),
        ({"task": SumDigits.Config(num_integers=2, num_eval=64, format_reward=0.5)}, True),
        ({"task": SumDigits.Config(num_integers=2, haste=0.5)}, False),
        ({"task": SumDigits.Config(num_integers=3)}, False),
        ({"seed": 1}, False),
        ({"warmup": SupervisedWarmup.Config(num_steps=10)}, False),
        ({"arithmetic": {"dtypes": "bfloat16"}}, False),
        ({"environment": lambda problem: SingleTurn(problem=problem, system="Add.")}, False),
        ({"spec": replace(SPEC, model=rebuild(SPEC.model, {"num_layers": 2}))}, False),
    ],
)
def test_runs_whose_warm_up_is_the_same_share_its_result(tmp_path, change, shared):
    assert (planned(tmp_path, **change).warmed_up == planned(tmp_path).warmed_up) is shared


def test_messages_between_the_replies_shape_the_warm_up(tmp_path):
    two_turns = [Problem(id="p", question="q", answer="b", demonstration=("a", "b"))]

    def folder(answer: str) -> Path | None:
        environments = Environments(make=Factory(turns=1, says=answer))
        samples = make_demonstration_samples_now(two_turns, environments, renderer=RENDERER)
        return planned(tmp_path, demonstrations=samples).warmed_up

    assert folder("go on") == folder("go on")
    assert folder("go on") != folder("go on then")


def test_folder_decides_family_and_sizes_unless_the_config_does(tmp_path):
    llama = model_spec("llama", "tiny")
    folder = write_random_model(tmp_path / "some-llama", spec=llama, seed=0)
    start = open_model_folder(folder, spec=None, batch_invariant=True)
    assert start.spec == replace(llama, flavor="some-llama", batch_invariant=True)
    assert open_model_folder(folder, spec=llama).spec == llama
    with pytest.raises(
        ValueError, match="model_type='llama', not 'qwen3': set any_model_size=True"
    ):
        open_model_folder(folder, spec=SPEC)
    config = sum_digits.tiny()
    config.hf_assets_path, config.batch_invariant = str(folder), True
    assert find_untrained_start(config) == start
    config.float32_head = True
    assert find_untrained_start(config).spec == replace(start.spec, float32_head=True)
    config.float32_head = False
    config.model, config.any_model_size = None, False
    assert find_untrained_start(config) == start
    config.hf_assets_path = None
    with pytest.raises(ValueError, match="hf_assets_path=None: must name a model"):
        find_untrained_start(config)
    engine = TrainingEngine.Config().build(
        model_spec=None, hf_assets_path=str(folder), device="cpu"
    )
    assert engine.policy.spec == replace(llama, flavor="some-llama")


def test_fields_that_change_no_result_of_the_weights_are_the_folders(tmp_path):
    changes = {"rope.max_positions": 2048, "init_std": 0.5, "norm_eps": torch.tensor(1e-6).item()}
    like = replace(SPEC, model=rebuild(SPEC.model, changes))
    assert like.model.norm_eps != SPEC.model.norm_eps
    folder = write_random_model(tmp_path / "like", spec=like, seed=0)
    assert open_model_folder(folder, spec=SPEC).spec == like
