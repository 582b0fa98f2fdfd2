"""Scripts that complete the command in a shell: `eval "$(relay completion bash)"`.

A script completes subcommands, their options, folders of runs where a run is asked for, and
otherwise files. It holds everything that it offers, so that a Tab starts no program.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence

from relay.command import SUBCOMMANDS
from rl.config.common_options import ALIASES, GROUPS
from rl.utils.printing import print_text

SHELLS = ("bash", "zsh", "fish")
SOURCES = ("help", "help-all", "from_json")
"""Options of a run that are in no group of `--help`."""
OF_TRAINING = ("train", "explain", "sweep")
"""Subcommands that take the options of a run; `sweep` takes them after `--`."""
OPTIONS = {
    "sweep": ("name", "over", "list", "dry_run"),
    "report": ("output",),
    "runs": ("sort", "json"),
    "doctor": ("expected_s",),
    "timeline": ("output",),
    "ledger": ("replay", "show"),
    "push": ("adapter", "private", "license", "dry_run"),
}
"""Options of the other subcommands."""
OF_RUNS = ("report", "runs", "doctor", "timeline", "ledger", "bisect", "push")
"""Subcommands whose arguments are folders of runs."""
FOLDER = "outputs/"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the script for a shell, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="relay completion",
        description="Print a script that completes the command. bash, in ~/.bashrc: "
        'eval "$(relay completion bash)"; zsh, in ~/.zshrc after compinit: eval "$(relay '
        'completion zsh)"; fish: relay completion fish > ~/.config/fish/completions/relay.fish',
    )
    parser.add_argument("shell", choices=SHELLS)
    shell = parser.parse_args(argv).shell
    print_text({"bash": make_bash, "zsh": make_zsh, "fish": make_fish}[shell]())
    return 0


def list_options() -> dict[str, list[str]]:
    """Return the options of each subcommand, without dashes."""
    training = [*ALIASES, *(path for paths in GROUPS.values() for path in paths), *SOURCES]
    options = {}
    for name in SUBCOMMANDS:
        own = list(OPTIONS.get(name, ()))
        own += training if name in OF_TRAINING else ["help"]
        options[name] = list(dict.fromkeys(own))
    return options


def _add_dashes(options: Sequence[str]) -> str:
    return " ".join(f"--{option}" for option in options)


BASH = """\
_relay() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} options=''
    COMPREPLY=()
    if (( COMP_CWORD == 1 )); then
        mapfile -t COMPREPLY < <(compgen -W '@subcommands' -- "$word")
        return
    fi
    case ${COMP_WORDS[1]} in
@options
    esac
    if [[ $word == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$options" -- "$word")
        return
    fi
    if [[ " @of_runs " == *" ${COMP_WORDS[1]} "* || $before == --resume ]]; then
        compopt -o filenames 2>/dev/null
        mapfile -t COMPREPLY < <(compgen -d -- "${word:-@folder}")
    elif [[ ${COMP_WORDS[1]} == completion ]]; then
        mapfile -t COMPREPLY < <(compgen -W '@shells' -- "$word")
    fi
}
complete -o default -F _relay relay"""


def make_bash() -> str:
    """Return the script for bash."""
    cases = []
    for name, options in list_options().items():
        cases.append(f"        {name}) options='{_add_dashes(options)}' ;;")
    return _fill(BASH, options="\n".join(cases), subcommands=" ".join(SUBCOMMANDS))


ZSH = """\
#compdef relay
_relay() {
    local -a subcommands options
    subcommands=(
@subcommands
    )
    if (( CURRENT == 2 )); then
        _describe subcommand subcommands
        return
    fi
    case $words[2] in
@options
    esac
    if [[ $words[CURRENT] == -* ]]; then
        compadd -- $options
    elif [[ " @of_runs " == *" $words[2] "* || $words[CURRENT-1] == --resume ]]; then
        if [[ -z $words[CURRENT] && -d @folder ]]; then
            _path_files -W @folder -P @folder -/
        else
            _path_files -/
        fi
    elif [[ $words[2] == completion ]]; then
        compadd -- @shells
    else
        _files
    fi
}
(( $+functions[compdef] )) && compdef _relay relay"""


def make_zsh() -> str:
    """Return the script for zsh."""
    titles = []
    for name, subcommand in SUBCOMMANDS.items():
        titles.append(f"        {shlex.quote(f'{name}:{subcommand.title}')}")
    cases = []
    for name, options in list_options().items():
        cases.append(f"        {name}) options=({_add_dashes(options)}) ;;")
    return _fill(ZSH, options="\n".join(cases), subcommands="\n".join(titles))


def make_fish() -> str:
    """Return the script for fish."""
    lines = []
    # In single quotes fish knows two escapes.
    for name, subcommand in SUBCOMMANDS.items():
        title = subcommand.title.replace("\\", "\\\\").replace("'", "\\'")
        lines.append(f"complete -c relay -n __fish_use_subcommand -f -a {name} -d '{title}'")
    for name, options in list_options().items():
        condition = f"-n '__fish_seen_subcommand_from {name}'"
        lines += [f"complete -c relay {condition} -l '{option}'" for option in options]
        if name in OF_RUNS:
            lines.append(f"complete -c relay {condition} -f -a '(__fish_complete_directories)'")
    shells = " ".join(SHELLS)
    lines.append(f"complete -c relay -n '__fish_seen_subcommand_from completion' -f -a '{shells}'")
    return "\n".join(lines)


def _fill(template: str, **parts: str) -> str:
    """Return a template with its `@names` replaced; shells use braces and dollars."""
    texts: Mapping[str, str] = {
        "of_runs": " ".join(OF_RUNS),
        "shells": " ".join(SHELLS),
        "folder": FOLDER,
        **parts,
    }
    for name, text in texts.items():
        template = template.replace(f"@{name}", text)
    return template
