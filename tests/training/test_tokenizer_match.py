"""A checkpoint made with another tokenizer is refused, by the engine and before a run starts."""

import json
import shutil

import pytest

from rl.training.checkpoint_files import read_state
from tests.training.parts import make_engine, make_samples, write_assets


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return write_assets(tmp_path_factory.mktemp("assets") / "model")


@pytest.fixture
def saved(assets, tmp_path):
    engine = make_engine(assets)
    engine.forward_backward(make_samples())
    engine.optim_step()
    engine.save_checkpoint(str(tmp_path / "step-1"))
    return tmp_path / "step-1"


def copy_with(assets, folder, *, file, old, new):
    shutil.copytree(assets, folder)
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new))
    return str(folder)


def test_a_checkpoint_notes_the_tokenizer_and_a_copy_of_it_loads(assets, saved, tmp_path):
    noted = read_state(saved).tokenizer
    assert noted is not None
    assert noted.folder == assets
    assert noted.parts["tokenizer.json"] != noted.parts["tokenizer_config.json"]
    copy = shutil.copytree(assets, tmp_path / "copy")
    assert make_engine(str(copy)).load_checkpoint(str(saved)) == 1
    assert make_engine(str(copy)).load_checkpoint(str(saved), model_only=True) == 0


def test_other_tokens_are_refused_with_both_folders_and_the_file(assets, saved, tmp_path):
    other = copy_with(assets, tmp_path / "other", file="tokenizer.json", old="[ANSWER]", new="[RESULT]")
    engine = make_engine(other)
    for model_only, why in (
        (False, "its policy would be told other tokens"),
        (True, "the rows of its"),
    ):
        says = rf"checkpoint {saved} was made with the tokenizer of {assets}, this run has that of {other}, "
        with pytest.raises(ValueError, match=says + rf"which differs \(tokenizer\.json\): {why}.*; give hf_"):
            engine.load_checkpoint(str(saved), model_only=model_only)
    assert engine.policy_version == 0
    assert engine.load_checkpoint(str(saved), exclude=("tokenizer",)) == 1
    assert engine.load_checkpoint(str(saved), model_only=True, exclude=("tokenizer",)) == 0


def test_another_template_is_refused_where_the_run_continues_not_where_it_starts(assets, saved, tmp_path):
    other = copy_with(
        assets, tmp_path / "other", file="chat_template.jinja", old="<|im_end|>", new="<|endoftext|>"
    )
    engine = make_engine(other)
    with pytest.raises(ValueError, match=r"which differs \(chat template\)"):
        engine.load_checkpoint(str(saved))
    assert engine.load_checkpoint(str(saved), model_only=True) == 0


def test_a_tokenizer_that_changed_in_its_place_is_said_to_have_changed(saved, tmp_path):
    assets = write_assets(tmp_path / "model")
    make_engine(assets).save_checkpoint(str(tmp_path / "step-2"))
    settings = tmp_path / "model" / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("<|im_end|>", "<|im_start|>"))
    with pytest.raises(ValueError, match=rf"of {assets}, which has changed since \(tokenizer_config\.json\)"):
        make_engine(assets).load_checkpoint(str(tmp_path / "step-2"))


def test_a_checkpoint_that_notes_none_loads(assets, saved, tmp_path):
    """One of an earlier version, or of an engine without a folder."""
    plain = make_engine(assets)
    plain._start._tokenizer = None
    plain.save_checkpoint(str(tmp_path / "earlier"))
    assert json.loads((tmp_path / "earlier" / "state.json").read_text())["tokenizer"] is None
    other = copy_with(assets, tmp_path / "other", file="tokenizer.json", old="[ANSWER]", new="[RESULT]")
    assert make_engine(other).load_checkpoint(str(tmp_path / "earlier")) == 0
