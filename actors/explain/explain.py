"""What a run would be, put together: `python -m rl.simple_grpo_sum_digits --explain`.

Nothing is started and nothing is written. Each part is found by itself, so that what is wrong with one does
not hide the others.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from actors.explain.arithmetic import run_arithmetic, step_arithmetic
from actors.explain.explanation import Devices, Explanation, RolePlace, StepArithmetic, Unknown
from actors.explain.known import find_out, not_foreseen
from actors.explain.layout import role_places
from actors.explain.loaded import find_loaded
from actors.explain.machine import Machine, explained_on
from actors.explain.memory import memory
from actors.explain.options import find_faults, option_notes
from actors.explain.text import as_text
from actors.explain.view import config_view
from actors.explain.weights import staleness, sync_bytes
from actors.roles import trains_on_gpu
from actors.run_config import RunConfig
from rl.config.registry import ExplanationForm, ResolvedRun

T = TypeVar("T")


def explain(run: ResolvedRun, *, here: Machine) -> Explanation:
    """Of a run of a `RunConfig`, started on the machine `here`."""
    config: RunConfig = run.config
    fleet, known, loaded = config.fleet, find_out(config), find_loaded(config, resumes=run.resumes)
    machine, assumed = explained_on(fleet, spec=known.spec, here=here)
    on_gpu = trains_on_gpu(config.launch, num_gpus=machine.num_gpus)
    faults = find_faults(known, loaded, here=here, resumes=run.resumes is not None)
    degrees = _or_unknown(lambda: fleet.trainer.parallelism.degrees(fleet.trainer.num_procs))
    in_run = run_arithmetic(known, done_steps=loaded.done_steps)
    step: StepArithmetic | Unknown
    layout: tuple[RolePlace, ...] | Unknown
    if isinstance(degrees, Unknown):
        step = layout = degrees
    else:
        step = _or_unknown(partial(step_arithmetic, known, degrees=degrees))
        layout = _or_unknown(partial(role_places, fleet, degrees=degrees, num_gpus=machine.num_gpus))
    return Explanation(
        devices=Devices(
            on_gpu=on_gpu,
            num_gpus=machine.num_gpus,
            gpu_bytes=machine.gpu_bytes if on_gpu else None,
            assumed=assumed,
        ),
        model=f"{known.spec.name} {known.spec.flavor}",
        config=config_view(run),
        step=step,
        run=in_run,
        layout=layout,
        memory=memory(known, degrees=degrees, machine=machine, on_gpu=on_gpu),
        staleness=staleness(config.loop),
        sync=sync_bytes(known, publishes=in_run.publishes),
        options=option_notes(run, known, faults=faults, on_gpu=on_gpu, num_gpus=machine.num_gpus),
        unknown=(*loaded.damaged, *not_foreseen(config.loop), *known.unknown),
    )


def show(run: ResolvedRun, *, form: ExplanationForm, here: Machine) -> int:
    """Print it; returns the exit status: 2 for a config that is refused on any machine, whose reasons also go
    to stderr as a run's would, else 0."""
    explanation = explain(run, here=here)
    if form == "json":
        print(json.dumps(dataclasses.asdict(explanation), indent=2, allow_nan=False))
    else:
        print(as_text(explanation))
    for reason in explanation.options.refused:
        print(f"error: {reason}", file=sys.stderr)
    return 2 if explanation.options.refused else 0


def _or_unknown(find: Callable[[], T]) -> T | Unknown:
    try:
        return find()
    except ValueError as error:
        return Unknown(why=str(error))
