"""Explain a run without starting it: `python -m rl.simple_grpo_sum_digits --explain`.

Nothing is started and nothing is written. The explanation is one dict of sections, printed as JSON or as text.
Refusals come from the run's own checks: all of them, not only the first. A field without effect is declared beside
the field (`rl.config.effect`), or here where fields of different components decide together.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Any

from actors.checks import Machine, check_source, config_faults, machine_faults, messages
from actors.cluster import trains_on_gpu
from actors.explain.known import Known, explained_on, find_out
from actors.explain.numbers import layout, memory, publish_bytes, run_arithmetic, staleness, step_arithmetic
from rl.config.effect import idle_options
from rl.config.json import differences, leaves, to_dict
from rl.config.registry import ExplanationForm, ResolvedRun, resolve
from rl.config.tree import walk
from rl.distributed.mesh import Degrees

WIDTH = 110
NUM_LISTED = 6
"""Numbers that are listed one by one; of more only the first and the last are."""


def show(run: ResolvedRun, *, form: ExplanationForm, here: Machine) -> int:
    """Print the explanation of a run and return the exit status.

    The status is 2 for a config that is refused on any machine (the reasons also go to stderr), else 0.
    """
    explanation = explain(run, here=here)
    if form == "json":
        print(json.dumps(explanation, indent=2, allow_nan=False))
    else:
        print(as_text(explanation))
    for reason in explanation["options"]["refused"]:
        print(f"error: {reason}", file=sys.stderr)
    return 2 if explanation["options"]["refused"] else 0


def explain(run: ResolvedRun, *, here: Machine) -> dict[str, Any]:
    """Explain a run of a `RunConfig` that would be started on the machine `here`."""
    config, known = run.config, find_out(run.config, resumes=run.resumes)
    machine, assumed = explained_on(config, spec=known.spec, here=here)
    on_gpu = trains_on_gpu(config.launch, num_gpus=machine.num_gpus)
    values = to_dict(config)
    changes = {
        d.path: {"value": d.value, "registry": d.before, "source": _source(run, d.path)}
        for d in differences(values, to_dict(resolve(run.module, run.function).config))
    }
    degrees: Degrees | None = None
    step: Any
    places: Any
    try:
        found = degrees = config.trainer.parallelism.degrees(config.trainer.num_procs)
        places = _or_unknown(lambda: layout(config, degrees=found, num_gpus=machine.num_gpus))
        step = _or_unknown(lambda: step_arithmetic(known, degrees=found))
    except ValueError as error:
        step = places = f"not known: {error}"
    in_run = run_arithmetic(known)
    return {
        "config": f"{run.module}.{run.function}",
        "model": f"{known.spec.name} {known.spec.flavor}",
        "devices": assumed or f"{'GPUs' if on_gpu else 'CPU cores'} of this machine",
        "values": dict(leaves(values)),
        "changes": changes,
        "step": step,
        "run": in_run,
        "layout": places,
        "memory": memory(known, degrees=degrees, machine=machine, on_gpu=on_gpu),
        "staleness": staleness(config.loop),
        "publish": publish_bytes(known, publishes=in_run["publishes"]),
        "options": option_notes(
            known,
            machine=machine,
            on_gpu=on_gpu,
            resumes=run.resumes is not None,
            changed=tuple(changes),
        ),
        "not_checked": known.unknown,
    }


def _or_unknown(find: Callable[[], dict[str, Any]]) -> dict[str, Any] | str:
    try:
        return find()
    except ValueError as error:
        return f"not known: {error}"


def _source(run: ResolvedRun, path: str) -> str:
    # An option may turn off a component, and a list of components is one leaf.
    for option in run.options:
        if f"{path}.".startswith(f"{option}.") or option.startswith(f"{path}."):
            return "command line"
    return "code" if run.file is None else str(run.file)


def option_notes(
    known: Known, *, machine: Machine, on_gpu: bool, resumes: bool, changed: Collection[str]
) -> dict[str, Any]:
    """Return refused and ineffective options, in the order of the config.

    Args:
        machine: the machine that the run is explained for.
        changed: paths of the fields that differ from the registry function.
    """
    config, spec = known.config, known.spec
    refused = list(
        dict.fromkeys(config_faults(config, spec=spec, num_gpus=machine.num_gpus, resumes=resumes))
    )
    refused_here = list(known.faults)
    if not refused:
        refused_here += machine_faults(config, spec=spec, machine=machine)
        if known.start is not None:
            check = partial(check_source, start=known.start, config=config, num_gpus=machine.num_gpus)
            refused_here += messages([partial(check, known.source)])
    entries = {entry.path: entry for entry in walk(config)}
    idle = {*idle_options(config), *idle_beside_others(known, on_gpu=on_gpu)}
    listed = [path for path in entries if path in idle and not _is_below(path, idle - {path})]
    in_vain = [path for path in listed if any(_is_below(change, {path}) for change in changed)]
    names = {path: f"{path}.*" if entries[path].kind == "node" else path for path in listed}
    return {
        "refused": refused,
        "refused_here": refused_here,
        "set_without_effect": [names[path] for path in in_vain],
        "without_effect": [names[path] for path in listed if path not in in_vain],
    }


def _is_below(path: str, components: Collection[str]) -> bool:
    """Return whether a path is one of the components or a field of one."""
    return any(f"{path}.".startswith(f"{component}.") for component in components)


def idle_beside_others(known: Known, *, on_gpu: bool) -> set[str]:
    """Return the fields without effect because of other components, the machine or the task."""
    config, trainer, loop = known.config, known.config.trainer, known.config.loop
    degrees = Degrees(dp_replicate=1, dp_shard=1, tp=1)
    with suppress(ValueError):  # The layout is refused anyway.
        degrees = trainer.parallelism.degrees(trainer.num_procs)
    is_whole = degrees.dp_replicate * degrees.fsdp == 1 and not trainer.training.cpu_offload
    packs_alone = degrees.cp > 1 or trainer.compile.includes("model") or known.spec.model.has_experts
    on_policy = loop.max_off_policy_steps == 0 and loop.num_minibatches == 1
    clips = [f"trainer.loss.{f.name}" for f in fields(trainer.loss) if f.name.startswith("clip_")]  # type: ignore[arg-type]
    has_async_rewards = known.task is None or known.task.rubric(seed=config.seed).has_async_functions
    in_one_machine = config.weights.transport == "auto" and config.launch.hosts in ("this", "process")
    rules: list[tuple[bool, Sequence[str]]] = [
        (
            loop.max_off_policy_steps == 0,
            ["generator.on_update"],
        ),  # nothing is generated while weights change
        (on_gpu, ["generator.cpu_kv_cache_gib"]),
        (not on_gpu, ["generator.gpu_memory_utilization", "generator.enforce_eager"]),
        (not on_gpu, ["trainer.training.cpu_offload"]),
        (not config.launch.share_gpus, ["generator.can_sleep"]),
        (config.generator.tensor_parallel_degree == 1, ["generator.rank_timeout_s"]),
        (trainer.num_procs == 1, ["trainer.comm"]),
        (is_whole, ["trainer.parallelism.reshard_after_forward", "trainer.training.reduce_dtype"]),
        (degrees.tp == 1, ["trainer.parallelism.loss_parallel"]),
        (packs_alone, ["trainer.training.share_prompts"]),
        (config.batch_invariant and on_policy, clips),  # every ratio is 1
        (
            known.single_turn,
            [f"loop.episode.{name}" for name in ("max_turns", "step_timeout_s", "timeout_s")],
        ),
        (not has_async_rewards, ["reward.max_concurrency"]),
        (in_one_machine, ["weights.rdma"]),
        (not config.sinks.enabled, ["sinks.write_s", "sinks.close_s"]),
    ]
    return {path for has_none, paths in rules if has_none for path in paths}


def as_text(explanation: Mapping[str, Any]) -> str:
    """Return all sections as aligned text, one after another."""
    readable = {
        "values": {path: json.dumps(value) for path, value in explanation["values"].items()},
        "changes": {
            path: f"{json.dumps(c['value'])}, was {json.dumps(c['registry'])} ({c['source']})"
            for path, c in explanation["changes"].items()
        },
    }
    return "\n".join(_lines({**explanation, **readable}, indent=""))


def _lines(section: Mapping[str, Any], *, indent: str) -> Iterator[str]:
    width = max((len(key) for key, value in section.items() if not _is_nested(value)), default=0)
    for key, value in section.items():
        if not _is_nested(value):
            yield f"{indent}{key:<{width}}  {_value(key, value)}"
            continue
        yield from [""] * (not indent)
        yield f"{indent}{key}" + ("" if value else ": none")
        if isinstance(value, Mapping):
            yield from _lines(value, indent=f"{indent}  ")
        for item in value if isinstance(value, list) else ():
            yield from textwrap.wrap(
                item, WIDTH, initial_indent=f"{indent}  ", subsequent_indent=f"{indent}      "
            )


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list) and not any(isinstance(v, int) for v in value)
    )


def _value(key: str, value: Any) -> str:
    if isinstance(value, list):
        numbers = [f"{number:,}" for number in value]
        return ", ".join(numbers if len(numbers) <= NUM_LISTED else [*numbers[:3], "...", numbers[-1]])
    if isinstance(value, bool) or not isinstance(value, int):
        return value if isinstance(value, str) else json.dumps(value)
    return size(value) if key.endswith("_bytes") else f"{value:,}"


def size(num_bytes: int) -> str:
    """Return bytes with three digits: 2.38 MB."""
    for unit, of_unit in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= of_unit:
            digits = max(0, 3 - len(str(num_bytes // of_unit)))
            return f"{num_bytes / of_unit:.{digits}f} {unit}"
    return f"{num_bytes} bytes"
