"""What a checkpoint holds and restores, in one process. Layouts: test_checkpoint_layouts.py."""

from pathlib import Path

import pytest
import torch

from losses.grpo import GRPOLoss
from rl.distributed.seeds import seed_everything
from rl.models.converters.lora import LoRA
from rl.models.hf import HFFolder, read_parameters
from rl.training.checkpoint import saved_names
from rl.training.checkpoint_files import DamagedCheckpointError, read_state
from rl.training.checkpointer import Checkpointer
from rl.types import LoopPosition
from tests.training.parts import engine_config, make_engine, make_samples, small_spec, write_assets

SAMPLES = make_samples()


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return write_assets(tmp_path_factory.mktemp("assets") / "model")


def step(engine):
    loss = engine.forward_backward(SAMPLES).loss_sum
    return loss, engine.optim_step().grad_norm


def weights(engine):
    return {name: tensor.clone() for name, tensor in engine.model_state_dict().items()}


def moments(engine):
    states = engine.optimizer.state_tensors()
    return {name: states[p]["exp_avg"].clone() for name, p in engine.policy.parameters.items() if p in states}


def assert_same(actual, expected):
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.fixture(scope="module")
def trained(assets, tmp_path_factory):
    """Two steps; the engine and its checkpoint."""
    engine = make_engine(assets)
    step(engine)
    step(engine)
    folder = str(tmp_path_factory.mktemp("trained") / "at_2")
    engine.save_checkpoint(folder)
    return engine, folder


def test_run_continues_with_the_same_bits(assets, tmp_path):
    engine = make_engine(assets)
    step(engine)
    step(engine)
    engine.save_checkpoint(str(tmp_path / "at_2"))
    expected = [step(engine) for _ in range(2)]

    fresh = make_engine(None)
    assert fresh.load_checkpoint(str(tmp_path / "at_2")) == 2
    assert fresh.policy_version == 2
    assert [step(fresh) for _ in range(2)] == expected
    assert_same(weights(fresh), weights(engine))
    # And the engine that went on goes back.
    engine.load_checkpoint(str(tmp_path / "at_2"))
    assert [step(engine) for _ in range(2)] == expected


def test_the_schedule_goes_on_where_it_was(assets, tmp_path):
    def engine():
        made = make_engine(assets)
        made.schedule.config.warmup_steps = 8
        return made

    first = engine()
    step(first)
    step(first)
    first.save_checkpoint(str(tmp_path / "at_2"))
    fresh = engine()
    fresh.load_checkpoint(str(tmp_path / "at_2"))
    fresh.forward_backward(SAMPLES)
    assert fresh.optim_step().lr == pytest.approx(1e-2 * 3 / 8)  # the third of eight steps of warm-up


def test_random_states_are_restored(assets, tmp_path):
    engine = make_engine(assets)
    engine.save_checkpoint(str(tmp_path / "checkpoint"))
    expected = torch.rand(3)
    seed_everything(99)
    engine.load_checkpoint(str(tmp_path / "checkpoint"))
    assert torch.equal(torch.rand(3), expected)


def test_folder_is_never_overwritten(assets, tmp_path):
    engine = make_engine(assets)
    engine.save_checkpoint(str(tmp_path / "checkpoint"))
    with pytest.raises(FileExistsError, match="checkpoint"):
        engine.save_checkpoint(str(tmp_path / "checkpoint"))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_the_loops_position_is_kept_with_the_state(assets, tmp_path):
    engine = make_engine(assets)
    position = LoopPosition(step=3, num_problems=96)
    engine.save_checkpoint(str(tmp_path / "checkpoint"), position=position)
    assert read_state(tmp_path / "checkpoint").position == position


@pytest.mark.parametrize("wait", [True, False])
def test_attachments_are_in_the_folder_and_checked_before_a_byte_is_loaded(assets, tmp_path, wait):
    engine = make_engine(assets)
    folder = tmp_path / "checkpoint"
    engine.save_checkpoint(str(folder), attachments={"loop.pickle": b"state of the loop"}, wait=wait)
    engine.checkpointer.wait()
    assert (folder / "loop.pickle").read_bytes() == b"state of the loop"
    assert engine.load_checkpoint(str(folder)) == 0
    (folder / "loop.pickle").write_bytes(b"state of the lopp")
    with pytest.raises(DamagedCheckpointError, match=r"loop.pickle is corrupted"):
        engine.load_checkpoint(str(folder))


def test_accumulated_gradient_is_not_lost_silently(assets, tmp_path):
    engine = make_engine(assets)
    engine.forward_backward(SAMPLES)
    with pytest.raises(ValueError, match="gradient accumulated"):
        engine.save_checkpoint(str(tmp_path / "checkpoint"))


