"""Phases of TRL's step, and the folder in which no completion ends early."""

import json
from typing import Any

import pytest

from benchmarks import trl_sides
from benchmarks.grpo_vs_trl import main
from benchmarks.sums import write_endless_model
from rl.models.files.tokenizer import build_byte_tokenizer


def test_an_inner_phase_is_not_part_of_the_outer_one(monkeypatch):
    times = iter([0.0, 1.0, 2.0, 5.0, 5.0, 6.0, 9.0, 10.0, 10.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = trl_sides.PhaseClock()
    clock.begin()  # at 0
    with clock.phase("train"):  # 1 to 9
        with clock.phase("generate"):  # 2 to 5
            pass
        with clock.phase("reward"):  # 5 to 6
            pass
    clock.end()  # at 10
    assert clock.steps == [
        {"step": 10.0, "generate": 3.0, "reward": 1.0, "train": 4.0, "other": 2.0}
    ]


def test_the_end_token_becomes_the_last_special_one(tmp_path):
    build_byte_tokenizer(tmp_path / "assets")
    (tmp_path / "assets/model.safetensors").touch()
    (tmp_path / "assets/config.json").write_text('{"eos_token_id": 257, "dtype": "bfloat16"}')
    write_endless_model(tmp_path / "model", assets=tmp_path / "assets", dtype="float32")
    settings: dict[str, Any] = {}
    for name in ("config", "generation_config", "tokenizer_config"):
        settings |= json.loads((tmp_path / f"model/{name}.json").read_text())
    assert settings["eos_token"] == "[ANSWER]"
    assert settings["eos_token_id"] == 261
    assert settings["dtype"] == "float32"
    # Weights are large; of other files, a model's folder holds no links to elsewhere.
    links = [file.name for file in (tmp_path / "model").iterdir() if file.is_symlink()]
    assert links == ["model.safetensors"]


def test_a_missing_folder_is_refused_before_anything_runs(monkeypatch, tmp_path):
    arguments = ["grpo_vs_trl", "--model", "smollm2", "--assets", str(tmp_path)]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit, match=f"--assets: .*{tmp_path}"):
        main()
