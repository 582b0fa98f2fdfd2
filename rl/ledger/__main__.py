"""Check of a run's ledger: `python -m rl.ledger outputs/x`.

Needs neither weights nor a GPU. With `--replay STEP` a step is trained again from the checkpoint
before it, which runs the code that the run's config names. With `--show STEP PROBLEM SAMPLE` the
tokens of an episode are printed as the ledger has them.

Exit status: 0 if everything that was trained follows from what was sampled and rewarded, the step
is the same again, or the episode is there; 1 at the first thing that does not or differs; 2 if
there is nothing to read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rl.config.json import read_json
from rl.ledger.check import check_run, find_ledger
from rl.ledger.files import FOREIGN, TINKER, LedgerError, list_files, read
from rl.ledger.findings import Checked
from rl.ledger.show import read_step, show_episode
from rl.ledger.tinker_rules import describe_facts
from rl.observability.run_folder import CONFIG
from rl.serving.run_weights import read_settings
from rl.utils.printing import print_error, print_text

MAX_VIOLATIONS = 8
"""Violations that are printed: there is one for each file that is missing or damaged."""

if TYPE_CHECKING:
    from rl.ledger.replay import Replayed
    from rl.ledger.rewards import Regraded
    from rl.training.engine import TrainingEngine


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rl.ledger",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", help="folder of the run, such as outputs/x")
    # Only one of them: each is another question.
    question = parser.add_mutually_exclusive_group()
    question.add_argument("--replay", type=int, metavar="STEP", help="train this step again")
    question.add_argument(
        "--show", nargs=3, metavar=("STEP", "PROBLEM", "SAMPLE"), help="print an episode's tokens"
    )
    options = parser.parse_args(argv)
    folder = Path(options.run).expanduser()
    try:
        if options.replay is not None:
            return _replay(folder, step=options.replay)
        if options.show is not None:
            return _print_episode(folder, *options.show)
        checked = check_run(folder)
    except ValueError as error:
        print_error(f"error: {error}")
        return 2
    except OSError as error:
        print_error(f"error: {error.filename or folder}: {error.strerror or error}")
        return 2
    print_text(describe(checked))
    return 0 if checked.violation is None else 1


def _replay(folder: Path, *, step: int) -> int:
    ledger = find_ledger(folder)
    if read(list_files(ledger)[-1]).facts.get("kind") == TINKER:
        raise ValueError(
            f"{folder}: --replay is for runs of rl.train, not for Tinker sessions, whose steps "
            "have no checkpoints"
        )
    settings = read_settings(folder)
    # Imported here: the check needs no engine.
    from rl.ledger.replay import find_step, make_groups, replay
    from rl.ledger.rewards import grade_again
    from rl.models.files.tokenizer import open_tokenizer
    from rl.rollouts.renderer import make_renderer

    recorded = find_step(ledger, settings.checkpoints, step=step)
    request = read_json(folder / CONFIG, before=print_text)
    controller = request.config.build(request=request)
    if not isinstance(controller, HasEngine):
        raise ValueError(f"{folder}: --replay is for runs of rl.train")
    engine = controller.make_engine()
    groups = make_groups(recorded)
    replayed = replay(
        recorded,
        groups,
        checkpoints=settings.checkpoints,
        engine=engine,
        config=request.config.loop,
    )
    tokenizer, stop_token_ids = open_tokenizer(Path(str(engine.hf_assets_path)))
    regraded = grade_again(
        recorded,
        groups,
        task=request.config.task.build(),
        seed=request.config.seed,
        renderer=make_renderer(
            settings.renderer, tokenizer=tokenizer, stop_token_ids=stop_token_ids
        ),
    )
    differences = (*replayed.differences, *regraded.differences)
    for line in differences:
        print_text(f"differs: step {step}, {line}")
    num_procs = request.config.trainer.num_procs
    if differences and num_procs > 1:
        print_text(
            f"the run's trainer had {num_procs} processes: its sums may round otherwise in one"
        )
    if not differences:
        print_text(describe_replay(step, replayed, regraded))
    return 1 if differences else 0


def describe_replay(step: int, replayed: Replayed, regraded: Regraded) -> str:
    """Return what a step that was trained again has shown to be the same, in lines."""
    lines = [
        f"step {step} is the same again, bit for bit: logprobs of {replayed.num_tokens:,} tokens, "
        f"loss and gradient norm of each minibatch ({replayed.num_minibatches})"
    ]
    if replayed.num_tensors:
        lines[0] += f", weights and optimizer after it ({replayed.num_tensors} tensors)"
    if replayed.num_drawn:
        lines.append(f"{replayed.num_drawn:,} sampled tokens are of the weights that they name")
    if regraded.num_rewards:
        lines.append(f"{regraded.num_rewards:,} rewards are the same again")
    if regraded.why_not:
        lines.append(f"rewards were not computed again: {regraded.why_not}")
    return "\n".join(lines)


def _print_episode(folder: Path, step: str, problem: str, sample: str) -> int:
    if not (step.isdecimal() and sample.isdecimal()):
        raise ValueError(f"--show {step} {problem} {sample}: STEP and SAMPLE must be numbers")
    ledger = find_ledger(folder)
    try:
        recorded = read_step(ledger, step=int(step))
        for line in show_episode(recorded, problem=problem, sample=int(sample)):
            print_text(line)
    except LedgerError:
        raise
    except FOREIGN as error:
        found = f"{type(error).__name__}: {error}"
        raise LedgerError(f"step {step} of {ledger} is not as a run writes it: {found}") from None
    return 0


@runtime_checkable
class HasEngine(Protocol):
    """A root component with a trainer: the controller of a run."""

    def make_engine(self) -> TrainingEngine: ...


def describe(checked: Checked) -> str:
    """Return the result of a check in lines."""
    data, proof = "episodes", "every trained token follows from what was sampled and rewarded"
    facts: list[str] = []
    if checked.kind == TINKER:
        data, proof = "data", "every trained token is as it was sampled or given"
        facts = describe_facts(checked)
    lines = [
        f"{checked.num_steps} steps, {checked.num_episodes} {data}, "
        f"{checked.num_tokens:,} trained tokens",
        *facts,
    ]
    lines += [f"not proved: {note}" for note in checked.notes]
    if checked.violation is None:
        lines.append(proof)
    lines += [f"violation: {violation}" for violation in checked.violations[:MAX_VIOLATIONS]]
    if len(checked.violations) > MAX_VIOLATIONS:
        lines.append(f"and {len(checked.violations) - MAX_VIOLATIONS} more violations")
    if checked.violation is not None and checked.num_steps and not checked.is_ended:
        lines.append(f"of the other {checked.num_steps} steps {proof}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