def test_weights_alone_start_anew(trained, assets):
    engine, folder = trained
    other = make_engine(assets)
    step(other)
    assert other.load_checkpoint(folder, model_only=True) == other.policy_version == 0
    assert_same(weights(other), weights(engine))
    assert not any(moment.any() for moment in moments(other).values())


def test_a_checkpoint_of_the_model_alone_is_smaller_and_is_not_continued(trained, assets, tmp_path):
    engine, _ = trained
    folder = str(tmp_path / "model")
    engine.save_checkpoint(folder, model_only=True)
    assert sorted(saved_names(Path(folder))) == sorted(f"model.{name}" for name in weights(engine))
    fresh = make_engine(assets)
    with pytest.raises(ValueError, match="holds the model alone: load it with model_only"):
        fresh.load_checkpoint(folder)
    assert fresh.load_checkpoint(folder, model_only=True) == 0
    assert_same(weights(fresh), weights(engine))


@pytest.mark.parametrize(
    "excluded",
    ["model", "optimizer", "train_state", "random", "model.norm", "model.layers.*.ffn_norm.weight"],
)
def test_what_is_excluded_keeps_its_state_and_the_rest_is_loaded(trained, assets, excluded):
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


def test_the_configured_exclusion_holds_where_a_call_names_none(trained, assets):
    _, folder = trained
    engine = make_engine(assets)
    engine.checkpointer.config.exclude_from_loading = ("train_state",)
    assert engine.load_checkpoint(folder) == 0
    assert engine.load_checkpoint(folder, exclude=()) == 2


def test_an_exclusion_of_nothing_is_refused(trained, assets):
    _, folder = trained
    engine = make_engine(assets)
    with pytest.raises(ValueError, match=r"'model\.nrm' names nothing that would be loaded .*; there are "):
        engine.load_checkpoint(folder, exclude=["model.nrm"])
    with pytest.raises(ValueError, match="'optimizer' names nothing"):
        engine.load_checkpoint(folder, model_only=True, exclude=["optimizer"])


def test_a_tensor_of_another_shape_can_be_excluded(trained, assets):
    saved, folder = trained
    other = make_engine(assets)
    other.policy.model.get_submodule("norm").weight = torch.nn.Parameter(torch.ones(35))
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \[36\], the model needs \[35\]"):
        other.load_checkpoint(folder)
    other.load_checkpoint(folder, exclude=["model.norm.weight", "optimizer.norm.weight"])
    assert torch.equal(weights(other)["embed_tokens.weight"], weights(saved)["embed_tokens.weight"])


def with_frozen_embedding(assets):
    """The optimizer steps all but the embedding; a buffer that is saved, and one that is not."""
    engine = make_engine(assets)
    model = engine.policy.model
    model.get_parameter("embed_tokens.weight").requires_grad_(False)
    block = model.get_submodule("layers.1")
    block.register_buffer("load_bias", torch.zeros(3))
    block.register_buffer("scratch", torch.zeros(3), persistent=False)
    engine.optimizer = engine.config.optimizer.build(parameters=engine.policy.trained_parameters)
    engine.checkpointer = engine.config.checkpoint.build(policy=engine.policy, optimizer=engine.optimizer)
    return engine


def test_frozen_parameters_and_buffers_are_saved_with_optimizer_state_of_trainable_ones(assets, tmp_path):
    engine = with_frozen_embedding(assets)
    model = engine.policy.model
    step(engine)
    with torch.no_grad():
        model.embed_tokens.weight.add_(1.0)
        model.layers[1].load_bias += torch.arange(3.0)
        model.layers[1].scratch += 9.0
    engine.save_checkpoint(str(tmp_path / "frozen"))

    names = saved_names(tmp_path / "frozen")
    states = {name for name in names if name.startswith("optimizer.")}
    assert "model.embed_tokens.weight" in names
    assert names["model.layers.1.load_bias"] == (3,)
    assert "model.layers.1.scratch" not in names
    assert "optimizer.norm.weight.exp_avg" in states
    assert not [name for name in states if "embed_tokens" in name or "load_bias" in name]

    fresh = with_frozen_embedding(assets)
    fresh.load_checkpoint(str(tmp_path / "frozen"))
    assert_same(weights(fresh), weights(engine))
    assert fresh.policy.model.layers[1].load_bias.tolist() == [0, 1, 2]
    assert fresh.policy.model.layers[1].scratch.tolist() == [0, 0, 0]
    assert step(fresh) == step(engine)


