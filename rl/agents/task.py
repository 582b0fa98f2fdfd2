"""A task whose episodes are agents: commands or functions of anybody, unmodified.

problems of another task -> an agent for each episode -> its requests become the rollout
                                                      -> reward: of the task, the agent, its exit
                                                         status, or a function of the rollout
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rl.agents.players.loading import load_agent_function
from rl.agents.players.plays import EPISODE_VARIABLES, MIB, AgentSpec
from rl.agents.program import AgentProgram
from rl.agents.rollouts import ChooseBranches
from rl.config.configurable import Configurable
from rl.config.tree import check_bounds, has_members
from rl.protocols import Environment
from rl.rollouts.reward_functions import make_criterion
from rl.rollouts.rubric import Criterion, Rubric, UnparsedAnswer
from rl.tasks.task import Solved, Task
from rl.types import Problem, Rollout
from rl.utils.user_code import load_function

RewardSource = Literal["task", "posted", "exit_status", "value"]
OF_AGENT: tuple[str, ...] = ("task", "posted", "exit_status", "value")


class AgentTask(Configurable):
    """The problems of another task, each given to an agent.

    Example:
        AgentTask.Config(
            problems=Calculation.Config(), command=("{python}", "agent.py", "{question}")
        )
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Problems, the agent with its limits, and its reward."""

        problems: Configurable.Config
        """Config of a task with the problems. Its environments play the demonstrations of a
        warm-up."""
        command: tuple[str, ...] = ()
        """Program and arguments of an episode's agent, started in a folder of its own with
        `problem.json`. `{python}` is this Python, `{question}` the question."""
        function: str = ""
        """Function of one argument, the problem, in place of a command: `module:function` or
        `file.py:function`, sync or async."""
        env: dict[str, str] = field(default_factory=dict)
        """Further environment variables of the agent."""
        collect: tuple[str, ...] = ()
        """Paths in the agent's folder of files that reward functions read (`rollout.state`)."""
        reward: str = "task"
        """Source of the reward: `task` (the rubric of `problems`, on the model's last reply),
        `posted` (what the agent posts to `/reward`), `exit_status` (1 for status 0, else 0),
        `value` (the number that the function returns), or a function of the rollout as
        `module:function` or `file.py:function`."""
        choose_branches: str = ""
        """Function of the rollout that returns the indices of its branches (`rollout.branches`) to
        train on, as `module:function` or `file.py:function`; empty: those of
        `agents.trained_roles`."""
        solved_at: float = 1.0
        """Smallest reward that counts as solved, unless the reward is the task's."""
        shown_info: tuple[str, ...] = ()
        """Entries of a problem's `info`, such as columns of a file, that the agent sees. Others may
        hold the answer."""
        shows_answer: bool = False
        """Let the agent see the reference answer, to grade itself."""
        needs_network: bool = False
        """Let agents use the machine's network; otherwise they reach only the endpoint, where the
        system permits that."""
        max_output_mib: float = 16.0
        """Most output of an agent, in MiB; more ends it."""
        max_folder_mib: int = 1024
        """Most disk space of an agent's folder, in MiB; more ends it."""
        may_leave_processes: bool = False
        """Accept agents that leave processes at their end, which are ended then. Otherwise their
        rollouts have failed: what was left could still have worked on the result."""
        keep_home: bool = False
        """Leave HOME and the caches of its owner to the agent, for tools and settings that are
        installed there."""
        keep_env: tuple[str, ...] = ()
        """Environment variables that agents get although they hold a secret by their name or value,
        such as ("SERPER_API_KEY",). Agents, and what the model executes in them, can read these."""

        def __post_init__(self) -> None:
            check_bounds(self, "max_output_mib", at_least=0.001, below=math.inf)
            # More bytes than that are no limit that the kernel takes.
            check_bounds(self, "max_folder_mib", at_least=1, at_most=2**40)
            check_bounds(self, "solved_at", above=-math.inf, below=math.inf)
            if bool(self.command) == bool(self.function):
                raise ValueError(
                    f"command={self.command}, function={self.function!r}: give one of them, the "
                    "agent that an episode starts"
                )
            for name in self.keep_env:
                if name in EPISODE_VARIABLES:
                    raise ValueError(
                        f"keep_env={self.keep_env}: {name} is set for each episode, by which "
                        "agents find the model: give another variable"
                    )
            # Refuses what no play could have.
            AgentSpec(command=self.command or None, env=self.env, collect=self.collect)
            made = getattr(self.problems, "owner", type(self.problems))
            if not has_members(made, Task):
                raise ValueError(
                    f"problems={made.__qualname__}: must be the config of a task (rl.tasks.task)"
                )

    def __init__(self, *, config: Config) -> None:
        self.config = config
        self._problems: Task = config.problems.build()
        self.choose_branches: ChooseBranches | None = None
        """See `rl.agents.rollouts.AgentEpisodes.choose`."""
        if config.choose_branches:
            self.choose_branches = load_function(config.choose_branches)
        for name in config.keep_env:
            if name not in os.environ:
                raise ValueError(
                    f"task.keep_env={config.keep_env}: the environment has no variable {name}"
                )
        if config.function:
            load_agent_function(config.function)
        elif "{" not in config.command[0] and shutil.which(config.command[0]) is None:
            raise ValueError(f"command={config.command}: there is no program {config.command[0]!r}")

    @property
    def program(self) -> AgentProgram:
        """The agent of every episode."""
        config = self.config
        return AgentProgram(
            command=config.command,
            function=config.function,
            env=config.env,
            collect=config.collect,
            shown_info=config.shown_info,
            shows_answer=config.shows_answer,
            needs_network=config.needs_network,
            max_output_bytes=int(config.max_output_mib * MIB),
            max_folder_bytes=config.max_folder_mib * MIB,
            may_leave_processes=config.may_leave_processes,
            keep_home=config.keep_home,
            keep_env=config.keep_env,
            may_exit_with_error=config.reward == "exit_status",
        )

    @property
    def summary(self) -> str:
        """The problems and the agent, for the reader of a run's start."""
        problems = getattr(self._problems, "summary", None)
        if not isinstance(problems, str):
            problems = f"problems of {type(self._problems).__name__}"
        agent = self.config.function or " ".join(self.config.command)
        return f"{problems}, each for an agent: {agent}"

    def train_problems(self, *, seed: int) -> Iterator[Problem]:
        return self._problems.train_problems(seed=seed)

    def warmup_problems(self, *, seed: int) -> Iterator[Problem]:
        return self._problems.warmup_problems(seed=seed)

    def eval_sets(self) -> Mapping[str, Sequence[Problem]]:
        return self._problems.eval_sets()

    def environment(self, problem: Problem) -> Environment:
        """Return the environment of a demonstration; episodes are agents."""
        return self._problems.environment(problem)

    def rubric(self, *, seed: int) -> Rubric:
        """Return the rubric of the reward's source."""
        source = self.config.reward
        if source == "task":
            return self._problems.rubric(seed=seed)
        if source in OF_AGENT:
            reward = StateReward(source=source)
            criterion = Criterion(name=source, function=reward)
            return Rubric(
                criteria=(criterion,), correct=Solved(reward=reward, at=self.config.solved_at)
            )
        return Rubric(criteria=(make_criterion(source, weight=1.0, columns={}),))


@dataclass(frozen=True, kw_only=True, slots=True)
class StateReward:
    """Reward function of what an agent left: its posted reward, exit status or value."""

    source: str

    def __call__(self, rollout: Rollout) -> float:
        state = rollout.state
        value: Any
        if self.source == "posted":
            value = state.get("posted", {}).get("reward")
        elif self.source == "exit_status":
            value = None if "exit_status" not in state else float(state["exit_status"] == 0)
        else:
            value = state.get("value")
        if not isinstance(value, int | float):
            raise UnparsedAnswer(f"the agent gave no reward: {self.source}={value!r}")
        return float(value)


def get_program(task: object) -> AgentProgram | None:
    """Return the agent of a task; None if its episodes are no agents."""
    program: AgentProgram | None = getattr(task, "program", None)
    return program
