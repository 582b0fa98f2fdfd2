"""Contents of a checkpoint, and the state that loading it restores, in one process."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch

from losses.policy import GRPOLoss
from rl.distributed.runtime import seed_everything
from rl.models.hf import HFFolder, read_parameters
from rl.models.lora import LoRA
from rl.models.peft import CONFIG_FILE
from rl.training.checkpoint_config import CheckpointConfig, find_load_source
from rl.training.checkpoint_files import DamagedCheckpointError, read_state
from rl.training.checkpoint_tensors import saved_names
from rl.training.config import ReferenceConfig
from rl.training.optimizer import LRSchedule
from rl.types import LoopPosition
from tests.training.parts import assert_near, make_engine, make_samples, small_spec, step, weights

SAMPLES = make_samples()


def moments(engine):
    states = engine.optimizer.state_tensors()
    return {name: states[p]["exp_avg"].clone() for name, p in engine.policy.parameters.items() if p in states}


def assert_same(actual, expected):
    assert_near(actual, expected, relative=0.0)


@pytest.fixture(scope="module")
def trained(assets, tmp_path_factory):
    """Return an engine after two steps, and its checkpoint."""
    engine = make_engine(assets)
    step(engine)
    step(engine)
    folder = str(tmp_path_factory.mktemp("trained") / "at_2")
    engine.save_checkpoint(folder)
    return engine, folder


def test_run_continues_with_the_same_bits(assets, tmp_path):
    schedule = LRSchedule.Config(warmup_steps=8)
    first = make_engine(assets, lr_scheduler=schedule)
    step(first)
    step(first)
    first.save_checkpoint(str(tmp_path / "at_2"), position=LoopPosition(step=3, num_problems=96))
    assert read_state(tmp_path / "at_2").position == LoopPosition(step=3, num_problems=96)
    drawn = torch.rand(3)
    expected = [step(first) for _ in range(2)]

    fresh = make_engine(None, lr_scheduler=schedule)
    seed_everything(99)
    assert fresh.load_checkpoint(str(tmp_path / "at_2")) == fresh.policy_version == 2
    assert torch.equal(torch.rand(3), drawn)
    assert [step(fresh) for _ in range(2)] == expected
    assert_same(weights(fresh), weights(first))
    # The engine that trained on goes back to the checkpoint.
    first.load_checkpoint(str(tmp_path / "at_2"))
    first.forward_backward(SAMPLES)
    assert first.optim_step().lr == pytest.approx(1e-2 * 3 / 8)  # the third of eight steps of warm-up


def test_existing_folder_is_not_overwritten(trained):
    engine, folder = trained
    with pytest.raises(FileExistsError, match="at_2 already exists"):
        engine.save_checkpoint(folder)
    assert [path.name for path in Path(folder).parent.iterdir()] == ["at_2"]


@pytest.mark.parametrize("name", ["loop.pickle", "__0_0.distcp"])
def test_every_file_is_checked_before_anything_is_loaded(assets, tmp_path, name):
    engine = make_engine(assets)
    folder = tmp_path / "checkpoint"
    engine.save_checkpoint(str(folder), attachments={"loop.pickle": b"state of the loop"}, wait=False)
    engine.checkpointer.wait()
    assert (folder / "loop.pickle").read_bytes() == b"state of the loop"
    assert engine.load_checkpoint(str(folder)) == 0
    step(engine)
    before, before_moments = weights(engine), moments(engine)
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 16
    (folder / name).write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=rf"checkpoint file .*/{name} is corrupted"):
        engine.load_checkpoint(str(folder))
    assert_same(weights(engine), before)
    assert_same(moments(engine), before_moments)


def test_saving_with_an_accumulated_gradient_is_refused(assets, tmp_path):
    engine = make_engine(assets)
    engine.forward_backward(SAMPLES)
    with pytest.raises(ValueError, match="gradient accumulated"):
        engine.save_checkpoint(str(tmp_path / "checkpoint"))


def test_model_only_load_resets_the_optimizer(trained, assets):
    engine, folder = trained
    other = make_engine(assets)
    step(other)
    assert other.load_checkpoint(folder, model_only=True) == other.policy_version == 0
    assert_same(weights(other), weights(engine))
    assert not any(moment.any() for moment in moments(other).values())


def test_model_only_checkpoint_holds_only_the_model(trained, assets, tmp_path):
    engine, _ = trained
    folder = str(tmp_path / "model")
    engine.save_checkpoint(folder, model_only=True)
    assert sorted(saved_names(Path(folder))) == sorted(f"model.{name}" for name in weights(engine))
    fresh = make_engine(assets)
    with pytest.raises(ValueError, match="holds only the model: load it with model_only"):
        fresh.load_checkpoint(folder)
    assert fresh.load_checkpoint(folder, model_only=True) == 0
    assert_same(weights(fresh), weights(engine))


@pytest.mark.parametrize(
    "excluded",
    ["model", "optimizer", "train_state", "random", "model.norm", "model.layers.*.ffn_norm.weight"],
)
def test_excluded_part_keeps_its_state_and_the_rest_is_loaded(trained, assets, excluded):
    saved, folder = trained
    engine = make_engine(assets)
    step(engine)
    before, before_moments = weights(engine), moments(engine)
    seed_everything(5)
    drawn = torch.rand(1)
    seed_everything(5)
    version = engine.load_checkpoint(folder, exclude=[excluded])

    kept = {
        "model": list(before),
        "model.norm": ["norm.weight"],
        "model.layers.*.ffn_norm.weight": ["layers.0.ffn_norm.weight", "layers.1.ffn_norm.weight"],
    }.get(excluded, [])
    assert_same(weights(engine), {n: before[n] if n in kept else t for n, t in weights(saved).items()})
    assert all(not torch.equal(before[name], tensor) for name, tensor in weights(saved).items())
    assert_same(moments(engine), before_moments if excluded == "optimizer" else moments(saved))
    assert version == (1 if excluded == "train_state" else 2)
    assert torch.equal(torch.rand(1), drawn) == (excluded == "random")


def test_hugging_face_folder_is_loaded_as_a_new_start(assets, tmp_path):
    engine = make_engine(assets)
    step(engine)
    after_first = weights(engine)
    engine.load_checkpoint(assets)
    assert engine.policy_version == 0
    step(engine)
    exported = weights(engine)
    assert_same(exported, after_first)  # The optimizer was reset.
    engine.export_hf(str(tmp_path / "exported"))
    step(engine)
    engine.load_checkpoint(str(tmp_path / "exported"))
    assert_same(weights(engine), exported)


def test_export_has_the_configured_dtype_and_the_tokenizer(assets, tmp_path):
    engine = make_engine(assets)
    engine.config.checkpoint.export_dtype = "float16"
    engine.export_hf(str(tmp_path / "exported"))
    folder = HFFolder(tmp_path / "exported", tokenizer=True)
    adapter = small_spec().adapter(small_spec().model)
    for name, tensor in read_parameters(folder, adapter, weights(engine)):
        assert torch.equal(tensor, weights(engine)[name].to(torch.float16))


def with_lora(assets, **settings):
    return make_engine(assets, converters=(LoRA.Config(rank=2, **settings),))


def test_adapters_continue_with_optimizer_state_and_frozen_weights(assets, tmp_path):
    engine = with_lora(assets, target_modules=("q_proj", "down_proj"))
    step(engine)
    engine.save_checkpoint(str(tmp_path / "adapters"))
    names = saved_names(tmp_path / "adapters")
    assert {f"model.{name}" for name in engine.policy.parameters} < names.keys()
    assert {name.removesuffix(".exp_avg") for name in names if name.endswith(".exp_avg")} == {
        f"optimizer.{name}" for name in engine.policy.trained_parameters
    }
    expected = [step(engine) for _ in range(2)]
    fresh = with_lora(None, target_modules=("q_proj", "down_proj"))
    assert fresh.load_checkpoint(str(tmp_path / "adapters")) == 1
    assert [step(fresh) for _ in range(2)] == expected
    assert_same(weights(fresh), weights(engine))


# A saved adapter records the Hugging Face folder of its base weights.


def recorded_base(engine, folder):
    engine.save_adapter(str(folder))
    return json.loads((folder / CONFIG_FILE).read_text())["base_model_name_or_path"]


def test_continued_run_records_the_base_of_its_checkpoint(assets, tmp_path):
    first = with_lora(assets)
    step(first)
    first.save_checkpoint(str(tmp_path / "one"))
    # Before they load, the second and third engine hold other weights.
    second = with_lora(None)
    second.load_checkpoint(str(tmp_path / "one"), model_only=True)
    step(second)
    second.save_checkpoint(str(tmp_path / "two"))
    third = with_lora(None)
    third.load_checkpoint(str(tmp_path / "two"))
    base = recorded_base(third, tmp_path / "adapter")
    assert base == assets
    opened = with_lora(base, initial_adapter=str(tmp_path / "adapter"))
    for ours, theirs in zip(opened.compute_logprobs(SAMPLES), third.compute_logprobs(SAMPLES), strict=True):
        assert (ours == theirs).all()


def test_unknown_base_is_not_recorded_and_is_logged(assets, tmp_path, caplog):
    plain = make_engine(assets)
    step(plain)
    plain.save_checkpoint(str(tmp_path / "plain"))
    assert read_state(tmp_path / "plain").base_model is None  # trained weights differ from the folder's
    drawn, loaded, kept = with_lora(None), with_lora(assets), with_lora(assets)
    adapters = "model.*_lora.*"
    loaded.load_checkpoint(str(tmp_path / "plain"), model_only=True, exclude=[adapters])
    with caplog.at_level(logging.WARNING):
        assert recorded_base(drawn, tmp_path / "drawn") is None
        assert recorded_base(loaded, tmp_path / "loaded") is None
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(messages) == 2
    assert all("the Hugging Face folder of its base weights is unknown" in m for m in messages)
    # The first engine loads no base weight; the second loads one of them from another folder than the rest.
    kept.load_checkpoint(str(tmp_path / "plain"), model_only=True, exclude=["model"])
    assert recorded_base(kept, tmp_path / "kept") == assets
    most = ["model.layers", "model.embed_tokens", adapters]
    kept.load_checkpoint(str(tmp_path / "plain"), model_only=True, exclude=most)
    assert recorded_base(kept, tmp_path / "one") is None


# The reference policy keeps the weights that training started from.


@pytest.fixture
def earlier(trained, tmp_path):
    """Return the checkpoint and the export of an earlier run of two steps."""
    engine, folder = trained
    shutil.copytree(folder, tmp_path / "earlier" / "step-2")
    engine.export_hf(str(tmp_path / "earlier" / "hf"))
    return tmp_path / "earlier"


def kl_engine(assets, checkpoint=None, *, enable=True, **settings):
    return make_engine(
        assets,
        loss=GRPOLoss(kl_coef=0.3 if enable else 0.0),
        reference=ReferenceConfig(enable=enable),
        checkpoint=CheckpointConfig(**(checkpoint or {})),
        **settings,
    )


def started(assets, checkpoint, **settings):
    """Start a run, or start it again with the same command."""
    engine = kl_engine(assets, checkpoint, **settings)
    source = find_load_source(engine.config.checkpoint)
    assert source is not None
    engine.load_checkpoint(str(source.path), model_only=source.model_only)
    return engine


def kl_step(engine):
    """Return KL, loss and gradients of the next step."""
    result = engine.forward_backward(SAMPLES)
    gradients = {name: p.grad for name, p in engine.policy.trained_parameters.items()}
    return result.loss_metrics["kl"], result.loss_sum, gradients


def assert_same_step(actual, expected):
    assert actual[:2] == expected[:2]
    assert_same(actual[2], expected[2])


def stepped_and_saved(engine, folder):
    step(engine)
    position = LoopPosition(step=engine.policy_version, num_problems=13)
    engine.save_checkpoint(str(folder / f"step-{engine.policy_version}"), position=position)
    return engine


@pytest.mark.parametrize(
    ("name", "settings"),
    [("step-2", {"param_dtype": "bfloat16"}), ("hf", {"converters": (LoRA.Config(rank=2),)})],
)
def test_continued_run_keeps_the_reference_policy_of_its_start(assets, earlier, tmp_path, name, settings):
    checkpoint = {
        "initial_load_path": str(earlier / name),
        "initial_load_in_hf": name == "hf",
        "folder": str(tmp_path / "own"),
    }
    undisturbed = stepped_and_saved(started(assets, checkpoint, **settings), tmp_path / "own")
    continued = started(assets, checkpoint, **settings)
    assert continued.policy_version == 1
    expected = kl_step(undisturbed)
    assert expected[0] > 1e-4
    assert_same_step(kl_step(continued), expected)


def test_reference_policy_is_kept_through_two_continuations(assets, earlier, tmp_path):
    stepped_and_saved(started(assets, {"initial_load_path": str(earlier / "step-2")}), tmp_path / "first")
    second = {"initial_load_path": str(tmp_path / "first"), "initial_load_model_only": False}
    undisturbed = stepped_and_saved(started(assets, second), tmp_path / "second")
    third = started(assets, {"folder": str(tmp_path / "second")})
    assert_same_step(kl_step(third), kl_step(undisturbed))
    assert read_state(tmp_path / "second" / "step-2").started_from == str(earlier / "step-2")


def test_missing_weights_of_the_reference_policy_are_refused(assets, earlier, tmp_path):
    engine = stepped_and_saved(
        started(assets, {"initial_load_path": str(earlier / "step-2")}), tmp_path / "own"
    )
    folder = str(tmp_path / "own" / "step-1")
    with pytest.raises(ValueError, match=r"exclude_from_loading=\('model\.norm',\) with reference\.enable"):
        kl_engine(assets).load_checkpoint(folder, exclude=["model.norm"])
    assert kl_engine(assets).load_checkpoint(folder, exclude=["optimizer"]) == 1
    shutil.rmtree(earlier)
    again = kl_engine(assets)
    before = weights(again)
    with pytest.raises(ValueError, match=rf"started from {earlier}/step-2, which is gone"):
        again.load_checkpoint(folder)
    assert_same(weights(again), before)
    assert again.policy_version == 0
    # A new reference policy, or none, is possible.
    assert again.load_checkpoint(folder, model_only=True) == 0
    assert kl_step(again)[0] == 0.0
    assert kl_engine(assets, enable=False).load_checkpoint(folder) == 1
    assert engine.checkpointer.started_from == str(earlier / "step-2")


def test_weights_of_another_seed_are_not_taken_for_the_reference(tmp_path):
    engine = stepped_and_saved(kl_engine(None), tmp_path)
    expected = kl_step(engine)
    again = kl_engine(None)
    again.load_checkpoint(str(tmp_path / "step-1"))
    assert_same_step(kl_step(again), expected)
    with pytest.raises(ValueError, match=r"started from seed 0, which is gone"):
        kl_engine(None, seed=1).load_checkpoint(str(tmp_path / "step-1"))


def test_reference_policy_follows_a_new_start_and_not_a_continuation(assets, tmp_path):
    engine = kl_engine(assets)
    reference = engine.reference.policy.parameters["norm.weight"]
    start = reference.clone()
    stepped_and_saved(engine, tmp_path)
    stepped = weights(engine)["norm.weight"]
    assert not torch.equal(stepped, start)
    engine.load_checkpoint(str(tmp_path / "step-1"))
    assert torch.equal(reference, start)
    engine.load_checkpoint(str(tmp_path / "step-1"), model_only=True)
    assert torch.equal(reference, stepped)
    engine.load_checkpoint(assets)
    assert torch.equal(reference, start)
