"""Environments of the `verifiers` package (0.4), by the name of their module.

An environment of verifiers consists of a taskset (rows with rewards), an `Env` (which agents play a
row, and how) and a harness (the program between agent and model). Its rollouts are agents, which
ask relay's endpoint (`rl/tasks/verifiers_rollouts.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from itertools import islice, takewhile
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rl.agents.config import EndpointConfig
from rl.config.configurable import HIDDEN, Configurable
from rl.config.tree import check_bounds
from rl.protocols import Environment
from rl.rollouts.environment import SingleTurn
from rl.rollouts.renderer import Renderer
from rl.rollouts.rubric import Criterion, Rubric, UnparsedAnswer
from rl.tasks.data import (
    choose,
    decode_settings,
    hash_content,
    import_for_tasks,
    is_held_out,
    shuffle_problems,
)
from rl.tasks.fingerprint import hash_problem
from rl.tasks.task import Solved
from rl.types import Message, Observation, Problem, Reply, Rollout
from rl.utils.extras import name_pip

if TYPE_CHECKING:  # It brings an HTTP server, which reward processes need not import.
    from rl.agents.rollouts import AgentPlayer

VERSION = "0.4."
"""Supported version of verifiers, because the rollouts use a private part of it."""
HARNESS_ID = "relay_conversation"
REWARD = "verifiers/reward"
Settings = dict[str, int | float | bool | str]


class VerifiersTask(Configurable):
    """A taskset of verifiers with its environment and its rewards.

    Raises:
        ValueError: the module is no taskset, a setting is refused, or the environment needs what
            relay lacks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Taskset, environment and trained seat, with their settings."""

        taskset: str
        """Importable module of the taskset, such as `gsm8k_v1` or `owner/gsm8k-v1`."""
        settings: Settings = field(default_factory=dict)
        """Settings of the taskset; a string that starts with `[` or `{` is decoded as JSON."""
        eval_settings: Settings = field(default_factory=dict)
        """Settings that differ for evaluation, such as `split test`; if empty, a share is held out.
        """
        held_out: float = 0.1
        """Share of the rows that is held out if `eval_settings` is empty, by content."""
        environment: str = ""
        """Module of an `Env` other than the taskset's own."""
        environment_settings: Settings = field(default_factory=dict)
        """Settings of the `Env`, such as `user '{"model": "m", "client": {"base_url":
        "http://..."}}'`.
        """
        seat: str = ""
        """Agent that is trained if the `Env` has several; each of the others needs a client of its
        own.
        """
        num_eval: int | None = None
        """Most problems to evaluate on, the same for every seed; None takes all."""
        max_problems: int | None = None
        """Most rows that are read; required for an endless taskset."""
        solved_at: float = 1.0
        """Smallest sum of rewards that counts as solved."""
        endpoint: EndpointConfig = field(default_factory=lambda: EndpointConfig(max_running=512))
        """Endpoint that the rollouts ask, on this machine, and the most that play at once."""
        classes: tuple[type, ...] = field(default=(), metadata=HIDDEN)
        """Taskset and Env classes of a script or notebook, registered under the name `taskset`."""

        def __post_init__(self) -> None:
            check_bounds(self, "held_out", at_least=0, below=1)
            check_bounds(self, "num_eval", "max_problems", at_least=1)

    def __init__(self, *, config: Config) -> None:
        self.config = config
        vf = _import_verifiers(config)
        env = _load_env(vf, config, config.settings)
        eval_env = _load_env(vf, config, {**config.settings, **config.eval_settings})
        seat = _choose_seat(env, config)
        # Rows of verifiers by the id of their problem: they hold code, which a problem must not.
        self._tasks: dict[str, Any] = {}
        train = self._read_problems(env, seat=seat, name=config.taskset)
        if config.eval_settings:
            eval_problems = self._read_problems(eval_env, seat=seat, name=f"{config.taskset}/eval")
        else:
            eval_problems = []
            for problem in train:
                if is_held_out(hash_content(problem.question), share=config.held_out):
                    eval_problems.append(problem)

        # By the question, because rows of two splits may ask the same.
        keys = [hash_content(problem.question) for problem in eval_problems]
        evaluated = set(keys)
        self._train = []
        for problem in train:
            if hash_content(problem.question) not in evaluated:
                self._train.append(problem)
        self._eval = [eval_problems[i] for i in choose(keys, config.num_eval)]
        if not self._train or not self._eval:
            raise ValueError(
                f"taskset={config.taskset!r}: {len(train)} rows leave {len(self._train)} to train "
                f"on and {len(eval_problems)} to evaluate on (held_out={config.held_out}, "
                f"eval_settings={config.eval_settings})"
            )
        self._env = env
        self._seat = seat

    def train_problems(self, *, seed: int) -> Iterator[Problem]:
        """Return endless problems; `.problem(n)` is number n."""
        return shuffle_problems(
            self._train.__getitem__,
            num_problems=len(self._train),
            seed=f"train {seed}",
            digest_at=lambda i: hash_problem(self._train[i], self._train[i].info["opening"]),
        )

    def warmup_problems(self, *, seed: int) -> Iterator[Problem]:
        """Raise ValueError: tasksets have no demonstrations."""
        raise ValueError(
            f"the taskset {self.config.taskset!r} has no demonstrations to warm up on: start from "
            "a model that follows instructions (hf_assets_path), with --warmup None"
        )

    def eval_sets(self) -> Mapping[str, Sequence[Problem]]:
        return {"held_out": self._eval}

    def environment(self, problem: Problem) -> Environment:
        """Return the row's prompt, for the checks before a run; `open_player` plays episodes."""
        messages = [
            Message(role=role, content=content) for role, content in problem.info["opening"]
        ]
        # The renderer opens with what precedes a reply.
        opening = takewhile(lambda message: message.role != "assistant", messages)
        return RowPrompt(problem=problem, messages=tuple(opening))

    def open_player(self, *, renderer: Renderer) -> AbstractAsyncContextManager[AgentPlayer]:
        """Start the environment's servers, and what plays its rollouts, in a thread of their own.

        Example:
            async with task.open_player(renderer=renderer) as player:
                episodes = AgentEpisodes(generator=generator, player=player, max_tokens=4096)
        """
        # Imported here, because it needs verifiers, an optional package.
        rollouts = import_for_tasks("rl.tasks.verifiers_rollouts", needed_by="verifiers")
        opening: AbstractAsyncContextManager[AgentPlayer] = rollouts.open_rollout_player(
            self._env,
            seat=self._seat,
            tasks=self._tasks,
            config=self.config.endpoint,
            renderer=renderer,
        )
        return opening

    def rubric(self, *, seed: int) -> Rubric:
        """Give the rewards that the environment computed."""
        return Rubric(
            criteria=(Criterion(name="verifiers", function=get_episode_reward),),
            correct=Solved(reward=get_episode_reward, at=self.config.solved_at),
        )

    def _read_problems(self, env: Any, *, seat: str, name: str) -> list[Problem]:
        """Return every row as a problem; raises ValueError for a row that cannot be trained on."""
        taskset, most = env.taskset, self.config.max_problems
        if most is None and not taskset.bounded:
            raise ValueError(f"taskset={self.config.taskset!r} is endless: set max_problems")
        runtime = _get_agents(env)[seat].runtime
        vf = import_for_tasks("verifiers.v1", needed_by="verifiers")
        harness = vf.load_harness(env.config.agent_harnesses()[seat])
        problems = []
        for task in islice(taskset, most):
            problem_id = f"{name}/{task.data.idx}"
            try:
                _check_fit(task, taskset=taskset, harness=harness, runtime=runtime)
                opening = _make_opening(task)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{problem_id} cannot be trained on: {error}") from error
            self._tasks[problem_id] = task
            problems.append(
                Problem(
                    id=problem_id,
                    # Rows whose prompt is made by their environment differ in their other data.
                    question=opening[-1].content or _describe_row(task.data),
                    answer=str(getattr(task.data, "answer", "") or ""),
                    info={"opening": [(message.role, message.content) for message in opening]},
                )
            )
        return problems


