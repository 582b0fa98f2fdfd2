"""Reward functions of a user's own, named in a config by their place (`rl.utils.user_code`).

A function has one of two forms:

    def right(rollout):                        # one rollout to a number
        return float(rollout.answer in rollout.text)

    def right(completions, answer, **columns): # TRL's: replies to a list of numbers
        return [float(a in text) for text, a in zip(completions, answer)]

In TRL's form `completions` and `prompts` are texts, or lists of messages where the question is one;
`completion_ids` are lists of tokens, and every column of the data is a list with one value for each
reply. None counts as 0.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from rl.rollouts.rubric import Criterion, GroupCriterion, is_async
from rl.types import Rollout
from rl.utils.files import make_folder, replace_file
from rl.utils.user_code import SAVED, is_own_module, load_function

MESSAGES = "question_messages"
"""Key of `Problem.info` for a question that is a list of messages."""
GIVEN = ("prompts", "completions", "completion_ids")
"""Arguments of TRL's form that are no columns."""
FORMS = "f(rollout) -> float, or f(completions, <columns>) -> list of floats"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Placed:
    """A function by its place, so that a reward process loads it for itself."""

    place: str

    def __getattr__(self, name: str) -> Any:
        # The rubric asks for a function's own limits: max_concurrency, needs_network, api_key_env.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(load_function(self.place), name)


class RolloutReward(_Placed):
    """Reward function of one rollout."""

    __slots__ = ()

    def __call__(self, rollout: Rollout) -> Any:
        return load_function(self.place)(rollout)


class AsyncRolloutReward(_Placed):
    """Async reward function of one rollout."""

    __slots__ = ()

    async def __call__(self, rollout: Rollout) -> Any:
        return await load_function(self.place)(rollout)


class CompletionsReward(_Placed):
    """Reward function in TRL's form."""

    __slots__ = ()

    def __call__(self, rollouts: Sequence[Rollout]) -> Any:
        function = load_function(self.place)
        return _replace_missing(function(**collect_columns(function, rollouts)))


class AsyncCompletionsReward(_Placed):
    """Async reward function in TRL's form."""

    __slots__ = ()

    async def __call__(self, rollouts: Sequence[Rollout]) -> Any:
        function = load_function(self.place)
        return _replace_missing(await function(**collect_columns(function, rollouts)))


def _replace_missing(values: Any) -> Any:
    """Return the values with 0 for None, by which a function says that it does not apply."""
    if not isinstance(values, list | tuple):
        return values
    return [0.0 if value is None else value for value in values]


