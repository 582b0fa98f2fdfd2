"""Which options are refused, have no effect, or can only be as they are.

What is refused are the run's own checks, all of them and not up to the first. What has no effect is said
beside the fields (`rl.config.effect`), and here where fields of different components decide together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from actors.checks import (
    check_converters,
    check_end,
    check_load_source,
    check_memory,
    check_reference_weights,
    check_replicas,
    check_same_tokenizer,
    check_waits,
)
from actors.explain.effects import run_effects
from actors.explain.explanation import OptionNote, Options
from actors.explain.known import Known
from actors.explain.loaded import Loaded
from actors.explain.machine import Machine, gpus_needed
from actors.explain.prompts import prompt_checks
from actors.layout_checks import layout_checks
from actors.run_config import RunConfig
from rl.config.effect import idle_fields
from rl.config.registry import ResolvedRun
from rl.config.tree import walk
from rl.config.trial import fixed_options
from rl.observability.sinks.config import check_installed
from rl.training.checkpoint_config import LoadSource
from rl.training.memory import check_device_memory
from rl.weights.files import check_unused


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """Why a config is refused."""

    anywhere: tuple[str, ...]
    here: tuple[str, ...]
    """On this machine alone."""


def find_faults(known: Known, loaded: Loaded, *, here: Machine, resumes: bool) -> Faults:
    """By the checks that a run makes before it starts. A fault that is there with GPUs and without has
    nothing to do with the machine."""
    on_cpus = _config_faults(known, num_gpus=0, resumes=resumes)
    on_gpus = _config_faults(known, num_gpus=max(gpus_needed(known.config.fleet), 1), resumes=resumes)
    prompts = messages(prompt_checks(known, warms_up=_warms_up(known.config, loaded.source)))
    anywhere = (*(fault for fault in on_gpus if fault in on_cpus), *prompts)
    found = [*known.faults, *loaded.faults]
    found += on_cpus if here.num_gpus == 0 else _config_faults(known, num_gpus=here.num_gpus, resumes=resumes)
    found += _machine_faults(known, loaded.source, here=here) if not anywhere else []
    return Faults(anywhere=anywhere, here=tuple(f for f in dict.fromkeys(found) if f not in anywhere))


def _warms_up(config: RunConfig, source: LoadSource | None) -> bool:
    """Whether a run makes its start by demonstrations, unless an earlier one has."""
    starts_here = source is None or source.needs_start(reference=config.trainer.reference.enable)
    return config.hf_assets_path is None and config.warmup is not None and starts_here


def _config_faults(known: Known, *, num_gpus: int, resumes: bool) -> list[str]:
    """Of the config on a machine with so many GPUs."""
    config = known.config
    checks: list[Callable[[], object]] = [
        *layout_checks(config.fleet, model_spec=known.spec, loop=config.loop, num_gpus=num_gpus),
        partial(check_converters, config.fleet, model_spec=known.spec, num_gpus=num_gpus),
        partial(check_end, config.fleet, warms_up=config.warmup is not None, resumes=resumes),
        partial(check_waits, config.fleet, store=config.weights),
    ]
    return messages(checks)


def _machine_faults(known: Known, source: LoadSource | None, *, here: Machine) -> list[str]:
    """Memory and cores, packages, and files that other runs have left or that are to be loaded."""
    config, fleet = known.config, known.config.fleet
    checks: list[Callable[[], object]] = [
        partial(check_installed, config.sinks),
        partial(check_unused, config.weights),
        partial(_check_source, known, source, num_gpus=here.num_gpus),
    ]
    if not config.launch.on_cluster and here.num_gpus == 0:
        checks += [
            partial(check_memory, fleet, model_spec=known.spec, memory_bytes=here.memory_bytes),
            partial(check_replicas, fleet, num_cores=here.num_cores, memory_bytes=here.memory_bytes),
        ]
    elif not config.launch.on_cluster and here.gpu_bytes is not None:
        checks.append(partial(_check_gpu, known, gpu_bytes=here.gpu_bytes))
    return messages(checks)


def _check_source(known: Known, source: LoadSource | None, *, num_gpus: int) -> None:
    config = known.config
    if known.start is not None:
        check_same_tokenizer(source, start=known.start, fleet=config.fleet)
    # A warm-up that is not made here has a folder of its own.
    if known.start is not None and not _warms_up(config, None):
        check_reference_weights(source, start=known.start, fleet=config.fleet, num_gpus=num_gpus)
    check_load_source(
        source,
        fleet=config.fleet,
        model_spec=known.spec,
        num_steps=config.loop.num_steps,
        num_gpus=num_gpus,
    )


def _check_gpu(known: Known, *, gpu_bytes: int) -> None:
    trainer = known.config.trainer
    degrees = trainer.parallelism.degrees(trainer.num_procs)
    need = trainer.estimate_memory(known.spec, degrees=degrees, on_gpu=True)
    check_device_memory(need, device_bytes=gpu_bytes, compiled=trainer.compile.enable)


def messages(checks: Sequence[Callable[[], object]]) -> list[str]:
    """What they refuse, each reason once."""
    found: dict[str, None] = {}
    for check in checks:
        try:
            check()
        except (ValueError, OSError) as error:
            found[str(error)] = None
    return list(found)


def option_notes(run: ResolvedRun, known: Known, *, faults: Faults, on_gpu: bool, num_gpus: int) -> Options:
    """All there is to say of options; `num_gpus` of the machine that is explained."""
    idle = [*_idle(known, on_gpu=on_gpu)]
    in_vain = {note.path for note in idle if _is_set(run, note.path.removesuffix(".*"))}
    quiet = {note.path.removesuffix("*") for note in idle}

    def wrong(config: RunConfig) -> list[str]:
        spec = replace(known.spec, batch_invariant=config.batch_invariant)
        return messages(layout_checks(config.fleet, model_spec=spec, loop=config.loop, num_gpus=num_gpus))

    fixed = [
        OptionNote(path=option.path, why=_tried(option.tried, option.why))
        for option in fixed_options(known.config, check=wrong)
        if not any(option.path == path or option.path.startswith(path) for path in quiet)
    ]
    return Options(
        refused=faults.anywhere,
        refused_here=faults.here,
        set_in_vain=tuple(note for note in idle if note.path in in_vain),
        idle=tuple(note for note in idle if note.path not in in_vain),
        fixed=tuple(fixed),
    )


def _tried(value: object, why: str) -> str:
    return why if why.startswith("has no effect") else f"{value!r} is refused: {why}"


def _idle(known: Known, *, on_gpu: bool) -> Iterator[OptionNote]:
    """In the order of the config, each once."""
    config = known.config
    entries = {entry.path: entry for entry in walk(config)}
    found = {idle.path: f"with {idle.why}" for idle in idle_fields(config)}
    for path, why in run_effects(known, on_gpu=on_gpu):
        if not any(path == known_path or path.startswith(f"{known_path}.") for known_path in found):
            found[path] = why
    for path in sorted(found, key=list(entries).index):
        yield OptionNote(path=f"{path}.*" if entries[path].kind == "node" else path, why=found[path])


def _is_set(run: ResolvedRun, path: str) -> bool:
    """Whether a field, or one of a component, is at another value than its default's."""
    *parents, name = path.split(".")
    owner = run.config
    for parent in parents:
        owner = owner[int(parent)] if isinstance(owner, list | tuple) else getattr(owner, parent)
    default = type(owner).__dataclass_fields__[name]
    value = getattr(owner, name)
    if default.default_factory is not None and callable(default.default_factory):
        return bool(value != default.default_factory())
    return bool(value != default.default)