def _import_verifiers(config: VerifiersTask.Config) -> ModuleType:
    """Import verifiers, and register relay's harness and the config's own classes as plugins."""
    root = import_for_tasks("verifiers", needed_by=f"taskset={config.taskset!r}")
    if not root.__version__.startswith(VERSION):
        raise ValueError(
            f"verifiers {root.__version__} is installed, but relay supports {VERSION}x: "
            f"{name_pip()} install 'verifiers=={VERSION}*'"
        )
    # verifiers finds plugins as top-level modules, by name.
    sys.modules.setdefault(
        HARNESS_ID, import_for_tasks("rl.tasks.verifiers_harness", needed_by="verifiers")
    )
    if config.classes:
        module = ModuleType(config.taskset)
        names = []
        for cls in config.classes:
            names.append(cls.__name__)
            setattr(module, cls.__name__, cls)
        module.__all__ = names  # type: ignore[attr-defined]
        sys.modules[config.taskset] = module
    return import_for_tasks("verifiers.v1", needed_by="verifiers")


def _load_env(vf: ModuleType, config: VerifiersTask.Config, settings: Settings) -> Any:
    """Load the environment of a taskset, with relay's chat loop for the trained seat."""
    given = decode_settings(config.environment_settings, name="environment_settings")
    taskset = {"id": config.taskset, **decode_settings(settings)}
    try:
        env_class = vf.environment_class(config.taskset, config.environment)
        config_class = vf.env_config_type(config.taskset, config.environment)
        brings_harness = vf.default_harness_id(config.taskset) != "bash"
        for name in _list_seats(vf, config_class):
            # Rollouts run on this machine, unless the settings name another runtime.
            own = {"runtime": {"type": "subprocess"}}
            declared = config_class.model_fields[name].default
            if declared.harness is None and not brings_harness:
                own["harness"] = {"id": HARNESS_ID}
            given[name] = {**own, **given.get(name, {})}
            client = given[name].get("client")
            if isinstance(client, dict):
                client.setdefault("type", "eval")
        # One server: a pool spreads tunnels to other machines.
        server = {**given.pop("interception", {}), "type": "server"}
        data = {"id": config.environment, "taskset": taskset, "interception": server, **given}
        return env_class(config_class.model_validate(data))
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        raise ValueError(
            f"taskset={config.taskset!r}, environment={config.environment!r}: verifiers cannot "
            f"load it: {error} (environments for verifiers before 0.4 have load_environment and no "
            "Taskset)"
        ) from error


