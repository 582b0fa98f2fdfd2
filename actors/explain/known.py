"""What can be known of a run without starting it: model, tokenizer, task; and what not, with the reason.

Environments are made and not opened, but for those of a single turn, which only hold a question; no reward
function is called, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from actors.run_config import STARTING_POINTS, RunConfig
from rl.loop_config import LoopConfig
from rl.models.hf import read_json_object
from rl.models.spec import ModelSpec
from rl.rollouts.environment import SingleTurn
from rl.rollouts.renderer import TemplateRenderer, make_renderer
from rl.rollouts.tokenizer import open_tokenizer
from rl.starting_point import StartingPoint, given_folder, random_model
from rl.tasks.task import Task

PROGRAMS = "rl.tasks.verifiers_task"
"""The module of tasks whose parts are programs of other people, which to load may start."""


MOST_LONG_PROMPTS = 1000
"""That are passed over in search of those of step 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """Of a run that is not started."""

    config: RunConfig
    spec: ModelSpec
    """Of the folder that is there, or as the config has it."""
    start: StartingPoint | None
    """None where its files are not there."""
    renderer: TemplateRenderer | None
    task: Task | None
    faults: tuple[str, ...]
    """What a run would refuse to start for."""
    unknown: tuple[str, ...]
    """What is not looked at."""

    def prompts(self, number: int) -> list[np.ndarray] | None:
        """[N] int32 of each of the first problems of training; None where that cannot be known."""
        if self.task is None or self.renderer is None:
            return None
        found: list[np.ndarray] = []
        for problem in islice(self.task.train_problems(seed=self.config.seed), number + MOST_LONG_PROMPTS):
            environment = self.task.environment(problem)
            if not only_asks(environment):
                return None
            prompt = self.renderer.opening(environment.opening())
            if len(prompt) <= self.prompt_room:
                found.append(prompt)
            elif self.config.loop.long_prompts == "stop":
                return None  # A run would stop there.
            if len(found) == number:
                return found
        return None

    @property
    def single_turn(self) -> bool | None:
        """Whether an episode is one reply; None: not known."""
        if self.task is None:
            return None
        environment = self.task.environment(next(self.task.train_problems(seed=self.config.seed)))
        return only_asks(environment) or None

    @property
    def sample_limit(self) -> int:
        """Most tokens of a sample that is trained on."""
        return min(self.rollout_limit, self.config.loop.max_sample_tokens or self.rollout_limit)

    @property
    def rollout_limit(self) -> int:
        """Most tokens of a rollout, which may be too long to be trained on."""
        limit = self.config.generator.max_model_len
        return min(limit, self.config.loop.episode.max_tokens or limit)

    @property
    def prompt_room(self) -> int:
        """Most tokens of a prompt: a reply of any length must find room behind it."""
        return self.rollout_limit - self.config.loop.sampling.max_tokens


def find_out(config: RunConfig) -> Known:
    """What is there of the files that the config names."""
    faults: list[str] = []
    unknown: list[str] = []
    spec = replace(config.model, batch_invariant=config.batch_invariant)
    start = _start(config, spec, faults)
    if start is not None:
        spec = start.spec
    elif config.any_model_size:
        spec = _sizes_of_folder(config, spec, unknown)
    renderer = _renderer(config, start, faults, unknown)
    task = _task(config, faults, unknown)
    return Known(
        config=config,
        spec=spec,
        start=start,
        renderer=renderer,
        task=task,
        faults=tuple(faults),
        unknown=tuple(unknown),
    )


def _start(config: RunConfig, spec: ModelSpec, faults: list[str]) -> StartingPoint | None:
    if config.hf_assets_path is None:
        cache = Path(config.dump_folder).expanduser().absolute() / STARTING_POINTS
        # A warm-up changes no shape; whether it was made before is seen when the run starts.
        return random_model(cache, spec=spec, seed=config.seed)
    try:
        return given_folder(config.hf_assets_path, spec=spec, any_size=config.any_model_size)
    except ValueError as error:
        faults.append(f"hf_assets_path={config.hf_assets_path!r}: {error}")
        return None


def _sizes_of_folder(config: RunConfig, spec: ModelSpec, unknown: list[str]) -> ModelSpec:
    assert config.hf_assets_path is not None, "else there is a start"
    folder = Path(config.hf_assets_path).expanduser()
    try:
        model = spec.from_hf_config(read_json_object(folder / "config.json"))
    except ValueError:
        unknown.append(
            f"the model's sizes, which are those of {folder} (any_model_size=True): all numbers are of "
            f"{spec.name} {spec.flavor}"
        )
        return spec
    return replace(spec, flavor=folder.name, model=model)


def _renderer(
    config: RunConfig, start: StartingPoint | None, faults: list[str], unknown: list[str]
) -> TemplateRenderer | None:
    try:
        if start is not None:
            tokenizer, stop_ids = start.tokenizer()
        else:
            assert config.hf_assets_path is not None, "else there is a start"
            tokenizer, stop_ids = open_tokenizer(Path(config.hf_assets_path).expanduser())
        return make_renderer(config.renderer, tokenizer=tokenizer, stop_token_ids=stop_ids)
    except (ValueError, OSError) as error:
        if start is not None:
            faults.append(str(error))
        unknown.append(f"the lengths of prompts: there is no tokenizer ({error})")
        return None


def _task(config: RunConfig, faults: list[str], unknown: list[str]) -> Task | None:
    if any(cls.__module__ == PROGRAMS for cls in config.task.owner.__mro__):
        unknown.append("problems and prompts of the task: its parts are programs, which are not loaded")
        return None
    try:
        task: Task = config.task.build()
        next(iter(task.train_problems(seed=config.seed)), None)
        if config.loop.eval_every:
            task.eval_sets()
    except (ValueError, OSError, ImportError) as error:
        faults.append(f"task: {error}")
        unknown.append("problems and prompts of the task, which is refused")
        return None
    unknown.append("whether the task's environments and reward functions work: a run tries them at its start")
    return task


def not_foreseen(loop: LoopConfig) -> Iterator[str]:
    """What only the rollouts decide, and adds to the numbers of a step, or takes off them."""
    if loop.equal_groups == "drop":
        yield (
            "how many groups have equal rewards (loop.equal_groups='drop'): others are drawn in their place, "
            "beyond these numbers of samples and replies"
        )
    limit = f"loop.max_sample_tokens={loop.max_sample_tokens}"
    if loop.max_sample_tokens is not None and loop.long_samples == "drop_group":
        yield f"how many groups have a longer sample than {limit}: others are drawn in their place"
    if loop.max_sample_tokens is not None and loop.long_samples == "drop":
        yield f"how many samples are longer than {limit}: they are drawn, and not trained on"
    if loop.max_failed_rewards:
        yield (
            f"how many rewards fail (loop.max_failed_rewards={loop.max_failed_rewards:g}): their samples are "
            "not trained on"
        )


def only_asks(environment: object) -> bool:
    """Whether it is of a single turn, and nothing but a question."""
    return isinstance(environment, SingleTurn) and environment.single_turn and environment.runs_inline
