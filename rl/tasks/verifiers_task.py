"""Environments of the `verifiers` package (0.4), by the name of their module.

An environment of verifiers is a taskset (rows with rewards), an `Env` (which agents play a row, and how) and
a harness (the program between agent and model). All three run as they are; what the model says comes from
relay's sampler (`rl/tasks/verifiers_bridge.py`).
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import ModuleType
from typing import Any

from rl.config.configurable import HIDDEN, Configurable
from rl.data.order import ShuffledProblems
from rl.data.packages import decode_settings, import_for_tasks
from rl.data.split import choose, content_key, is_held_out
from rl.protocols import Environment
from rl.rollouts.rubric import Criterion, Rubric
from rl.tasks.verifiers_environment import EpisodeReward, EpisodeSolved, VerifiersEnvironment
from rl.tasks.verifiers_tools import declarations
from rl.tools.calls import announce
from rl.types import Message, Problem

VERSION = "0.4."
"""Of verifiers: the bridge reaches into parts that are its own business."""
Settings = dict[str, int | float | bool | str]


class VerifiersTask(Configurable):
    """A taskset of verifiers, with its environment and its rewards.

    Raises:
        ValueError: when built: the module is not there or no taskset, a setting is refused, or the
            environment needs what relay does not have (says what).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        taskset: str
        """Module of the taskset, which must be importable: `gsm8k_v1`, `owner/gsm8k-v1`."""
        settings: Settings = field(default_factory=dict)
        """Settings of the taskset; a text that starts with `[` or `{` is read as JSON."""
        eval_settings: Settings = field(default_factory=dict)
        """Those that are other for evaluation, such as `split test`; without any, a share is held out."""
        held_out: float = 0.1
        """Share of the rows that is held out where `eval_settings` is empty, by what the rows ask."""
        environment: str = ""
        """Module of an `Env` other than the taskset's own."""
        environment_settings: Settings = field(default_factory=dict)
        """Settings of the `Env`, such as `user '{"model": "m", "client": {"base_url": "http://..."}}'`."""
        seat: str = ""
        """The agent that is trained, where the `Env` has several; each other needs a client of its own."""
        num_eval: int | None = None
        """Most problems to evaluate on, the same for every seed; None takes all."""
        max_problems: int | None = None
        """Most rows that are read; a taskset without an end needs it."""
        solved_at: float = 1.0
        """Sum of the rewards from which on an episode counts as solved."""
        unscored_value: float = 0.0
        """Reward of an episode that a limit of the run ended before it was scored; such are counted."""
        classes: tuple[type, ...] = field(default=(), metadata=HIDDEN)
        """Taskset and Env defined in a script or notebook, known to verifiers by the name `taskset`."""

        def __post_init__(self) -> None:
            if not 0 <= self.held_out < 1:
                raise ValueError(f"held_out={self.held_out}: must be at least 0 and below 1")
            for name, value in (("num_eval", self.num_eval), ("max_problems", self.max_problems)):
                if value is not None and value < 1:
                    raise ValueError(f"{name}={value}: must be at least 1, or None for all")

    def __init__(self, *, config: Config) -> None:
        self.config = config
        vf = _import_verifiers(config)
        env, eval_env = (
            _load_env(vf, config, settings)
            for settings in (config.settings, {**config.settings, **config.eval_settings})
        )
        seat = _trained_seat(env, config)
        self._tasks: dict[str, Any] = {}
        train = self._problems(env, seat=seat, name=config.taskset)
        if config.eval_settings:
            held = self._problems(eval_env, seat=seat, name=f"{config.taskset}/eval")
        else:
            held = [p for p in train if is_held_out(content_key(p.question), share=config.held_out)]
        evaluated = {content_key(p.question) for p in held}
        self._train = [p for p in train if content_key(p.question) not in evaluated]
        keys = [content_key(p.question) for p in held]
        self._eval = [held[i] for i in choose(keys, config.num_eval)]
        if not self._train or not self._eval:
            raise ValueError(
                f"taskset={config.taskset!r}: {len(train)} rows leave {len(self._train)} to train on and "
                f"{len(held)} to evaluate on (held_out={config.held_out}, "
                f"eval_settings={config.eval_settings})"
            )
        bridge = import_for_tasks("rl.tasks.verifiers_bridge", needed_by="verifiers")
        self._episode = bridge.Episode
        self._host = bridge.Host(env, seat=seat)
        # Tool servers are processes: they end with the task, at the latest with this interpreter.
        weakref.finalize(self, self._host.close)

    def train_problems(self, *, seed: int) -> Iterator[Problem]:
        """Endless; `.problem(n)` is number n without those before it."""
        return self._ordered(f"train {seed}")

    def warmup_problems(self, *, seed: int) -> Iterator[Problem]:
        """Raises ValueError: tasksets have no replies to show."""
        raise ValueError(
            f"the taskset {self.config.taskset!r} has no demonstrations to warm up on: start from a model "
            "that follows instructions (hf_assets_path) without warm-up (--warmup None)"
        )

    def eval_sets(self) -> Mapping[str, Sequence[Problem]]:
        return {"held_out": self._eval}

    def environment(self, problem: Problem) -> Environment:
        """The first reply starts the environment's parts; until then an episode costs nothing."""
        task = self._tasks[problem.id]
        opening = problem.info["opening"]
        return VerifiersEnvironment(
            host=self._host,
            make_episode=functools.partial(self._episode, self._host, task, _told(task)),
            messages=[Message(role=role, content=content) for role, content in opening],
        )

    def rubric(self, *, seed: int) -> Rubric:
        """The environment's rewards, which were given where it ran."""
        config = self.config
        reward = EpisodeReward(unscored_value=config.unscored_value)
        return Rubric(
            criteria=(Criterion(name="verifiers", function=reward),),
            correct=EpisodeSolved(solved_at=config.solved_at),
        )

    def close(self) -> None:
        """End what the environment has started."""
        self._host.close()

    def _ordered(self, seed: str) -> Iterator[Problem]:
        return ShuffledProblems(self._train.__getitem__, num_problems=len(self._train), seed=seed)

    def _problems(self, env: Any, *, seat: str, name: str) -> list[Problem]:
        """Every row, after a look at what it asks for."""
        taskset, most = env.taskset, self.config.max_problems
        if most is None and not taskset.bounded:
            raise ValueError(
                f"taskset={self.config.taskset!r} has no end: max_problems must say where to stop"
            )
        problems = []
        for task in islice(taskset, most):
            problem_id = f"{name}/{task.data.idx}"
            try:
                _check_fit(env, task, seat=seat)
                told = _told(task)
                system, tools = "", declarations(task, taskset)
                if tools:
                    if told[0].role == "system":
                        system, told = told[0].content, told[1:]
                    told = [Message(role="system", content=announce(tools, system)), *told]
            except (TypeError, ValueError) as error:
                raise ValueError(f"{problem_id} cannot be trained on: {error}") from error
            self._tasks[problem_id] = task
            problems.append(
                Problem(
                    id=problem_id,
                    question=told[-1].content,
                    answer=str(getattr(task.data, "answer", "") or ""),
                    info={"opening": [(message.role, message.content) for message in told]},
                )
            )
        return problems


