"""Training with a user's own model, data and reward in one call."""

from __future__ import annotations

import datetime
import hashlib
import importlib
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from relay.process import run_in_process
from relay.result import RunResult
from rl.config.common_options import ALIASES
from rl.observability.run_folder import DATA, FUNCTIONS

DEFAULT_FOLDER = "outputs"
MAX_TOKENS = "max_tokens"

Reward = Callable[..., Any] | str
Rewards = Reward | Sequence[Reward | tuple[Reward, float]]


def grpo(
    *,
    model: str | Path,
    data: Any,
    reward: Rewards,
    eval_data: Any = None,
    columns: Mapping[str, Any] | None = None,
    lora: bool = False,
    name: str | None = None,
    quiet: bool = False,
    **options: Any,
) -> RunResult:
    """Train a model with GRPO and return the run's results.

    The run is an ordinary one of `configs.own`, in a process of its own: `run.config` shows its
    config, `relay train --resume` continues it.

    Args:
        model: a Hugging Face folder, a GGUF file, `owner/name` on the hub, or `package:NAME`.
        data: rows with questions and answers: a file, several files, `hub:owner/name:split`, a list
            of dicts, a `datasets.Dataset` or a DataFrame. A question is a text or a list of
            messages.
        reward: what a reply earns: `f(rollout) -> float`, or TRL's `f(completions, **columns) ->
            list of floats`, a place such as "my_reward:f", "last_number" or another place of the
            answer in a reply; several of them, each alone or with its weight as (f, 0.5).
        eval_data: held-out rows, as `data`; of several files the first one makes the curve. None
            holds out a tenth of `data`.
        columns: names of the columns, such as {"question": "prompt"}; others are found by their
            usual names.
        lora: train adapters instead of all parameters.
        name: folder of the run in `dump_folder`; None makes one of the time.
        quiet: show nothing while the run goes on.
        options: any option of the config: short names (steps=80, lr=1e-5, group_size=8,
            max_tokens=128), or paths (**{"loop.eval_every": 5}).

    Raises:
        ValueError: the run cannot start; says why.
        RunError: the run stopped.

    Example:
        >>> run = relay.grpo(model="Qwen/Qwen3-0.6B", data="qa.jsonl", reward=is_right, steps=40)
        >>> run.metrics["reward/mean"].iloc[-1]
    """
    given = {"eval_data": eval_data, "columns": columns, "lora": lora}
    config = make_config(model=model, data=data, reward=reward, **given, options=options)
    return _run(config, function="lora" if lora else "grpo", name=name, quiet=quiet)


def _run(config: Any, *, function: str, name: str | None, quiet: bool) -> RunResult:
    """Run a config of `configs.own` in a process of its own."""
    folder = Path(config.dump_folder)
    # The name is chosen here: to show its progress, this process has to know the run's folder.
    config.name = name or _choose_name(folder, f"own-{function}")
    registry = importlib.import_module("rl.config.registry")
    request = registry.RunRequest(module="configs.own", function=function, config=config)
    path = folder.expanduser().absolute() / config.name
    run_in_process(request, folder=path, quiet=quiet)
    result = RunResult(path, config=config)
    if not quiet:
        result.show()
    return result


