"""Checkpoints that do not fit the run's model are refused before the run starts."""

import copy
import shutil
from dataclasses import replace
from typing import Any

import pytest

from actors.preflight.checks import check_source
from configs.sum_digits import tiny, tiny_moe
from rl.models.files.hf import write_random_model
from rl.models.lora import LoRA
from rl.models.qwen3 import model_registry
from rl.starting_point import describe_random_model, open_model_folder
from rl.training.checkpoints.config import LoadSource
from rl.training.engine import TrainingEngine

ADAPTERS = LoRA.Config(rank=4, target_modules=("q_proj", "v_proj"))


def make_engine(*, vocab_size=None, optimizer="AdamW", converters=()):
    config = tiny()
    spec = model_registry("tiny")
    if vocab_size is not None:
        model = copy.copy(spec.model)
        model.vocab_size = vocab_size
        spec = replace(spec, model=model)
    config.trainer.optimizer.name = optimizer
    config.trainer.converters = converters
    return TrainingEngine(config=config.trainer, model_spec=spec, hf_assets_path=None, device="cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of the tiny model: one unchanged, and one per difference."""
    folder = tmp_path_factory.mktemp("saved")
    engines = {
        "plain": make_engine(),
        "lora": make_engine(converters=(ADAPTERS,)),
        "muon": make_engine(optimizer="Muon"),
        "vocab": make_engine(vocab_size=384),
    }
    for name, engine in engines.items():
        engine.save_checkpoint(str(folder / name))
    return folder


def check(folder, config=None, *, model_only=False, converters=(), exclude=(), position=None):
    config = config or tiny()
    config.trainer.converters = converters
    config.trainer.checkpoint.exclude_from_loading = exclude
    source = LoadSource(path=folder, model_only=model_only, position=position)
    start = describe_random_model(folder / "nowhere", spec=config.model, seed=0)
    check_source(source, start=start, trainer=config.trainer, num_steps=80, on_gpu=False)


def test_matching_checkpoint_is_accepted(saved, tmp_path):
    for model_only in (False, True):
        check(saved / "plain", model_only=model_only)
        check(saved / "lora", converters=(ADAPTERS,), model_only=model_only)
    check(saved / "muon", model_only=True)
    folder = write_random_model(tmp_path / "model", spec=model_registry("tiny"), seed=0)
    check(folder, model_only=True)
    check(folder, model_only=True, converters=(ADAPTERS,))


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("lora", {}, "made with LoRA .* this run has no converter .*; tensor .* is missing"),
        ("plain", {"converters": (ADAPTERS,)}, "made with no converter .* this run has LoRA .* is "
                                               "missing"),
        ("lora", {"converters": (replace(ADAPTERS, alpha=4.0),), "model_only": True},
         r"made with LoRA .*alpha=32\.0.*, this run has LoRA .*alpha=4\.0.*\. Give the run the "
         r"model, conv"),
        ("muon", {}, "tensor optimizer.*exp_avg is missing.*optimizer, reference. to "
                     "checkpoint.exclude_from_loading"),
        ("plain", {"config": tiny_moe()}, "router.weight is missing"),
        ("vocab", {"model_only": True},
         r"embed_tokens.weight has shape \[384, 128\], the run needs \[320, 128\]"),
        ("vocab", {"exclude": ("model.embed_tokens",)}, r"optimizer\.embed_tokens\.weight\.exp_avg "
                                                        r"has shape"),
        ("plain", {"exclude": ("model.nothing",)}, "'model.nothing' names nothing that would be "
                                                   "loaded"),
    ],
)  # fmt: skip
def test_checkpoint_of_another_model_is_refused_with_the_difference(saved, name, options, says):
    with pytest.raises(ValueError, match=says):
        check(saved / name, **options)


def test_excluded_tensors_may_have_another_shape(saved):
    check(saved / "vocab", exclude=("model.embed_tokens",), model_only=True)
    check(saved / "vocab", exclude=("*.embed_tokens.*",))
    check(saved / "muon", exclude=("optimizer",))


def test_checkpoint_of_another_tokenizer_is_refused_with_both_folders(tmp_path):
    config = tiny()
    spec = model_registry("tiny")
    start = describe_random_model(tmp_path / "cache", spec=spec, seed=0)
    start.make()
    engine = TrainingEngine(
        config=config.trainer, model_spec=spec, hf_assets_path=str(start.folder), device="cpu"
    )
    engine.save_checkpoint(str(tmp_path / "step-0"))
    other = shutil.copytree(start.folder, tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace("[ANSWER]", "[RESULT]"))
    sources = [
        LoadSource(path=tmp_path / "step-0", model_only=model_only, position=None)
        for model_only in (False, True)
    ]
    for_run: Any = {"trainer": config.trainer, "num_steps": 80, "on_gpu": False}
    # The random model is not written yet; its tokenizer is known already.
    for fitting in (start, describe_random_model(tmp_path / "cache-2", spec=spec, seed=1)):
        for source in (None, *sources):
            check_source(source, start=fitting, **for_run)
    changed = open_model_folder(other, spec=spec)
    made = rf"{tmp_path}/step-0 was made with the tokenizer of {start.folder}"
    says = rf"{made}, this run has {other} \(tokenizer\.json differs\)"
    for source in sources:
        with pytest.raises(ValueError, match=says):
            check_source(source, start=changed, **for_run)
    config.trainer.checkpoint.exclude_from_loading = ("tokenizer",)
    check_source(sources[0], start=changed, **for_run)
