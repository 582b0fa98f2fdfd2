"""A run that is continued compares with the reference policy that it had, or is refused."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from losses.grpo import GRPOLoss
from rl.distributed.mesh import ParallelismConfig
from rl.models.converters.lora import LoRA
from rl.training.checkpoint_config import CheckpointConfig, LoadSource, find_load_source
from rl.training.checkpoint_files import read_state
from rl.types import LoopPosition
from tests.support.distributed import run_ranks
from tests.training.layouts import whole_gradients
from tests.training.parts import engine_config, make_engine, make_samples, small_spec, write_assets

SAMPLES = make_samples()


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return write_assets(tmp_path_factory.mktemp("assets") / "model")


@pytest.fixture
def earlier(assets, tmp_path):
    """What a run of two steps left: a checkpoint, and a folder of Hugging Face."""
    engine = make_engine(assets)
    for _ in range(2):
        engine.forward_backward(SAMPLES)
        engine.optim_step()
    engine.save_checkpoint(str(tmp_path / "earlier" / "step-2"))
    engine.export_hf(str(tmp_path / "earlier" / "hf"))
    return tmp_path / "earlier"


def engine_of(assets, checkpoint=None, *, enable=True, lora=False, **training):
    config = engine_config(**training)
    config.loss = GRPOLoss(kl_coef=0.3 if enable else 0.0)
    config.reference.enable = enable
    config.checkpoint = replace(config.checkpoint, **(checkpoint or {}))
    config.converters = (LoRA.Config(rank=2),) if lora else ()
    return config.build(model_spec=small_spec(), hf_assets_path=assets, device="cpu")


def started(assets, **settings):
    """As a run starts, and starts again by the same command."""
    engine = engine_of(assets, **settings)
    source = find_load_source(engine.config.checkpoint)
    assert source is not None
    engine.load_checkpoint(str(source.path), model_only=source.model_only)
    return engine


def step(engine):
    engine.forward_backward(SAMPLES)
    engine.optim_step()


def measured(engine):
    """KL, loss and gradients of the next step."""
    result = engine.forward_backward(SAMPLES)
    gradients = {name: p.grad for name, p in engine.policy.trained_parameters.items()}
    return result.loss_metrics["kl"], result.loss_sum, gradients


def assert_same_bits(actual, expected):
    assert actual[:2] == expected[:2]
    for name, gradient in expected[2].items():
        assert torch.equal(actual[2][name], gradient), name


def save(engine, folder):
    position = LoopPosition(step=engine.policy_version, num_problems=13)
    engine.save_checkpoint(str(folder / f"step-{engine.policy_version}"), position=position)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("step-2", {}),
        ("hf", {}),
        ("step-2", {"param_dtype": "bfloat16"}),
        ("hf", {"param_dtype": "bfloat16"}),
        ("hf", {"lora": True}),
    ],
)
def test_a_run_with_an_initial_path_keeps_its_reference_policy_when_it_is_continued(
    assets, earlier, tmp_path, name, settings
):
    path = str(earlier / name)
    checkpoint = {"initial_load_path": path, "initial_load_in_hf": name == "hf"}
    checkpoint["folder"] = str(tmp_path / "own")
    undisturbed = started(assets, checkpoint=checkpoint, **settings)
    step(undisturbed)
    save(undisturbed, tmp_path / "own")
    continued = started(assets, checkpoint=checkpoint, **settings)
    assert continued.policy_version == 1
    expected = measured(undisturbed)
    assert expected[0] > 1e-4
    assert_same_bits(measured(continued), expected)
    # Not what the engine was made from: that would be another number.
    other = engine_of(assets, **settings)
    assert measured(other)[0] == 0.0


def continued_and_undisturbed(assets, earlier, folder):
    settings = {
        "checkpoint": {"initial_load_path": str(earlier / "step-2"), "folder": str(folder)},
        "parallelism": ParallelismConfig(data_parallel_shard_degree=2),
    }
    undisturbed = started(assets, **settings)
    step(undisturbed)
    save(undisturbed, folder)
    continued = started(assets, **settings)
    return [(measured(engine)[:2], whole_gradients(engine)) for engine in (continued, undisturbed)]


@pytest.mark.medium
def test_sharded_reference_policies_are_loaded_again_too(assets, earlier, tmp_path):
    answers = run_ranks(continued_and_undisturbed, 2, assets, earlier, tmp_path / "own", timeout_s=100)
    for actual, expected in answers:
        assert actual[0] == expected[0]
        assert actual[0][0] > 1e-4
        for name, gradient in expected[1].items():
            np.testing.assert_array_equal(actual[1][name], gradient)


def test_the_reference_policy_is_kept_through_two_continuations(assets, earlier, tmp_path):
    first = started(assets, checkpoint={"initial_load_path": str(earlier / "step-2")})
    step(first)
    save(first, tmp_path / "first")
    second = {"initial_load_path": str(tmp_path / "first"), "initial_load_model_only": False}
    undisturbed = started(assets, checkpoint=second)
    step(undisturbed)
    save(undisturbed, tmp_path / "second")
    third = started(assets, checkpoint={"folder": str(tmp_path / "second")})
    assert_same_bits(measured(third), measured(undisturbed))
    assert read_state(tmp_path / "second" / "step-2").started_from == str(earlier / "step-2")


def test_an_engine_that_has_the_reference_policy_already_needs_nothing_else(assets, tmp_path):
    gone = tmp_path / "assets"
    shutil.copytree(assets, gone)
    engine = engine_of(str(gone))
    step(engine)
    save(engine, tmp_path / "saved")
    expected = measured(engine)
    shutil.rmtree(gone)
    engine.load_checkpoint(str(tmp_path / "saved" / "step-1"))
    assert_same_bits(measured(engine), expected)


def test_a_reference_policy_whose_weights_are_gone_is_refused_and_nothing_is_loaded(
    assets, earlier, tmp_path
):
    engine = started(assets, checkpoint={"initial_load_path": str(earlier / "step-2")})
    step(engine)
    save(engine, tmp_path / "own")
    shutil.rmtree(earlier)
    again = engine_of(assets)
    before = {name: tensor.clone() for name, tensor in again.model_state_dict().items()}
    with pytest.raises(
        ValueError, match=rf"reference\.enable=True: .* started from {earlier}/step-2, .* not"
    ):
        again.load_checkpoint(str(tmp_path / "own" / "step-1"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in again.model_state_dict().items())
    assert again.policy_version == 0
    # A new comparison, or none, is possible.
    assert again.load_checkpoint(str(tmp_path / "own" / "step-1"), model_only=True) == 0
    assert measured(again)[0] == 0.0
    assert engine_of(assets, enable=False).load_checkpoint(str(tmp_path / "own" / "step-1")) == 1


def test_a_start_from_more_than_one_folder_cannot_be_found_again(assets, earlier, tmp_path):
    engine = engine_of(assets)
    engine.load_checkpoint(str(earlier / "step-2"), model_only=True, exclude=["model.norm.weight"])
    step(engine)
    save(engine, tmp_path / "own")
    with pytest.raises(ValueError, match="step-1 does not name one folder that its run started from"):
        engine_of(assets).load_checkpoint(str(tmp_path / "own" / "step-1"))


def test_a_policy_that_keeps_weights_of_its_own_is_compared_with_no_other_start(assets, earlier, tmp_path):
    engine = started(assets, checkpoint={"initial_load_path": str(earlier / "step-2")})
    step(engine)
    save(engine, tmp_path / "own")
    checkpoint = str(tmp_path / "own" / "step-1")
    with pytest.raises(ValueError, match=r"exclude_from_loading=\('model\.norm',\) with reference\.enable"):
        engine_of(assets).load_checkpoint(checkpoint, exclude=["model.norm"])
    assert engine_of(assets).load_checkpoint(checkpoint, exclude=["optimizer"]) == 1


def test_weights_drawn_from_another_seed_are_not_taken_for_the_reference(tmp_path):
    engine = engine_of(None)
    step(engine)
    save(engine, tmp_path)
    expected = measured(engine)
    again = engine_of(None)
    again.load_checkpoint(str(tmp_path / "step-1"))
    assert_same_bits(measured(again), expected)
    with pytest.raises(ValueError, match=r"started from seed 0, .* not there"):
        engine_of(None, seed=1).load_checkpoint(str(tmp_path / "step-1"))


def test_the_start_is_noted_without_a_reference_policy_too(assets, earlier, tmp_path):
    engine = started(assets, checkpoint={"initial_load_path": str(earlier / "step-2")}, enable=False)
    step(engine)
    save(engine, tmp_path / "own")
    source = find_load_source(CheckpointConfig(folder=str(tmp_path / "own")))
    assert source is not None
    assert source.started_from == str(earlier / "step-2")


def test_a_start_is_made_again_for_a_reference_policy_whose_weights_are_gone(tmp_path):
    source = LoadSource(
        path=Path("x"), model_only=False, in_hf=False, position=None, started_from=str(tmp_path)
    )
    assert not source.needs_start(reference=True)
    gone = replace(source, started_from=str(tmp_path / "gone"))
    assert gone.needs_start(reference=True)
    assert not gone.needs_start(reference=False)
    assert not replace(gone, model_only=True).needs_start(reference=True)
