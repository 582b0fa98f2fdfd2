import pytest
import torch

from rl.distributed.seeds import seed_everything
from rl.models.hf import HFFolder, read_parameters
from tests.training.parts import make_engine, make_samples, small_spec, write_assets

SAMPLES = make_samples()


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return write_assets(tmp_path_factory.mktemp("assets") / "model")


def step(engine):
    loss = engine.forward_backward(SAMPLES).loss_sum
    return loss, engine.optim_step().grad_norm


def weights(engine):
    return {name: tensor.clone() for name, tensor in engine.model_state_dict().items()}


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
    for name, tensor in weights(engine).items():
        assert torch.equal(weights(fresh)[name], tensor)
    # And the engine that went on goes back.
    engine.load_checkpoint(str(tmp_path / "at_2"))
    assert [step(engine) for _ in range(2)] == expected


def test_random_states_are_restored(assets, tmp_path):
    engine = make_engine(assets)
    engine.save_checkpoint(str(tmp_path / "checkpoint"))
    expected = torch.rand(3)
    seed_everything(99)
    engine.load_checkpoint(str(tmp_path / "checkpoint"))
    assert torch.equal(torch.rand(3), expected)


def test_folder_is_never_overwritten_and_nothing_partial_is_left(assets, tmp_path):
    engine = make_engine(assets)
    (tmp_path / ".checkpoint.partial").mkdir()  # of a save that was killed
    engine.save_checkpoint(str(tmp_path / "checkpoint"))
    with pytest.raises(FileExistsError, match="checkpoint"):
        engine.save_checkpoint(str(tmp_path / "checkpoint"))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_accumulated_gradient_is_not_lost_silently(assets, tmp_path):
    engine = make_engine(assets)
    engine.forward_backward(SAMPLES)
    with pytest.raises(ValueError, match="gradient accumulated"):
        engine.save_checkpoint(str(tmp_path / "checkpoint"))


def test_exported_folder_is_loaded_as_a_new_start(assets, tmp_path):
    engine = make_engine(assets)
    step(engine)
    after_first = weights(engine)
    engine.load_checkpoint(assets)
    assert engine.policy_version == 0
    step(engine)
    exported = weights(engine)
    for name, tensor in after_first.items():  # the optimizer has forgotten its first step
        assert torch.equal(exported[name], tensor)
    engine.export_hf(str(tmp_path / "exported"))
    step(engine)
    engine.load_checkpoint(str(tmp_path / "exported"))
    for name, tensor in weights(engine).items():
        assert torch.equal(tensor, exported[name])


def test_export_is_in_the_configured_dtype_with_the_tokenizer(assets, tmp_path):
    engine = make_engine(assets)
    engine.config.checkpoint.export_dtype = "bfloat16"
    engine.export_hf(str(tmp_path / "exported"))
    folder = HFFolder(tmp_path / "exported", tokenizer=True)
    adapter = small_spec().adapter(small_spec().model)
    for name, tensor in read_parameters(folder, adapter, weights(engine)):
        assert torch.equal(tensor, weights(engine)[name].bfloat16())


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