def make_config(
    *,
    model: str | Path,
    data: Any,
    reward: Rewards,
    eval_data: Any = None,
    columns: Mapping[str, Any] | None = None,
    lora: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Return the config that `grpo` runs, with the arguments of `grpo`.

    Rows and functions that no file holds are written into folders of `dump_folder`.

    Raises:
        ValueError: what is given does not fit; nothing was started.
    """
    own = importlib.import_module("configs.own")
    own_task = importlib.import_module("rl.tasks.own")
    cli = importlib.import_module("rl.config.cli")
    options = dict(options or {})
    folder = Path(options.get("dump_folder", DEFAULT_FOLDER)).expanduser()
    rewards, weights = _split_rewards(reward, folder=folder)
    files = write_data(data, folder=folder)
    columns = dict(columns or {})
    question = columns.get("question")
    found = own_task.find_columns(files, question=question if isinstance(question, str) else None)
    make = own.lora if lora else own.grpo
    config = make(str(model), files, rewards, found, _take_max_tokens(options))
    config.task.reward_weights = weights
    for setting, column in columns.items():
        options[f"task.columns.{setting}"] = column
    # Rows of the user's own choice take the place of a share of the training rows.
    if eval_data is not None:
        config.task.eval_files = {}
        config.task.held_out = 0.0
        eval_files = write_data(eval_data, folder=folder, what="eval_data")
        if set(eval_files) & set(files):
            raise ValueError(
                "eval_data has the rows of data: give others, or leave it out, and a tenth of data "
                "is held out"
            )
        for number, file in enumerate(eval_files, start=1):
            config.task.eval_files["eval" if number == 1 else f"eval_{number}"] = file
            # Further columns count if all rows have them.
            names = own_task.list_columns(file)
            own_info = config.task.columns.info
            config.task.columns.info = tuple(name for name in own_info if name in names)
    return cli.set_values(config, options)


def _take_max_tokens(options: dict[str, Any]) -> int | None:
    """Remove the length of replies, by which a config is sized; None leaves it to the config.

    A value that is none is left in the options, which then name what is valid.
    """
    names = [name for name in (MAX_TOKENS, ALIASES[MAX_TOKENS]) if name in options]
    if len(names) != 1:
        return None
    value = options[names[0]]
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        return None
    return int(options.pop(names[0]))


def _split_rewards(reward: Rewards, *, folder: Path) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Return places and weights of the reward functions; no weights if none is given."""
    functions = importlib.import_module("rl.rollouts.reward_functions")
    items = list(reward) if isinstance(reward, list | tuple) else [reward]
    places, weights = list[str](), list[float]()
    for item in items:
        # A tuple is a function with its weight; lists hold several.
        function, weight = item if isinstance(item, tuple) else (item, 1.0)
        if isinstance(function, str):
            places.append(function)
        elif callable(function):
            places.append(functions.find_place(function, folder=folder / FUNCTIONS))
        else:
            raise ValueError(
                f"reward={item!r}: must be a function, the place of one such as "
                "'my_reward:is_right', or several of them in a list"
            )
        weights.append(float(weight))
    return tuple(places), tuple(weights) if any(weight != 1.0 for weight in weights) else ()


# Data


def write_data(data: Any, *, folder: Path, what: str = "data") -> tuple[str, ...]:
    """Return the files of the data, after writing what is none.

    Raises:
        ValueError: the data has another form, or a row cannot be written; begins with `what`.
    """
    if isinstance(data, str | Path):
        return (str(data),)
    if isinstance(data, list | tuple) and data and all(isinstance(f, str | Path) for f in data):
        return tuple(map(str, data))
    if isinstance(data, Mapping):
        names = ", ".join(map(str, data))
        raise ValueError(
            f"{what} is a {type(data).__name__} of {names}: give one split, or a list of rows"
        )
    # A `datasets.Dataset` or a DataFrame, whose types JSON would lose; one that streams has no
    # length, and is read as rows.
    if hasattr(data, "to_parquet") and hasattr(data, "__len__"):
        if not len(data):
            raise ValueError(f"{what} has no rows")
        return (str(_write_table(data, folder=folder / DATA, what=what)),)
    if not isinstance(data, Iterable):
        raise ValueError(
            f"{what} is a {type(data).__name__}: must be a file, hub:owner/name:split, a list of "
            "dicts, a datasets.Dataset or a DataFrame"
        )
    return (str(_write_rows(data, folder=folder / DATA, what=what)),)


def _write_rows(rows: Iterable[Any], *, folder: Path, what: str) -> Path:
    """Write rows as JSON lines; the name of the file is the digest of its content."""
    lines = []
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise ValueError(
                f"{what}: row {number} is a {type(row).__name__}, not a dict of columns"
            )
        try:
            lines.append(_to_json(dict(row)))
        except (TypeError, ValueError, RecursionError):
            _name_column(row, f"{what}: row {number}")
            raise
    if not lines:
        raise ValueError(f"{what} has no rows")
    content = b"\n".join([*lines, b""])
    path = folder.absolute() / f"{hashlib.sha256(content).hexdigest()[:12]}.jsonl"
    files = importlib.import_module("rl.utils.files")
    files.make_folder(folder, as_what="the folder of the data")
    with files.replace_file(path) as temporary:
        temporary.write_bytes(content)
    return path


def _to_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_to_plain).encode()


def _to_plain(value: Any) -> Any:
    """Return a number or an array of numpy or torch as Python's own."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is no value of JSON")


def _name_column(row: Mapping[Any, Any], place: str) -> None:
    """Raise ValueError for the first column that cannot be written."""
    for name, value in row.items():
        try:
            _to_json({name: value})
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{place}: column {name!r} cannot be written: {error}") from error


def _write_table(table: Any, *, folder: Path, what: str) -> Path:
    """Write a `datasets.Dataset` or a DataFrame with its types."""
    files = importlib.import_module("rl.utils.files")
    files.make_folder(folder, as_what="the folder of the data")
    # The name is the digest of what is written, which only then is known; until then the file has a
    # folder of its own, as another process may write its rows at the same time.
    with tempfile.TemporaryDirectory(dir=folder.absolute()) as name:
        temporary = Path(name) / "written.parquet"
        try:
            if hasattr(table, "reset_index"):
                # A DataFrame: numbers of rows are no column, but a column may be the index.
                is_named = any(index is not None for index in table.index.names)
                table = table.reset_index(drop=not is_named)
            table.to_parquet(str(temporary))
        except Exception as error:  # whatever the library raises of its content
            raise ValueError(f"{what} cannot be written as Parquet: {error}") from error
        digest = hashlib.sha256(temporary.read_bytes()).hexdigest()[:12]
        return temporary.replace(folder.absolute() / f"{digest}.parquet")


def _choose_name(folder: Path, start: str) -> str:
    """Return a free name of the time."""
    stamped = f"{start}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    name, numbers = stamped, count(2)
    while (folder / name).exists():
        name = f"{stamped}-{next(numbers)}"
    return name