def collect_columns(
    function: Callable[..., Any], rollouts: Sequence[Rollout]
) -> dict[str, list[Any]]:
    """Return the arguments that a function in TRL's form takes: one list for each."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    info = rollouts[0].prompt.problem.info
    columns = [name for name in info if name != MESSAGES]
    names = [*GIVEN, *columns] if takes_all else [p.name for p in parameters]
    arguments: dict[str, list[Any]] = {}
    for name in names:
        # A name that is no column has a default: `make_criterion` has checked it.
        if name in GIVEN or name in columns:
            arguments[name] = [_get_value(rollout, name) for rollout in rollouts]
    return arguments


def _get_value(rollout: Rollout, name: str) -> Any:
    problem = rollout.prompt.problem
    messages = problem.info.get(MESSAGES)
    if name == "completion_ids":
        return rollout.completion.token_ids.tolist()
    if name == "completions":
        if messages is None:
            return rollout.text
        return [{"role": "assistant", "content": rollout.text}]
    if name == "prompts":
        return problem.question if messages is None else [dict(message) for message in messages]
    return problem.info[name]


def make_criterion(
    place: str, *, weight: float, columns: Mapping[str, Any] | None = None
) -> Criterion | GroupCriterion:
    """Return the criterion of the function at a place.

    Args:
        columns: `Problem.info` of a problem, with which the names of arguments are compared.

    Raises:
        ValueError: there is no such function, or it has another form.
    """
    try:
        function = load_function(place)
    except ValueError as error:
        about = "" if str(error).startswith(repr(place)) else f"{place!r}: "
        raise ValueError(f"reward {about}{error}") from error
    name = choose_name(function)
    if not _is_of_trl_form(place, function):
        is_coroutine = is_async(function)
        reward = AsyncRolloutReward(place=place) if is_coroutine else RolloutReward(place=place)
        return Criterion(name=name, function=reward, weight=weight)
    if columns is not None:
        _check_columns(place, function, columns)
    of_group: Any = CompletionsReward(place=place)
    if is_async(function):
        of_group = AsyncCompletionsReward(place=place)
    # Each reply is graded by itself, also the single one of an evaluation.
    return GroupCriterion(name=name, function=of_group, weight=weight, needs_group=False)


def choose_name(function: Callable[..., Any]) -> str:
    """Return the name of a reward in metrics."""
    name = getattr(function, "__name__", type(function).__name__)
    if name == "<lambda>":
        name = "reward"
    return re.sub(r"\W", "_", name) or "reward"


def _is_of_trl_form(place: str, function: Callable[..., Any]) -> bool:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of some functions in C nothing is known
        return False
    if any(p.name in GIVEN for p in parameters):
        return True
    # Nothing but `**columns`.
    if parameters and all(p.kind is p.VAR_KEYWORD for p in parameters):
        return True
    needed = [p.name for p in parameters if _is_needed(p)]
    if len(needed) > 1 or not parameters:
        raise ValueError(
            f"reward {place!r} takes ({', '.join(p.name for p in parameters)}): must be {FORMS}"
        )
    return False


def _check_columns(place: str, function: Callable[..., Any], columns: Mapping[str, Any]) -> None:
    for parameter in inspect.signature(function).parameters.values():
        if not _is_needed(parameter) or parameter.name in (*GIVEN, *columns):
            continue
        names = ", ".join(map(repr, columns)) or "none"
        raise ValueError(
            f"reward {place!r} asks for {parameter.name!r}, which is no column of the data; its "
            f"columns are {names}"
        )


def _is_needed(parameter: inspect.Parameter) -> bool:
    is_rest = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not is_rest


# Functions that no module holds


def find_place(function: Callable[..., Any], *, folder: Path) -> str:
    """Return the place of a function; one that no module holds is saved into a folder first.

    Raises:
        ValueError: the function holds something that no other process can have, such as an open
            file.
    """
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if isinstance(function, FunctionType) and _can_import(function, module, name):
        return f"{module}:{name}"
    return str(save_function(function, folder=folder))


def _can_import(function: FunctionType, module: str, name: str) -> bool:
    """Return whether another process finds this function in its module."""
    if module == "__main__" or "<" in name:
        return False
    file = Path(function.__code__.co_filename)
    if not is_own_module(module) and not file.is_file():
        return False  # of a notebook's cell
    try:
        return load_function(f"{module}:{name}") is function
    except ValueError:
        return False


def save_function(function: Callable[..., Any], *, folder: Path) -> Path:
    """Pickle a function, with everything that it uses, and return the file.

    The file's name has a digest of its content, so that a changed function is another file.
    """
    import cloudpickle

    try:
        content = cloudpickle.dumps(function)
    except Exception as error:
        part = _find_unsendable(function)
        raise ValueError(
            f"reward {choose_name(function)!r} cannot be sent to another process"
            f"{f': it uses {part}' if part else ''} ({error}); make or open it inside the function"
        ) from error
    name = f"{choose_name(function)}-{hashlib.sha256(content).hexdigest()[:12]}{SAVED}"
    path = folder.absolute() / name
    if not path.exists():
        make_folder(folder, as_what="the folder of reward functions")
        with replace_file(path) as temporary:
            temporary.write_bytes(content)
    return path


def _find_unsendable(function: Callable[..., Any]) -> str | None:
    """Return the variable of a function that does not pickle, with its type."""
    import cloudpickle

    holder: Any = getattr(function, "__wrapped__", function)
    if isinstance(holder, MethodType):
        holder = holder.__self__
    variables = dict[str, Any]()
    if isinstance(holder, partial):
        variables = {"func": holder.func, **holder.keywords}
        variables |= {f"args[{i}]": value for i, value in enumerate(holder.args)}
    elif isinstance(holder, FunctionType):
        closed = inspect.getclosurevars(holder)
        variables = {**closed.globals, **closed.nonlocals}
        defaults = inspect.signature(holder).parameters.values()
        variables |= {p.name: p.default for p in defaults if p.default is not p.empty}
    elif hasattr(holder, "__dict__"):
        variables = vars(holder)
    for name, value in variables.items():
        try:
            cloudpickle.dumps(value)
        except Exception:  # noqa: BLE001 - whatever a type of the user's raises
            return f"{name!r}, a {type(value).__name__}"
    return None
