"""An adapter is worth nothing without the weights that it stands beside: which these are is not lost."""

import json
import logging
from pathlib import Path

import pytest

from rl.models.converters.lora import LoRA
from rl.models.converters.peft_folder import CONFIG_FILE
from rl.training.checkpoint_files import read_state
from tests.training.parts import engine_config, make_engine, make_samples, small_spec, write_assets

SAMPLES = make_samples()


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return write_assets(tmp_path_factory.mktemp("assets") / "model")


def make(assets, **settings):
    config = engine_config()
    config.converters = (LoRA.Config(rank=2, **settings),)
    return config.build(model_spec=small_spec(), hf_assets_path=assets, device="cpu")


def step(engine):
    engine.forward_backward(SAMPLES)
    engine.optim_step()


def recorded_base(engine, folder):
    engine.save_adapter(str(folder))
    return json.loads((folder / CONFIG_FILE).read_text())["base_model_name_or_path"]


@pytest.mark.parametrize("model_only", [False, True])
def test_a_run_from_a_checkpoint_writes_an_adapter_for_the_weights_of_the_checkpoint(
    assets, tmp_path, model_only
):
    first = make(assets)
    step(first)
    first.save_checkpoint(str(tmp_path / "one"))
    # What the continued run starts from, before it loads, is another model.
    second = make(None)
    second.load_checkpoint(str(tmp_path / "one"), model_only=model_only)
    step(second)
    second.save_checkpoint(str(tmp_path / "two"))
    third = make(None)
    third.load_checkpoint(str(tmp_path / "two"))
    base = recorded_base(third, tmp_path / "adapter")
    assert base == assets
    opened = make(base, initial_adapter=str(tmp_path / "adapter"))
    for ours, theirs in zip(opened.compute_logprobs(SAMPLES), third.compute_logprobs(SAMPLES), strict=True):
        assert (ours == theirs).all()


def test_the_base_is_recorded_by_its_absolute_path(assets, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(assets).parent)
    assert recorded_base(make("model"), tmp_path / "adapter") == assets
    engine = make(None)
    engine.load_checkpoint("model")
    assert recorded_base(engine, tmp_path / "loaded") == assets


def test_a_base_that_is_not_known_is_not_named_and_the_log_says_so(assets, tmp_path, caplog):
    plain = make_engine(assets)
    step(plain)
    plain.save_checkpoint(str(tmp_path / "plain"))
    assert read_state(tmp_path / "plain").base_model is None  # its weights are no longer the folder's
    drawn, loaded, kept = make(None), make(assets), make(assets)
    adapters = "model.*_lora.*"
    loaded.load_checkpoint(str(tmp_path / "plain"), model_only=True, exclude=[adapters])
    with caplog.at_level(logging.WARNING):
        assert recorded_base(drawn, tmp_path / "drawn") is None
        assert recorded_base(loaded, tmp_path / "loaded") is None
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(messages) == 2
    assert all("it is not known of which Hugging Face folder its base weights are" in m for m in messages)
    # The weights themselves were not loaded, or one of them was: from another folder than the others.
    kept.load_checkpoint(str(tmp_path / "plain"), model_only=True, exclude=["model"])
    assert recorded_base(kept, tmp_path / "kept") == assets
    most = ["model.layers", "model.embed_tokens", adapters]
    kept.load_checkpoint(str(tmp_path / "plain"), model_only=True, exclude=most)
    assert recorded_base(kept, tmp_path / "one") is None


def test_the_base_of_a_plain_checkpoint_is_made_by_exporting_it(assets, tmp_path):
    """As docs/converters.md says."""
    plain = make_engine(assets)
    step(plain)
    plain.save_checkpoint(str(tmp_path / "plain"))
    engine = make(assets)
    engine.load_checkpoint(str(tmp_path / "plain"), model_only=True, exclude=["model.*_lora.*"])
    step(engine)
    engine.save_adapter(str(tmp_path / "adapter"))
    exporter = make_engine(assets)
    exporter.load_checkpoint(str(tmp_path / "plain"), model_only=True)
    exporter.export_hf(str(tmp_path / "base"))
    opened = make(str(tmp_path / "base"), initial_adapter=str(tmp_path / "adapter"))
    for ours, theirs in zip(opened.compute_logprobs(SAMPLES), engine.compute_logprobs(SAMPLES), strict=True):
        assert (ours == theirs).all()
