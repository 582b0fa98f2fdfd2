"""Contents of a checkpoint, and the state that loading it restores, in one process.

tests/actors/test_load_source.py refuses further checkpoints, before a run starts.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from losses.policy import GRPOLoss
from rl.models.files.hf import HFFolder, read_parameters
from rl.models.files.peft import CONFIG_FILE
from rl.models.lora import LoRA
from rl.training.checkpoints.files import DamagedCheckpointError, read_state
from rl.training.checkpoints.metadata import read_saved_tensors
from rl.training.config import ReferenceConfig
from rl.training.optimizer import LRSchedule
from rl.types import LoopPosition
from rl.utils.processes import seed_everything
from tests.training.parts import (
    assert_near,
    make_engine,
    make_samples,
    small_spec,
    step,
    weights,
    write_assets,
)

SAMPLES = make_samples()


def moments(engine):
    states = engine.optimizer.state_tensors()
    return {
        name: states[p]["exp_avg"].clone()
        for name, p in engine.policy.parameters.items()
        if p in states
    }


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
    assert first.optim_step().lr == pytest.approx(
        1e-2 * 3 / 8
    )  # the third of eight steps of warm-up


def test_save_is_refused_into_an_existing_folder_and_with_an_accumulated_gradient(trained):
    engine, folder = trained
    with pytest.raises(FileExistsError, match="at_2 already exists"):
        engine.save_checkpoint(folder)
    engine.forward_backward(SAMPLES)
    with pytest.raises(ValueError, match="gradient accumulated"):
        engine.save_checkpoint(folder)
    engine.drop_gradient()
    assert [path.name for path in Path(folder).parent.iterdir()] == ["at_2"]


@pytest.mark.parametrize("name", ["state.json", "__0_0.distcp"])
def test_every_file_is_checked_before_anything_is_loaded(assets, tmp_path, name):
    engine = make_engine(assets)
    folder = tmp_path / "checkpoint"
    engine.save_checkpoint(str(folder), wait=False)
    engine.checkpointer.wait()
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


def test_model_is_loaded_alone_from_either_kind_of_checkpoint(trained, assets, tmp_path):
    engine, whole = trained
    alone = str(tmp_path / "model")
    engine.save_checkpoint(alone, model_only=True)
    assert sorted(read_saved_tensors(Path(alone)).shapes) == sorted(
        f"model.{name}" for name in weights(engine)
    )
    for folder in (whole, alone):
        other = make_engine(assets)
        step(other)
        assert other.load_checkpoint(folder, model_only=True) == other.policy_version == 0
        assert_same(weights(other), weights(engine))
        assert not any(moment.any() for moment in moments(other).values())
    with pytest.raises(ValueError, match="holds only the model: load it with model_only"):
        make_engine(assets).load_checkpoint(alone)


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
    assert_same(
        weights(engine), {n: before[n] if n in kept else t for n, t in weights(saved).items()}
    )
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
    engine.config.checkpoint.export_dtype = "float16"
    engine.export_hf(str(tmp_path / "half"))
    folder = HFFolder(tmp_path / "half", tokenizer=True)
    adapter = small_spec().adapter(small_spec().model)
    assert_same(
        dict(read_parameters(folder, adapter, exported)), {n: t.half() for n, t in exported.items()}
    )


def with_lora(assets, **settings):
    return make_engine(assets, converters=(LoRA.Config(rank=2, **settings),))


def test_checkpoint_that_does_not_match_is_refused_and_nothing_is_loaded(trained, assets, tmp_path):
    _, folder = trained
    plain = make_engine(assets)
    untied = make_engine(write_assets(tmp_path / "untied", tie=False))
    untied.save_checkpoint(str(tmp_path / "own"))
    shutil.copytree(assets, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(file.read_text().replace("[ANSWER]", "[RESULT]"))
    other = make_engine(str(tmp_path / "other"))
    of_tokenizer = (
        f"made with the tokenizer of {assets}, this run has {file.parent} (tokenizer.json"
    )
    for engine, source, options, says in (
        (untied, folder, {}, "model.lm_head.weight is missing"),
        (untied, assets, {}, "another architecture or size"),
        (plain, str(tmp_path / "own"), {}, "model.lm_head.weight of shape [320, 36] has no place"),
        (
            plain,
            folder,
            {"exclude": ["model.nrm"]},
            "'model.nrm' names nothing that would be loaded",
        ),
        (
            plain,
            folder,
            {"exclude": ["optimizer"], "model_only": True},
            "'optimizer' names nothing",
        ),
        (other, folder, {}, of_tokenizer),
        (other, folder, {"model_only": True}, of_tokenizer),
        (with_lora(assets), folder, {"model_only": True}, "made with no converter"),
    ):
        before = {name: p.detach().clone() for name, p in engine.policy.parameters.items()}
        with pytest.raises(ValueError, match=re.escape(says)):
            engine.load_checkpoint(source, **options)
        assert_same(dict(engine.policy.parameters), before)
    assert other.load_checkpoint(folder, exclude=("tokenizer",)) == 2


def test_adapters_can_be_excluded_on_either_side(trained, assets, tmp_path):
    saved, folder = trained
    lora = with_lora(assets)
    step(lora)
    lora.save_checkpoint(str(tmp_path / "lora"))
    plain, lora = make_engine(None), with_lora(None)
    lora.load_checkpoint(folder, model_only=True, exclude=["model.*_lora.*"])
    # The product of a fresh adapter is zero.
    assert_same(lora.model_state_dict(), weights(saved))
    plain.load_checkpoint(str(tmp_path / "lora"), model_only=True, exclude=["model.*_lora.*"])
    assert_same(weights(plain), weights(make_engine(assets)))


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
    for ours, theirs in zip(
        opened.compute_logprobs(SAMPLES), third.compute_logprobs(SAMPLES), strict=True
    ):
        assert (ours == theirs).all()


def test_unknown_base_is_not_recorded_and_is_logged(assets, tmp_path, caplog):
    plain = make_engine(assets)
    step(plain)
    plain.save_checkpoint(str(tmp_path / "plain"))
    assert (
        read_state(tmp_path / "plain").base_model is None
    )  # trained weights differ from the folder's
    drawn, loaded, kept = with_lora(None), with_lora(assets), with_lora(assets)
    adapters = "model.*_lora.*"
    loaded.load_checkpoint(str(tmp_path / "plain"), model_only=True, exclude=[adapters])
    assert recorded_base(drawn, tmp_path / "drawn") is None
    assert recorded_base(loaded, tmp_path / "loaded") is None
    assert caplog.text.count("the Hugging Face folder of its base weights is unknown") == 2
    kept.load_checkpoint(
        str(tmp_path / "plain"), model_only=True, exclude=["model"]
    )  # no base weight
    assert recorded_base(kept, tmp_path / "kept") == assets


# The reference policy keeps the weights that training started from.


def kl_engine(assets, *, enable=True, **settings):
    return make_engine(
        assets,
        loss=GRPOLoss(kl_coef=0.3 if enable else 0.0),
        reference=ReferenceConfig(enable=enable),
        **settings,
    )


def kl_step(engine):
    """Return KL, loss and gradient norm of the next step."""
    result = engine.forward_backward(SAMPLES)
    return result.loss_metrics["kl"], result.loss_sum, engine.optim_step().grad_norm


@pytest.mark.parametrize(
    "settings", [{"param_dtype": "bfloat16"}, {"converters": (LoRA.Config(rank=2),)}]
)
def test_reference_policy_is_kept_through_two_continuations(assets, tmp_path, settings):
    engine = kl_engine(assets, **settings)
    for name in ("one", "two", "three"):
        kl, _, _ = kl_step(engine)
        engine.save_checkpoint(str(tmp_path / name))
        continued = kl_engine(None, **settings)  # Neither policy has the weights of the folder.
        continued.load_checkpoint(str(tmp_path / name))
        assert kl_step(continued) == kl_step(engine)
        engine = continued
    assert kl > 1e-4


def test_reference_policy_may_be_added_or_left_out_on_loading(trained, assets, tmp_path):
    _, without = trained
    engine = kl_engine(assets)
    before = weights(engine)
    with pytest.raises(ValueError, match=r"reference\.embed_tokens\.weight is missing"):
        engine.load_checkpoint(without)
    assert_same(weights(engine), before)
    assert engine.load_checkpoint(without, exclude=["reference"]) == 2
    assert_same(dict(engine.reference.policy.parameters), before)
    engine.save_checkpoint(str(tmp_path / "with"))
    assert kl_engine(assets, enable=False).load_checkpoint(str(tmp_path / "with")) == 2


def test_reference_policy_follows_a_new_start_and_not_a_continuation(assets, tmp_path):
    engine = kl_engine(assets)
    reference = engine.reference.policy.parameters["norm.weight"]
    start = reference.clone()
    step(engine)
    engine.save_checkpoint(str(tmp_path / "step-1"))
    stepped = weights(engine)["norm.weight"]
    assert not torch.equal(stepped, start)
    engine.load_checkpoint(str(tmp_path / "step-1"))
    assert torch.equal(reference, start)
    engine.load_checkpoint(str(tmp_path / "step-1"), model_only=True)
    assert torch.equal(reference, stepped)
    engine.load_checkpoint(assets)
    assert torch.equal(reference, start)