def test_exported_folder_is_loaded_as_a_new_start(assets, tmp_path):
    engine = make_engine(assets)
    step(engine)
    after_first = weights(engine)
    engine.load_checkpoint(assets)
    assert engine.policy_version == 0
    step(engine)
    exported = weights(engine)
    assert_same(exported, after_first)  # the optimizer has forgotten its first step
    engine.export_hf(str(tmp_path / "exported"))
    step(engine)
    engine.load_checkpoint(str(tmp_path / "exported"))
    assert_same(weights(engine), exported)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_export_is_in_the_configured_dtype_with_the_tokenizer(assets, tmp_path, dtype):
    engine = make_engine(assets)
    engine.config.checkpoint.export_dtype = dtype
    engine.export_hf(str(tmp_path / "exported"))
    folder = HFFolder(tmp_path / "exported", tokenizer=True)
    adapter = small_spec().adapter(small_spec().model)
    for name, tensor in read_parameters(folder, adapter, weights(engine)):
        assert torch.equal(tensor, weights(engine)[name].to(getattr(torch, dtype)))


def test_folder_of_neither_kind_is_refused(assets, tmp_path):
    engine = make_engine(assets)
    with pytest.raises(ValueError, match="does not exist"):
        engine.load_checkpoint(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        engine.load_checkpoint(str(tmp_path))


def test_checkpoint_of_another_architecture_is_refused(assets, tmp_path):
    make_engine(assets).save_checkpoint(str(tmp_path / "tied"))
    untied = make_engine(write_assets(tmp_path / "untied", tie=False))
    with pytest.raises(ValueError, match=r"model\.lm_head\.weight is missing"):
        untied.load_checkpoint(str(tmp_path / "tied"))
    untied.save_checkpoint(str(tmp_path / "own"))
    with pytest.raises(ValueError, match=r"model\.lm_head\.weight has no place"):
        make_engine(assets).load_checkpoint(str(tmp_path / "own"))


def test_weights_of_another_size_are_refused(assets, tmp_path):
    untied = make_engine(write_assets(tmp_path / "untied", tie=False))
    with pytest.raises(ValueError, match="another architecture or size"):
        untied.load_checkpoint(assets)


def test_page_locked_memory_without_a_gpu_is_refused(assets):
    engine = make_engine(assets)
    config = Checkpointer.Config(async_mode="async_with_pinned_mem")
    with pytest.raises(ValueError, match="async_with_pinned_mem': page-locked memory needs a GPU"):
        config.build(policy=engine.policy, optimizer=engine.optimizer)


def with_adapters(assets, **fields):
    config = engine_config()
    config.converters = (LoRA.Config(rank=2, target_modules=("q_proj", "down_proj")),)
    for name, value in fields.items():
        setattr(config, name, value)
    return config.build(model_spec=small_spec(), hf_assets_path=assets, device="cpu")


def test_adapters_continue_with_their_optimizer_state_and_the_frozen_weights(assets, tmp_path):
    engine = with_adapters(assets)
    step(engine)
    engine.save_checkpoint(str(tmp_path / "adapters"))
    names = saved_names(tmp_path / "adapters")
    trained = engine.policy.trained_parameters
    assert {f"model.{name}" for name in engine.policy.parameters} < names.keys()
    assert {name.removesuffix(".exp_avg") for name in names if name.endswith(".exp_avg")} == {
        f"optimizer.{name}" for name in trained
    }
    expected = [step(engine) for _ in range(2)]
    fresh = with_adapters(None)
    assert fresh.load_checkpoint(str(tmp_path / "adapters")) == 1
    assert [step(fresh) for _ in range(2)] == expected
    assert_same(weights(fresh), weights(engine))


def test_an_adapter_alone_is_loaded_as_a_new_start_over_the_weights_that_are_there(assets, tmp_path):
    engine = with_adapters(assets)
    step(engine)
    engine.save_adapter(str(tmp_path / "adapter"))
    merged = weights(engine)
    step(engine)
    fresh = with_adapters(assets)
    assert engine.load_checkpoint(str(tmp_path / "adapter")) == engine.policy_version == 0
    fresh.load_checkpoint(str(tmp_path / "adapter"))
    assert_same(weights(engine), merged)
    assert step(fresh) == step(engine)  # neither optimizer remembers a step


def test_the_reference_policy_follows_a_start_and_not_a_continuation(assets, tmp_path):
    config = engine_config()
    config.reference.enable = True
    config.loss = GRPOLoss(kl_coef=0.1)
    engine = config.build(model_spec=small_spec(), hf_assets_path=assets, device="cpu")
    name = "norm.weight"

    def kept():
        return engine.reference._policy.parameters[name].clone()

    start = weights(engine)[name]
    step(engine)
    engine.save_checkpoint(str(tmp_path / "at_1"))
    stepped = weights(engine)[name]
    assert not torch.equal(stepped, start)
    engine.load_checkpoint(str(tmp_path / "at_1"))
    assert torch.equal(kept(), start)
    engine.load_checkpoint(str(tmp_path / "at_1"), model_only=True)
    assert torch.equal(kept(), stepped)
    engine.load_checkpoint(assets)
    assert torch.equal(kept(), start)