def _list_seats(vf: ModuleType, config_class: Any) -> list[str]:
    seats = []
    for name, info in config_class.model_fields.items():
        if isinstance(info.default, vf.AgentConfig):
            seats.append(name)
    return seats


def _choose_seat(env: Any, config: VerifiersTask.Config) -> str:
    """Return the trained agent.

    Raises ValueError if it is ambiguous, or if other agents have no model.
    """
    seats = _get_agents(env)
    if not config.seat and len(seats) > 1:
        raise ValueError(f"seat is empty, but {type(env).__name__} has several: {', '.join(seats)}")
    # Other seats are played by models of their own, whose replies are not trained on.
    seat = config.seat or next(iter(seats))
    if seat not in seats:
        raise ValueError(f"seat={seat!r}: {type(env).__name__} has {', '.join(seats)}")
    unmanned = [name for name, spec in seats.items() if name != seat and spec.client is None]
    if unmanned:
        raise ValueError(
            f"{', '.join(unmanned)} of {type(env).__name__} have no model: give each one in "
            "environment_settings, as "
            '{"model": ..., "client": {"base_url": ...}}'
        )
    return seat


def _get_agents(env: Any) -> Mapping[str, Any]:
    """Return the config of each agent by its seat."""
    configs = import_for_tasks("verifiers.v1.configs.agent", needed_by="verifiers")
    agents: Mapping[str, Any] = configs.agent_config_fields(env.config)
    return agents


def _check_fit(task: Any, *, taskset: Any, harness: Any, runtime: Any) -> None:
    """Raise an error, by verifiers' own rules, for a task that cannot be played here.

    The error is a TypeError or ValueError.
    """
    compile_ = import_for_tasks("verifiers.v1.utils.compile", needed_by="verifiers")
    # As verifiers does before a rollout; here before the run, for all rows.
    resolved = compile_.resolve_runtime_config(runtime, task, set())
    tools = [*task.toolsets(task.config), *taskset.toolsets(taskset.config)]
    compile_.validate_pairing(harness, type(task), resolved, tools=tools)


def _make_opening(task: Any) -> list[Message]:
    """Return the prompt of a task; raise ValueError if no model of text could be asked it."""
    prompt, system = task.data.prompt, task.data.system_prompt
    if prompt is None or isinstance(prompt, str):
        # Without a prompt, the environment makes one when the episode begins.
        opening = [Message(role="user", content=prompt or "")]
    else:
        if any(not isinstance(message.content, str) for message in prompt):
            raise ValueError("its prompt has parts that are not text")
        opening = [Message(role=message.role, content=message.content) for message in prompt]
    if not opening or "assistant" in (opening[0].role, opening[-1].role):
        raise ValueError("its prompt must begin and end with a message to the model")
    return [Message(role="system", content=system), *opening] if system else opening


def _describe_row(data: Any) -> str:
    text: str = data.model_dump_json(exclude={"idx"}, exclude_defaults=True)
    return text


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPrompt(SingleTurn):
    """The prompt of a row; its episode is played by verifiers."""

    async def step(self, reply: Reply) -> Observation:
        raise RuntimeError("episodes of verifiers are played by the task's `open_player`")


def get_episode_reward(rollout: Rollout) -> float:
    """Return the sum of the environment's own rewards.

    Raises UnparsedAnswer if a limit ended the episode before.
    """
    reward = rollout.turns[-1].observation.metrics.get(REWARD)
    if reward is None:
        raise UnparsedAnswer(f"the episode was not scored: {rollout.end}")
    return reward
