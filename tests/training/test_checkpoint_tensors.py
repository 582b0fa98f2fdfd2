"""Checkpoints that do not match a run are refused by name, and nothing is loaded from them.

tests/actors/test_load_source.py has further differences, found before a run starts.
"""

import shutil
from typing import Any

import pytest

from rl.models.lora import LoRA
from tests.training.parts import assert_near, make_engine, step, write_assets

LORA: dict[str, Any] = {"rank": 2, "alpha": 4.0, "target_modules": ("q_proj", "v_proj")}


def with_lora(assets, **settings):
    return make_engine(assets, converters=(LoRA.Config(**(LORA | settings)),))


@pytest.fixture(scope="module")
def saved(assets, tmp_path_factory):
    """Checkpoints after one step, plain and with LoRA."""
    folder = tmp_path_factory.mktemp("saved")
    engines = {"plain": make_engine(assets), "lora": with_lora(assets)}
    for name, engine in engines.items():
        step(engine)
        engine.save_checkpoint(str(folder / name))
    return folder


def refused(engine, folder, **options):
    """Return the error of a load that must leave the parameters unchanged."""
    before = {name: p.detach().clone() for name, p in engine.policy.parameters.items()}
    with pytest.raises(ValueError) as error:  # noqa: PT011
        engine.load_checkpoint(str(folder), **options)
    assert_near(dict(engine.policy.parameters), before, relative=0.0)
    return str(error.value)


def test_adapters_with_other_settings_are_refused(assets, saved):
    # q, k and v are one weight, whose factors have the same shapes.
    engine = with_lora(assets, target_modules=("q_proj", "k_proj"))
    for options in ({}, {"model_only": True}):
        says = refused(engine, saved / "lora", **options)
        assert "made with LoRA (rank=2, alpha=4.0, target_modules=['q_proj', 'v_proj']" in says


def test_adapters_can_be_excluded_on_either_side(assets, saved):
    plain = make_engine(assets)
    plain.load_checkpoint(str(saved / "plain"), model_only=True)
    lora = with_lora(assets)
    lora.load_checkpoint(str(saved / "plain"), model_only=True, exclude=["model.*_lora.*"])
    # The product of a fresh adapter is zero.
    assert_near(lora.model_state_dict(), plain.model_state_dict(), relative=0.0)
    plain.load_checkpoint(str(saved / "lora"), model_only=True, exclude=["model.*_lora.*"])
    assert_near(plain.model_state_dict(), make_engine(assets).model_state_dict(), relative=0.0)


def test_another_architecture_is_refused(assets, saved, tmp_path):
    untied = make_engine(write_assets(tmp_path / "untied", tie=False))
    assert "model.lm_head.weight is missing" in refused(untied, saved / "plain")
    assert "another architecture or size" in refused(untied, assets)
    untied.save_checkpoint(str(tmp_path / "own"))
    assert "model.lm_head.weight of shape [320, 36] has no place" in refused(
        make_engine(assets), tmp_path / "own"
    )


def test_exclusion_that_names_nothing_is_refused(assets, saved):
    engine = make_engine(assets)
    for exclude, options in (("model.nrm", {}), ("optimizer", {"model_only": True})):
        says = refused(engine, saved / "plain", exclude=[exclude], **options)
        assert f"{exclude!r} names nothing that would be loaded" in says


def test_other_tokens_are_refused_unless_excluded(assets, saved, tmp_path):
    shutil.copytree(assets, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(file.read_text().replace("[ANSWER]", "[RESULT]"))
    engine = make_engine(str(tmp_path / "other"))
    for model_only in (False, True):
        says = refused(engine, saved / "plain", model_only=model_only)
        assert (
            f"plain was made with the tokenizer of {assets}, this run has {file.parent} (tokenizer.json"
            in says
        )
    assert engine.load_checkpoint(str(saved / "plain"), exclude=("tokenizer",)) == 1