def _import_verifiers(config: VerifiersTask.Config) -> ModuleType:
    """verifiers, with relay's harness and the config's own classes where it looks for plugins.

    Raises:
        ValueError: it is not installed, or of a version that the bridge was not made for.
    """
    root = import_for_tasks("verifiers", needed_by=f"taskset={config.taskset!r}")
    if not root.__version__.startswith(VERSION):
        raise ValueError(
            f"verifiers {root.__version__} is installed, but relay was made for {VERSION}x: "
            "pip install 'verifiers==0.4.*'"
        )
    harness = import_for_tasks("rl.tasks.verifiers_harness", needed_by="verifiers")
    # Plugins are modules at the top level, found by name.
    sys.modules.setdefault(harness.HARNESS_ID, harness)
    if config.classes:
        module = ModuleType(config.taskset)
        module.__dict__.update({cls.__name__: cls for cls in config.classes})
        module.__all__ = [cls.__name__ for cls in config.classes]  # type: ignore[attr-defined]
        sys.modules[config.taskset] = module
    return import_for_tasks("verifiers.v1", needed_by="verifiers")


def _load_env(vf: ModuleType, config: VerifiersTask.Config, settings: Settings) -> Any:
    """The environment with one taskset; its trained seat has relay's chat loop, on this machine.

    Raises:
        ValueError: names the module or the setting.
    """
    given = decode_settings(config.environment_settings, name="environment_settings")
    taskset = {"id": config.taskset, **decode_settings(settings)}
    try:
        env_class = vf.environment_class(config.taskset, config.environment)
        config_class = vf.env_config_type(config.taskset, config.environment)
        brings_harness = vf.default_harness_id(config.taskset) != "bash"
        for name in _seats(vf, config_class):
            own = {"runtime": {"type": "subprocess"}}
            declared = config_class.model_fields[name].default
            if declared.harness is None and not brings_harness:
                own["harness"] = {"id": "relay_conversation"}
            given[name] = {**own, **given.get(name, {})}
            if isinstance(client := given[name].get("client"), dict):
                client.setdefault("type", "eval")
        data = {"id": config.environment, "taskset": taskset, **given}
        return env_class(config_class.model_validate(data))
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        raise ValueError(
            f"taskset={config.taskset!r}, environment={config.environment!r}: verifiers cannot load it: "
            f"{error}" + _hint_of_earlier_version(config.taskset)
        ) from error


