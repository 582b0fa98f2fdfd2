"""Options that people set: short names for them, and their groups in `--help`."""

from __future__ import annotations

from collections.abc import Container, Mapping

ALIASES = {
    "model": "hf_assets_path",
    "data": "task.train_files",
    "reward": "task.reward",
    "lr": "trainer.optimizer.lr",
    "steps": "loop.num_steps",
    "group_size": "loop.group_size",
    "groups": "loop.groups_per_batch",
    "max_tokens": "loop.sampling.max_tokens",
    "temperature": "loop.sampling.temperature",
    "alias": "backend.base.aliases",
}
"""Path of an option by its short name."""

GROUPS: Mapping[str, tuple[str, ...]] = {
    "The run": (
        "module",
        "config",
        "name",
        "resume",
        "explain",
        "seed",
        "loop.num_steps",
        "loop.eval_every",
    ),
    "Model, data and reward": (
        "hf_assets_path",
        "task.train_files",
        "task.eval_files",
        "task.reward",
    ),
    "Sampling": (
        "loop.groups_per_batch",
        "loop.group_size",
        "loop.sampling.max_tokens",
        "loop.sampling.temperature",
        "loop.max_off_policy_steps",
    ),
    "Training": (
        "trainer.optimizer.lr",
        "loop.num_minibatches",
        "trainer.training.max_tokens_per_microbatch",
    ),
    "Results": (
        "trainer.checkpoint.interval",
        "sinks.wandb.enable",
    ),
}
"""Options that `--help` shows, by the title of their group; `--help-all` shows every option."""


def find_path(option: str, paths: Container[str]) -> str:
    """Return the path that a short name stands for in a config with these paths, or the option."""
    path = ALIASES.get(option, option)
    return path if path in paths else option


def find_short_name(path: str) -> str | None:
    """Return the short name of an option, if it has one."""
    for name, target in ALIASES.items():
        if target == path:
            return name
    return None
