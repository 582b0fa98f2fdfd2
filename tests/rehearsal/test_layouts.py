"""Whole runs with actors on GPUs that are not there, in six layouts.

A run has to reach its end, and every process may open a context on its own GPU only: about 0.5 GB
each.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.support.rehearsal import ONE_ALL_REDUCE, RehearsedRun

pytestmark = pytest.mark.rehearsal

SHORT = (
    "--module", "sum_digits", "--loop.num_steps", "2", "--warmup.num_steps", "1",
    "--loop.eval_every", "0",
    "--loop.groups_per_batch", "8", "--batch_invariant", "False",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    options: tuple[str, ...]
    gpus: dict[str, list[int]]
    """GPU of each process of a role, by rank."""

    @property
    def num_gpus(self) -> int:
        return 1 + max(gpu for gpus in self.gpus.values() for gpu in gpus)


LAYOUTS = {
    "one-each": Layout(options=("--config", "tiny"), gpus={"trainer": [0], "generator": [1]}),
    "fsdp2-tp2": Layout(
        options=("--config", "tiny_fsdp2_tp2"), gpus={"trainer": [0, 1, 2, 3], "generator": [4]}
    ),
    "ddp2": Layout(options=("--config", "tiny_ddp2"), gpus={"trainer": [0, 1], "generator": [2]}),
    "tp2": Layout(options=("--config", "tiny_tp2"), gpus={"trainer": [0, 1], "generator": [2, 3]}),
    "replicas-ahead": Layout(
        options=("--config", "tiny_async", "--generator.num_replicas", "2"),
        gpus={"trainer": [0], "generator_0": [1], "generator_1": [2]},
    ),
    "shared": Layout(
        options=(
            "--config",
            "tiny",
            "--launch.share_gpus",
            "True",
            "--generator.can_sleep",
            "True",
        ),
        gpus={"trainer": [0], "generator": [0]},
    ),
}


def contexts(run: RehearsedRun) -> dict[str, list[tuple[int, ...]]]:
    """Return, for each role, the GPUs on which each of its processes has a context."""
    roles = sorted({one.role for one in run.counters})
    return {role: [one.physical_contexts for one in run.of_role(role)] for role in roles}


def opened(run: RehearsedRun) -> list[str]:
    """Return which call opened each context."""
    return [
        f"{one.role} {one.local_rank} {call}"
        for one in run.counters
        for call in one.calls
        if call.startswith("context on")
    ]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_run_ends_and_each_process_uses_its_own_gpu_only(rehearsal, layout):
    run = rehearsal.train(
        *SHORT, *layout.options, settings={"DEVICES": layout.num_gpus}, env=ONE_ALL_REDUCE
    )
    assert run.status == 0, run.describe()
    assert [step["step"] for step in run.steps] == [1, 2]
    assert run.violations == []
    expected = {role: [(gpu,) for gpu in gpus] for role, gpus in sorted(layout.gpus.items())}
    assert contexts(run) == expected, opened(run)