def _hint_of_earlier_version(taskset: str) -> str:
    module = sys.modules.get(taskset.rpartition("/")[2].replace("-", "_"))
    if not hasattr(module, "load_environment"):
        return ""
    return " (it has load_environment, as environments for verifiers before 0.4 do: ask for its Taskset)"


def _seats(vf: ModuleType, config_class: Any) -> list[str]:
    fields = config_class.model_fields.items()
    return [name for name, info in fields if isinstance(info.default, vf.AgentConfig)]


def _trained_seat(env: Any, config: VerifiersTask.Config) -> str:
    """Raises ValueError where it is not clear which agent the policy plays, or who plays the others."""
    seats: dict[str, Any] = env._agent_specs
    if not config.seat and len(seats) > 1:
        raise ValueError(f"seat is empty, but {type(env).__name__} has several: {', '.join(seats)}")
    seat = config.seat or next(iter(seats))
    if seat not in seats:
        raise ValueError(f"seat={seat!r}: {type(env).__name__} has {', '.join(seats)}")
    unmanned = [name for name, spec in seats.items() if name != seat and spec.client is None]
    if unmanned:
        raise ValueError(
            f"nobody plays {', '.join(unmanned)} of {type(env).__name__}: relay's policy plays {seat!r} "
            'alone; give each a model in environment_settings, as {"model": ..., "client": {"base_url": ...}}'
        )
    return seat


def _check_fit(env: Any, task: Any, *, seat: str) -> None:
    """Raises TypeError or ValueError, by verifiers' own rules, for a task that cannot be played here."""
    compile_ = import_for_tasks("verifiers.v1.utils.compile", needed_by="verifiers")
    runtime = compile_.resolve_runtime_config(env._agent_specs[seat].runtime, task, set())
    tools = [*task.toolsets(task.config), *env.taskset.toolsets(env.taskset.config)]
    compile_.validate_pairing(env._harnesses[seat], type(task), runtime, tools=tools)


def _told(task: Any) -> list[Message]:
    """The messages that a task opens with.

    Raises:
        ValueError: it has none, or they are not text, or not the user's.
    """
    prompt, system = task.data.prompt, task.data.system_prompt
    if prompt is None:
        raise ValueError(
            "it has no prompt, so its first message is made while it runs; relay must know it before"
        )
    if isinstance(prompt, str):
        told = [Message(role="user", content=prompt)]
    else:
        if any(not isinstance(message.content, str) for message in prompt):
            raise ValueError("its prompt has parts that are not text")
        told = [Message(role=message.role, content=message.content) for message in prompt]
    if not told or told[-1].role == "assistant" or any(m.role == "assistant" for m in told):
        raise ValueError("its prompt must end with a message to the model, and have none of the model's")
    return [Message(role="system", content=system), *told] if system else told
