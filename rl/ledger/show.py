"""What a ledger has of an episode, as text: its turns, and a line for each sampled token.

ledger/000003-698a714d45e96df3c8765019bb1155fb.parquet
problem 'sum-digits/12-34', sample 2: reward 0.1, end done
row 34: turn 0, role main, minibatch 0, request 5d0c.0 of generator-0, receipt 0f2a...
  token     id  version    logprob    trainer  mask     advantage   in loss
      0    266        2   -0.00012   -0.00012  trained      -0.25     -0.25
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rl.ledger.files import LedgerError, list_files, read
from rl.ledger.step import LedgerStep, Place
from rl.rollouts.trained import REASONS
from rl.utils.printing import truncate

MAX_PROBLEMS = 3
"""Problems of a step that an error names."""


def read_step(ledger: Path, *, step: int) -> LedgerStep:
    """Return a step of a ledger; raise LedgerError if there is none, or its file is damaged."""
    files = {file.step: file for file in list_files(ledger)}
    if step not in files:
        raise LedgerError(
            f"--show {step}: the ledger has no such step; it has {min(files)} to {max(files)}"
        )
    return LedgerStep(read(files[step]))


def show_episode(step: LedgerStep, *, problem: str, sample: int) -> Iterator[str]:
    """Yield lines about a sample of a problem; raise LedgerError if the step has none.

    A problem may be in a step more than once.
    """
    samples: dict[str, dict[int, list[tuple[int, int]]]] = {}
    for p, group in enumerate(step.groups):
        of_problem = samples.setdefault(group["problem"], {})
        for m, member in enumerate(group["members"]):
            of_problem.setdefault(member["sample"], []).append((p, m))
    if problem not in samples:
        some = ", ".join(repr(name) for name in [*samples][:MAX_PROBLEMS])
        raise LedgerError(
            f"step {step.number} has no problem {truncate(problem, most=200)!r}; it has "
            f"{len(samples)}: {some}{', ...' if len(samples) > MAX_PROBLEMS else ''}"
        )
    if sample not in samples[problem]:
        raise LedgerError(
            f"problem {problem!r} of step {step.number} has no sample {sample}; it has "
            f"{', '.join(map(str, samples[problem]))}"
        )
    yield f"ledger/{step.name}"
    for place in samples[problem][sample]:
        yield from _show(step, *place)


def _show(step: LedgerStep, group: int, member: int) -> Iterator[str]:
    facts = step.groups[group]["members"][member]
    where = step.describe(Place(group=group, member=member))
    yield f"{where}: reward {facts['reward']:g}, end {facts['end']}"
    is_of_N = (step.turns["group"] == group) & (step.turns["member"] == member)
    if not is_of_N.any():
        yield "its tokens are not recorded (ledger.share)"
    for n in map(int, is_of_N.nonzero()[0]):
        turns = step.turns
        minibatch = int(turns["minibatch"][n])
        yield (
            f"row {n}: turn {turns['turn'][n]}, role {turns['role'][n]}, "
            + ("in no minibatch" if minibatch < 0 else f"minibatch {minibatch}")
            + f", request {turns['request'][n]} of {turns['generator'][n]}, "
            + f"receipt {turns['receipt'][n].hex()}, {len(step.read_context(n))} tokens read"
        )
        yield (
            f"{'token':>7} {'id':>7} {'version':>8} {'logprob':>11} {'trainer':>11}  {'mask':<9} "
            f"{'advantage':>11} {'in loss':>11}"
        )
        for t in range(int(step.starts[n]), int(step.starts[n + 1])):
            yield _show_token(step, t, number=t - int(step.starts[n]))


def _show_token(step: LedgerStep, t: int, *, number: int) -> str:
    values = {name: column[t] for name, column in step.tokens.items()}
    return (
        f"{number:>7} {values['token_ids']:>7} {values['versions']:>8} "
        f"{values['logprobs']:>11.5g} {values['trainer_logprobs']:>11.5g}  "
        f"{REASONS[values['mask']]:<9} {values['advantages']:>11.5g} "
        f"{values['trainer_advantages']:>11.5g}"
    )
