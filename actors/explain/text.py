"""An explanation for the eye: one section after another, plain text."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from actors.explain.drawing import drawn
from actors.explain.explanation import (
    ConfigView,
    Explanation,
    Memory,
    OptionNote,
    Options,
    Range,
    RunArithmetic,
    Staleness,
    StepArithmetic,
    SyncBytes,
    Unknown,
)
from actors.explain.numbers import count, size, steps_text

INDENT = "  "
WIDTH = 106
SHORT = 40
"""Characters of a reason that may be said again."""


def as_text(explanation: Explanation) -> str:
    """All sections."""
    devices = explanation.devices
    on = devices.assumed or (
        "the GPUs of this machine" if devices.on_gpu else "the CPU cores of this machine"
    )
    sections: list[tuple[str, Iterable[str]]] = [
        ("The resolved config", _values(explanation.config)),
        ("What differs from the registry function", _changes(explanation.config)),
        ("One step", _step(explanation.step)),
        ("The whole run", _run(explanation.run)),
        (
            "Who runs where",
            drawn(explanation.layout, here="one machine" if devices.assumed else "this machine"),
        ),
        ("Memory, estimated", _memory(explanation.memory)),
        ("How old the weights behind a token may be", _staleness(explanation.staleness)),
        ("Bytes of a publish of the weights", _sync(explanation.sync)),
        ("Options", _options(explanation.options)),
        ("Not looked at, or not known here", explanation.unknown),
    ]
    view = explanation.config
    lines = [f"{view.module}.{view.function}: {explanation.model}, on {on}"]
    for title, body in sections:
        lines += ["", title, *(f"{INDENT}{line}".rstrip() for line in body)]
    return "\n".join(lines)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns under each other; the last is as long as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _changes(view: ConfigView) -> Iterator[str]:
    if not view.changes:
        yield "nothing"
        return
    for change in view.changes:
        said = f"{change.path}: {_value(change.value)}, was {_value(change.registry)} ({change.source})"
        yield from _wrapped(said, indent="")


def _values(view: ConfigView) -> list[str]:
    changed = {change.path for change in view.changes}
    rows = [[path, "*" if path in changed else "=", _value(value)] for path, value in view.values.items()]
    return table(rows)


def _value(value: Any) -> str:
    return json.dumps(value)


def _step(step: StepArithmetic | Unknown) -> Iterator[str]:
    if isinstance(step, Unknown):
        yield _unknown(step)
        return
    prompts = "not known here"
    if not isinstance(step.prompt_tokens, Unknown):
        prompts = f"{_range(step.prompt_tokens)} tokens in step 1"
    ends = (
        "with the prompts of step 1"
        if step.exact_prompts
        else "whatever the prompts, which are not known here"
    )
    updates = f"{step.optimizer_steps} optimizer step{'s' * (step.optimizer_steps > 1)}"
    ranks = f"{step.data_ranks} rank{'s' * (step.data_ranks > 1)}"
    yield from table(
        [
            ["samples", f"{step.num_prompts} prompts x {step.num_samples} = {step.samples}"],
            [
                "optimizer steps",
                f"{updates} of {step.samples_of_optimizer_step} samples over {ranks} of data",
            ],
            ["prompts", prompts],
            ["a sample", f"at most {count(step.sample_tokens_most)} tokens, prompt and reply"],
            ["replies", f"at most {count(step.reply_tokens_most)} tokens together"],
            ["trained on", f"{_range(step.trained_tokens)} input tokens, {ends}"],
            [
                "micro-batches",
                f"{_range(step.micro_batches)} on each rank, from replies of one token to the longest",
            ],
        ]
    )


def _run(run: RunArithmetic | Unknown) -> Iterator[str]:
    if isinstance(run, Unknown):
        yield _unknown(run)
        return
    rows = [
        ["steps", f"{run.num_steps}, with {run.optimizer_steps} optimizer steps"],
        [
            "samples",
            f"{count(run.samples)}, whose replies have at most {count(run.reply_tokens_most)} tokens",
        ],
        ["publishes", f"{run.publishes} of the weights, the first before step 1"],
        ["evaluations", _evaluations(run)],
        ["checkpoints", f"after {steps_text(run.checkpoints)}" if run.checkpoints else "none"],
    ]
    if run.done_steps:
        rows.insert(0, ["goes on", f"after step {run.done_steps}; what follows is of all steps"])
    if run.warmup_steps:
        said = f"{run.warmup_steps} supervised steps of {run.warmup_demonstrations} demonstrations"
        rows.insert(0, ["warm-up", f"{said}, unless an earlier run has made them"])
    yield from table(rows)


def _evaluations(run: RunArithmetic) -> str:
    if not run.evaluations:
        return "none"
    after = f"{len(run.evaluations)}, after {steps_text(run.evaluations)}"
    if isinstance(run.eval_problems, Unknown):
        return f"{after}; of how many problems is not known: {run.eval_problems.why}"
    sets = ", ".join(f"{number} of {name}" for name, number in run.eval_problems.items())
    replies = run.eval_replies_of_problem
    return f"{after}; problems: {sets}, {replies} repl{'ies' if replies > 1 else 'y'} each"


def _memory(memory: Memory) -> Iterator[str]:
    trainer, generator, controller = memory.trainer, memory.generator, memory.controller
    if isinstance(trainer, Unknown):
        yield f"trainer: {_unknown(trainer)}"
    else:
        yield f"trainer, each of {trainer.num_ranks}: {size(trainer.total)} at the peak of a step"
        for line in table([[name, size(value)] for name, value in trainer.parts.items() if value]):
            yield f"{INDENT}{line}"
        yield f"{INDENT}held between steps {size(trainer.held)}; {_fits(trainer.fits, trainer.available)}"
    if isinstance(generator, Unknown):
        yield f"generator: {_unknown(generator)}"
    else:
        yield f"generator, each of {generator.num_ranks}: {size(generator.weights + generator.cache)}"
        rows = [
            ["weights", size(generator.weights)],
            ["cache", f"{size(generator.cache)}, {count(generator.cache_tokens)} tokens"],
        ]
        for line in table(rows):
            yield f"{INDENT}{line}"
        yield (
            f"{INDENT}{count(generator.longest_requests)} requests of the longest at once; "
            f"{_fits(generator.fits, generator.available)}"
        )
    if isinstance(controller, Unknown):
        yield f"controller: {_unknown(controller)}"
        return
    yield f"controller: {size(controller.rollouts)} of rollouts at their longest, beside Python's own"
    if controller.shared_weights:
        yield f"shared memory for published weights: {size(controller.shared_weights)}"


def _fits(fits: bool, available: int) -> str:
    return f"{'fits' if fits else 'does not fit'} {size(available)}"


def _staleness(staleness: Staleness) -> Iterator[str]:
    yield staleness.sentence
    yield from table(
        [
            ["steps", f"at most {staleness.steps}"],
            ["policy versions", f"at most {staleness.updates}: optimizer steps between drawing and training"],
            ["prompts ahead", f"at most {staleness.groups_ahead} drawn and not yet trained on"],
        ]
    )


def _sync(sync: SyncBytes | Unknown) -> Iterator[str]:
    if isinstance(sync, Unknown):
        yield _unknown(sync)
        return
    yield from table(
        [
            ["pushed", f"{size(sync.pushed)} in {sync.num_tensors} tensors, {sync.dtype}"],
            ["pulled", f"{size(sync.pulled)}, {size(sync.pulled_by_rank)} by each rank of a generator"],
            ["in the run", f"{size(sync.run_pushed)} pushed in {sync.publishes} publishes"],
            ["by", sync.way],
        ]
    )


def _options(options: Options) -> Iterator[str]:
    yield from _listed("refused on any machine", options.refused)
    yield from _listed("refused on this machine, as it is", options.refused_here)
    yield from _listed("set, and without effect", _noted(options.set_in_vain))
    yield from _listed("without effect", _noted(options.idle))
    yield from _listed("fixed, beside the others: any other value is refused", _noted(options.fixed))


def _listed(title: str, entries: Sequence[str]) -> Iterator[str]:
    yield f"{title}:{'' if entries else ' none'}"
    for entry in entries:
        yield from _wrapped(entry, indent=INDENT)


def _wrapped(text: str, *, indent: str) -> list[str]:
    """Its further lines stand farther in."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + 2 * INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _noted(notes: Sequence[OptionNote]) -> list[str]:
    """Each with its reason, which of several in a row is said once."""
    found: list[str] = []
    before = ""
    for note in notes:
        head, colon, reason = note.why.rpartition(": ")
        is_same = len(reason) > SHORT and reason == before
        found.append(f"{note.path}: {f'{head}{colon}as above' if is_same else note.why}")
        before = reason
    return found


def _range(of: Range) -> str:
    return count(of.most) if of.fewest == of.most else f"{count(of.fewest)} to {count(of.most)}"


def _unknown(unknown: Unknown) -> str:
    return f"not known: {unknown.why}"
