"""Names on the hub, asked of a fake hub by the hub's own library."""

import json
import time
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_hub_download

from rl.models.files import hub as our_hub
from rl.models.files.assets import (
    UnpreparedError,
    count_weight_bytes,
    read_unprepared_config,
    resolve_assets,
)
from rl.models.spec import model_spec, spec_from_hf
from tests.support.fake_hub import COMMITS, fake_hub

FILES = {
    "config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
    "chat_template.jinja",
    "tokenizer.json", "merges.txt", "tokenizer.model", "additional_chat_templates/tool_use.jinja",
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with files of a model, and others that a run does not read."""
    folder = tmp_path / "served"
    for name in (
        *FILES,
        "README.md",
        "pytorch_model.bin",
        "consolidated.safetensors",
        "onnx/config.json",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    spec = model_spec("llama", "tiny")
    (folder / "config.json").write_text(json.dumps(spec.adapter(spec.model).hf_config()))
    return folder


@pytest.fixture
def hub(tmp_path, model):
    with fake_hub({"org/model": model}, cache=tmp_path / "cache") as hub:
        yield hub


def resolve(name, **options):
    return resolve_assets(name, cache=Path("unused"), **options)


def test_needed_files_are_downloaded_once(hub):
    folder = resolve("org/model")
    found = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    assert set(found) == FILES
    assert (folder / "merges.txt").read_text() == "merges.txt"
    hub.requests.clear()
    assert resolve("org/model") == folder
    assert not [request for request in hub.requests if "/resolve/" in request]


@pytest.mark.parametrize("revision", ["v1.0", COMMITS["v1.0"]])
def test_revision_is_downloaded_and_then_found_without_the_hub(hub, monkeypatch, revision):
    folder = resolve("org/model", revision=revision)
    assert folder.name == COMMITS["v1.0"]
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve("org/model", revision=revision) == folder
    assert hub.requests == []
    with pytest.raises(
        ValueError, match=r"^org/model is no folder here, .* not downloaded, and HF_HUB_OFFLINE"
    ):
        resolve("org/model")


def test_model_that_was_cached_without_the_rest_of_its_tokenizer_is_taken(hub, monkeypatch):
    with monkeypatch.context() as before:
        before.setattr(our_hub, "MORE", ())
        before.setattr(our_hub, "TEMPLATES", "")
        folder = resolve("org/model")
    assert not (folder / "tokenizer.model").exists()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve("org/model") == folder


def test_folder_of_the_name_is_preferred(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("org/model").mkdir(parents=True)
    assert resolve("org/model") == Path("org/model")
    with pytest.raises(ValueError, match=r"^GGUF file org/missing.gguf does not exist$"):
        resolve("org/missing.gguf")
    assert hub.requests == []
    with pytest.raises(
        ValueError, match=r"hf_revision='v1.0': must be None, as org/model is not on the hub"
    ):
        resolve("org/model", revision="v1.0")


def test_refusals_say_what_to_do(hub):
    with pytest.raises(
        ValueError, match=r"hf_revision='v9' does not exist: must be main, v1.0 or a commit"
    ):
        resolve("org/model", revision="v9")
    with pytest.raises(
        ValueError, match=r"org/other is no folder here, and .* has no such model, or it is private"
    ):
        resolve("org/other")
    hub.gated.add("org/model")
    with pytest.raises(
        ValueError, match=r"people with permission only: ask at .*/org/model, then `hf auth login`"
    ):
        resolve("org/model")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"config.json": '{"model_type": "mixtral"}'}, "^org/model: .*model_type='mixtral'"),
        (
            {"model.Q4.gguf": ""},
            "org/model has no safetensors that transformers reads, but GGUF files: download one, "
            "`hf download org/model model.Q4.gguf`, and",
        ),
        ({"pytorch_model.bin": ""}, "org/model has no safetensors that transformers reads$"),
    ],
)
def test_no_weights_are_downloaded_of_a_model_that_is_refused(hub, model, changed, message):
    for name, text in changed.items():
        (model / name).write_text(text)
    if "config.json" not in changed:
        for file in model.glob("model*.safetensors"):
            file.unlink()
    with pytest.raises(ValueError, match=message):
        resolve("org/model")
    assert not [request for request in hub.requests if request.endswith(".safetensors")]


def test_tokenizer_alone_in_the_cache_is_not_taken_for_the_model(hub, monkeypatch):
    # `snapshot_download` would keep a list of what there is, and complain by itself.
    hf_hub_download("org/model", "tokenizer.json")
    hf_hub_download("org/model", "config.json")
    with pytest.raises(UnpreparedError):
        resolve("org/model", prepares=False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(
        ValueError, match=r"org/model is no folder here, .*run `hf download org/model` where"
    ):
        resolve("org/model")


def test_nothing_is_downloaded_where_that_is_not_allowed(hub):
    with pytest.raises(UnpreparedError, match=r"^org/model, which a run would download"):
        resolve("org/model", prepares=False)
    assert hub.requests == []
    folder = resolve("org/model")
    assert resolve("org/model", prepares=False) == folder


def test_sizes_are_read_without_the_model(hub, model, monkeypatch):
    settings = read_unprepared_config("org/model")
    assert spec_from_hf(settings).name == "llama"
    with pytest.raises(UnpreparedError):
        resolve("org/model", prepares=False)  # nothing was kept
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"org/model is no folder here, and it cannot be download"):
        read_unprepared_config("org/model")
    assert time.monotonic() - started < 5


def test_unreachable_hub_is_an_error_at_once_unless_the_model_is_cached(hub, monkeypatch):
    folder = resolve("org/model")
    monkeypatch.setattr(our_hub, "TIMEOUT_S", 0.1)
    hub.answers_after_s = 1.0
    started = time.monotonic()
    assert resolve("org/model") == folder
    with pytest.raises(
        ValueError, match=r"cannot be downloaded from .*ReadTimeout.* run `hf download org/other`"
    ):
        resolve("org/other")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(
        ValueError, match=r"ConnectError.* run `hf download org/other --revision v1` where"
    ):
        resolve("org/other", revision="v1")
    assert time.monotonic() - started < 0.9


def test_size_of_the_weights_is_the_same_before_and_after_a_download(hub):
    before = count_weight_bytes("org/model")
    assert not [request for request in hub.requests if "/resolve/" in request]
    resolve("org/model")
    # Of the weights that a run reads alone, not of consolidated.safetensors.
    assert before == count_weight_bytes("org/model") == len("model-00001-of-00002.safetensors")


def test_size_of_a_model_that_does_not_exist_is_an_error(hub):
    with pytest.raises(ValueError, match="org/other"):
        count_weight_bytes("org/other")
