"""A saved adapter records the Hugging Face folder of its base weights."""

import json
import logging

from rl.models.lora import LoRA
from rl.models.peft import CONFIG_FILE
from rl.training.checkpoint_files import read_state
from tests.training.parts import engine_config, make_engine, make_samples, small_spec, step

SAMPLES = make_samples()


def make(assets, **settings):
    config = engine_config()
    config.converters = (LoRA.Config(rank=2, **settings),)
    return config.build(model_spec=small_spec(), hf_assets_path=assets, device="cpu")


def recorded_base(engine, folder):
    engine.save_adapter(str(folder))
    return json.loads((folder / CONFIG_FILE).read_text())["base_model_name_or_path"]


def test_continued_run_records_the_base_of_its_checkpoint(assets, tmp_path):
    first = make(assets)
    step(first)
    first.save_checkpoint(str(tmp_path / "one"))
    # Before they load, the second and third engine hold other weights.
    second = make(None)
    second.load_checkpoint(str(tmp_path / "one"), model_only=True)
    step(second)
    second.save_checkpoint(str(tmp_path / "two"))
    third = make(None)
    third.load_checkpoint(str(tmp_path / "two"))
    base = recorded_base(third, tmp_path / "adapter")
    assert base == assets
    opened = make(base, initial_adapter=str(tmp_path / "adapter"))
    for ours, theirs in zip(opened.compute_logprobs(SAMPLES), third.compute_logprobs(SAMPLES), strict=True):
        assert (ours == theirs).all()


def test_unknown_base_is_not_recorded_and_is_logged(assets, tmp_path, caplog):
    plain = make_engine(assets)
    step(plain)
    plain.save_checkpoint(str(tmp_path / "plain"))
    assert read_state(tmp_path / "plain").base_model is None  # trained weights differ from the folder's
    drawn, loaded, kept = make(None), make(assets), make(assets)
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
