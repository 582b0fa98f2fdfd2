"""The command `relay`: one name for the programs of this package.

    relay new my-project
    relay train --model NAME --data qa.jsonl --reward my_reward:is_right
    relay report outputs/x

Each subcommand is a program of its own module, imported when it is called: `relay --help` imports
neither torch nor vllm.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rl.utils.compat import exit_after
from rl.utils.own_packages import describe_hidden_folders, refuse_own_names
from rl.utils.printing import print_error, print_text

OWN_OPTIONS = ("--model", "--data", "--reward", "-h", "--help", "--help-all")
"""Options with which `relay train` trains on the user's own data, unless --module says otherwise.
"""


STARTS = ("train", "explain", "sweep", "serve")
"""Subcommands whose processes import modules of the current folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subcommand:
    """A subcommand, its line in the help, and the function that runs it."""

    title: str
    usage: str
    place: str
    """`module:function`; the function takes the arguments after the subcommand and returns the
    status."""

    def run(self, argv: Sequence[str]) -> int:
        module, _, name = self.place.partition(":")
        function: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), name)
        return function(argv)


SUBCOMMANDS = {
    "new": Subcommand(
        title="write a project: task, config, sample data, README",
        usage="relay new FOLDER",
        place="relay.new:main",
    ),
    "train": Subcommand(
        title="train your model on your data and reward, or any config",
        usage="relay train --model NAME --data FILE --reward MODULE:FUNCTION",
        place="relay.command:train",
    ),
    "explain": Subcommand(
        title="say what a run would be and what is wrong with it, and start nothing",
        usage="relay explain --model NAME --data FILE --reward MODULE:FUNCTION",
        place="relay.command:explain",
    ),
    "sweep": Subcommand(
        title="train with several values of options, one run after another",
        usage="relay sweep --name try --over lr=1e-5,3e-5 -- <options of train>",
        place="relay.sweep:main",
    ),
    "report": Subcommand(
        title="write a report of one run, or of several over each other",
        usage="relay report outputs/A outputs/B ...",
        place="rl.report:main",
    ),
    "runs": Subcommand(
        title="list runs: task, steps, evaluations, time",
        usage="relay runs [FOLDER ...]",
        place="relay.runs:main",
    ),
    "doctor": Subcommand(
        title="show what the processes of a run are doing, with their stacks",
        usage="relay doctor outputs/A",
        place="rl.doctor:main",
    ),
    "timeline": Subcommand(
        title="write the timeline of a run for Perfetto",
        usage="relay timeline outputs/A",
        place="rl.timeline:main",
    ),
    "ledger": Subcommand(
        title="check that every token that a run has trained follows from what was sampled",
        usage="relay ledger outputs/A [--replay STEP]",
        place="rl.ledger.__main__:main",
    ),
    "bisect": Subcommand(
        title="find the first step and token at which two runs part",
        usage="relay bisect outputs/A outputs/B",
        place="rl.bisect:main",
    ),
    "serve": Subcommand(
        title="serve a run's model to OpenAI's and Anthropic's clients, or the Tinker API",
        usage="relay serve outputs/A [--step N], or relay serve --config tiny --port 8000",
        place="relay.command:serve",
    ),
    "push": Subcommand(
        title="upload a run's model with a model card to the Hugging Face hub",
        usage="relay push outputs/A owner/name",
        place="relay.push:main",
    ),
    "completion": Subcommand(
        title="print a script that completes subcommands and options in bash, zsh or fish",
        usage='eval "$(relay completion bash)"',
        place="relay.completion:main",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print_text(describe_subcommands())
        return 0 if argv else 2
    name, *rest = argv
    if name not in SUBCOMMANDS:
        near = difflib.get_close_matches(name, SUBCOMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(SUBCOMMANDS)}"
        print_error(f"error: relay {name}: no such subcommand; {hint}")
        return 2

    # The modules of the user's folder, as for `python -m`; relay's own are imported already.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        if name in STARTS:
            refuse_own_names([Path.cwd()])
    except ValueError as error:
        print_error(f"error: {error}")
        return 2
    note = describe_hidden_folders(Path.cwd())
    if note is not None:
        print_error(note)
    return SUBCOMMANDS[name].run(rest)


def describe_subcommands() -> str:
    """Return the text of `relay --help`."""
    lines = ["usage: relay <subcommand> [options]", ""]
    for name, subcommand in SUBCOMMANDS.items():
        lines += [f"  {name:<11} {subcommand.title}", f"  {'':<11}   {subcommand.usage}"]
    return "\n".join([*lines, "", "relay <subcommand> --help shows the options of each."])


def train(argv: Sequence[str]) -> int:
    """Train: `rl.train`, with the user's own model, data and reward as its first config."""
    from rl.config.cli import main as train_config

    if not argv:
        print_error(f"usage: {SUBCOMMANDS['train'].usage}\n       relay train --help")
        return 2
    # Options that only a user's own task has say which config is meant.
    module, config = choose_origin(argv)
    return train_config(
        argv,
        default_module=module,
        default_config=config,
        prog="relay train",
        early=importlib.import_module("actors.launch.early").start_early,
    )


def choose_origin(argv: Sequence[str]) -> tuple[str, str]:
    """Return the module and the config of `relay train` where --module and --config name none."""
    names, module = list[str](), "configs.own"
    for token, following in zip(argv, [*argv[1:], ""], strict=True):
        name, equals, value = token.partition("=")
        names.append(name)
        if name == "--module":
            module = value if equals else following
    # Another module than this one has configs of other names, whatever options are given.
    if module in ("own", "configs.own") and any(name in OWN_OPTIONS for name in names):
        # With the package: the user's folder may have a module of this name.
        return "configs.own", "grpo"
    return "sum_digits", "tiny"


def explain(argv: Sequence[str]) -> int:
    """Explain a run without starting it; the first argument may be a form, such as `full`."""
    has_form = bool(argv) and not argv[0].startswith("-")
    return train(["--explain", argv[0], *argv[1:]] if has_form else ["--explain", *argv])


def serve(argv: Sequence[str]) -> int:
    """Serve the run whose folder is the first argument, or without one the Tinker API."""
    from rl.config.cli import main as serve_config

    if argv and not argv[0].startswith("-"):
        return replace(SUBCOMMANDS["serve"], place="rl.serve:main").run(argv)
    return serve_config(
        argv, default_module="configs.tinker", default_config="tiny", prog="relay serve"
    )


def run_as_script() -> None:
    """Entry point of the installed command."""
    exit_after(main)
