"""Folders of runs whose weights are random: config, a checkpoint, and the weights of the end."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from actors.preflight.plan import find_untrained_start
from rl.config.json import write_json
from rl.config.registry import resolve
from rl.config.tree import rebuild
from rl.training.engine import TrainingEngine


def make_trained_run(run: Path, *, step: int) -> Path:
    """Write the folder of a finished run of `configs.sum_digits.tiny`."""
    run.mkdir(parents=True)
    request = resolve("configs.sum_digits", "tiny")
    config = rebuild(request.config, {"dump_folder": str(run.parent)})
    write_json(dataclasses.replace(request, config=config), run / "config.json")
    set_status(run, "finished")
    start = find_untrained_start(config)
    start.make()
    engine = TrainingEngine(
        config=TrainingEngine.Config(),
        model_spec=start.spec,
        hf_assets_path=str(start.folder),
        device="cpu",
    )
    engine.save_checkpoint(str(run / "checkpoints" / f"step-{step}"))
    engine.export_hf(str(run / "checkpoints" / "hf"))
    return run


def set_status(run: Path, status: str) -> None:
    (run / "status.json").write_text(json.dumps({"status": status}))
