"""Datasets of reasoning-gym by name: endless problems, held-out ones, and the dataset's own grader.

reasoning-gym draws item i of a dataset with seed s from the number s + i. Evaluation takes the
numbers from 0 on, training those from `FIRST_TRAIN_SEED` on; so training problem n depends only on
the run's seed and n. In small datasets several numbers give the same question: held-out questions
are never trained on.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rl.config.configurable import Configurable
from rl.config.tree import check_bounds
from rl.protocols import Environment
from rl.rollouts.environment import SingleTurn
from rl.rollouts.rubric import Criterion, Rubric
from rl.tasks.data import ProblemsByNumber, decode_settings, hash_content, import_for_tasks
from rl.tasks.generated import Coin
from rl.tasks.task import Place, Solved, required_answer
from rl.types import Problem, Rollout
from rl.utils.numbers import find_numbers, same_answer

BLOCK = 1000
"""Items of one reasoning-gym dataset object; some datasets build a table of all items at once."""
FIRST_TRAIN_SEED = 2**20
SEEDS_A_RUN = 2**24
"""Number of different problems of a run; then they repeat."""
MAX_REDRAWS = 64
"""Most draws for a training problem that turns out to be held out."""
DEFAULT_SYSTEM = (
    "Think step by step, then give the final answer between <answer> and </answer>. Write nothing "
    "but the answer between them."
)


class ReasoningGym(Configurable):
    """One dataset of reasoning-gym as a task.

    Raises:
        ValueError: there is no such dataset or setting, a value is refused, or too few problems are
            different.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Dataset of reasoning-gym with its settings, its split and its grading."""

        dataset: str
        """Name in reasoning-gym, such as `basic_arithmetic`."""
        settings: dict[str, int | float | bool | str] = field(default_factory=dict)
        """Settings of the dataset by name; a string that starts with `[` or `{` is decoded as JSON.
        """
        num_eval: int = 128
        """Number of held-out problems, all different; the same for every seed."""
        split_by: Literal["question", "numbers"] = "question"
        """Part of a problem that training and held-out problems never share: the question, or all
        of its numbers in their order, so that `4 + 3` held out keeps `4 - 3` out of training."""
        answer_in: Literal["tags", "last_line", "last_number", "whole"] = "tags"
        """Position of the answer in a reply, after any thoughts: in the last `<answer></answer>`,
        in the last line, the last number, or the whole reply."""
        system: str = DEFAULT_SYSTEM
        """System message; empty for none."""
        solved_at: float = 1.0
        """Smallest score that counts as right; the score itself is the reward."""
        reward: Literal["score", "noise"] = "score"
        """`noise` replaces the reward by random 0 or 1: the control that must not learn."""

        def __post_init__(self) -> None:
            check_bounds(self, "num_eval", at_least=1, at_most=FIRST_TRAIN_SEED // 2)
            check_bounds(self, "solved_at", above=0, at_most=1)
            if "seed" in self.settings or "size" in self.settings:
                raise ValueError("settings: seed and size are chosen by this task")

    def __init__(self, *, config: Config) -> None:
        self.config = config
        self._source = Source.load(config.dataset, config.settings)
        # Drawn once: the problems of the evaluation are the same for every seed, and a training
        # problem is compared with their keys.
        self._eval = self._draw_held_out()
        self._held_keys = {self._split_key(problem) for problem in self._eval}

    def train_problems(self, *, seed: int) -> Iterator[Problem]:
        """Return endless problems; `.problem(n)` is number n."""
        return self._draw(f"train {seed}")

    def warmup_problems(self, *, seed: int) -> Iterator[Problem]:
        """Return other training problems with their bare answers as demonstrations.

        Raises ValueError if there are none.
        """
        for problem in self._draw(f"warm-up {seed}"):
            if not problem.answer:
                raise ValueError(
                    f"reasoning-gym's {self.config.dataset!r} has no answers to warm up on: start "
                    "from a model that follows instructions (hf_assets_path), with --warmup None"
                )
            # A bare answer, or in the form that earns the reward.
            form = "<answer>{}</answer>" if self.config.answer_in == "tags" else "{}"
            yield dataclasses.replace(problem, demonstration=form.format(problem.answer))

    def eval_sets(self) -> Mapping[str, Sequence[Problem]]:
        return {"held_out": self._eval}

    def environment(self, problem: Problem) -> Environment:
        return SingleTurn(problem=problem, system=self.config.system)

    def rubric(self, *, seed: int) -> Rubric:
        """Give the dataset's own score of the answer, 0 to 1, or random rewards.

        `seed` fixes those.
        """
        config = self.config
        grader = Grader(source=self._source, answer_in=config.answer_in)
        criterion = Criterion(name="answer", function=grader)
        if config.reward == "noise":
            criterion = Criterion(name="noise", function=Coin(seed=seed))
        # `correct` stays the grader's, so that the curve of the control shows its accuracy.
        return Rubric(criteria=(criterion,), correct=Solved(reward=grader, at=config.solved_at))

    def _draw(self, seed: str) -> ProblemsByNumber:
        digest = hashlib.blake2b(seed.encode(), digest_size=8).digest()
        # Redraws never reach the numbers of the evaluation, and all numbers are below 2**31 for
        # some datasets.
        first_seed = FIRST_TRAIN_SEED * (1 + int.from_bytes(digest, "big") % 1024)
        return ProblemsByNumber(lambda number: self._draw_training(number, first_seed=first_seed))

    def _split_key(self, problem: Problem) -> int:
        text = problem.question
        return hash_content(
            " ".join(find_numbers(text)) if self.config.split_by == "numbers" else text
        )

    def _draw_training(self, number: int, *, first_seed: int) -> Problem:
        for redraw in range(MAX_REDRAWS):
            problem = self._source.make_problem(
                first_seed + redraw * SEEDS_A_RUN + number % SEEDS_A_RUN
            )
            if self._split_key(problem) not in self._held_keys:
                # Two numbers may give the same question, but ids must be unique within a run.
                return dataclasses.replace(problem, id=f"{problem.id}#{number}")
        raise ValueError(
            f"training problem {number} of {self.config.dataset!r} is held out in all "
            f"{MAX_REDRAWS} draws of it: lower num_eval={self.config.num_eval}"
        )

    def _draw_held_out(self) -> list[Problem]:
        problems: dict[int, Problem] = {}
        most_drawn = min(20 * self.config.num_eval + BLOCK, FIRST_TRAIN_SEED - BLOCK)
        for seed in range(most_drawn):
            problem = self._source.make_problem(seed)
            # Several numbers may give one question, of which the first counts.
            problems.setdefault(hash_content(problem.question), problem)
            if len(problems) == self.config.num_eval:
                return list(problems.values())
        raise ValueError(
            f"{self.config.dataset!r} gave {len(problems)} different problems in {most_drawn} "
            f"draws: num_eval={self.config.num_eval} must be fewer, so that there are others to "
            "train on"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A dataset with its settings; picklable for graders in other processes."""

    dataset: str
    settings: str
    """Settings as JSON with sorted keys, so that equal settings are equal strings."""

    @classmethod
    def load(cls, dataset: str, settings: Mapping[str, Any]) -> Source:
        """Check names and values.

        Raises ValueError for an unknown name or setting, or a refused value.
        """
        import_for_tasks("reasoning_gym", needed_by=f"the dataset {dataset!r}")
        registered = import_for_tasks("reasoning_gym.factory", needed_by="reasoning-gym").DATASETS
        if dataset not in registered:
            near = difflib.get_close_matches(dataset, registered, n=3)
            names = "sorted(reasoning_gym.factory.DATASETS) lists them"
            hint = f"did you mean {' or '.join(near)}?" if near else names
            raise ValueError(
                f"dataset={dataset!r}: reasoning-gym has no dataset of this name; {hint}"
            )
        valid = {f.name for f in dataclasses.fields(registered[dataset][1])} - {"seed", "size"}
        decoded = decode_settings(settings)
        unknown = sorted(decoded.keys() - valid)
        if unknown:
            raise ValueError(
                f"settings: {dataset!r} has no {', '.join(unknown)}; it has "
                f"{', '.join(sorted(valid))}"
            )
        # Values are checked by the dataset itself, with its first block.
        source = cls(dataset=dataset, settings=json.dumps(decoded, sort_keys=True))
        try:
            source.block(0)
        except (AssertionError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"settings={dict(settings)}: {dataset!r} refuses: {error}") from error
        return source

    def make_problem(self, seed: int) -> Problem:
        number, item = divmod(seed, BLOCK)
        entry = self.block(number)[item]
        answer = entry["answer"]
        return Problem(
            id=f"{self.dataset}/{seed}",
            question=entry["question"],
            answer="" if answer is None else str(answer),
            info={"entry": entry},
        )

    @functools.lru_cache(maxsize=8)  # noqa: B019  (a source is a value)
    def block(self, number: int) -> Any:
        """Return reasoning-gym's dataset of `BLOCK` items."""
        reasoning_gym = import_for_tasks("reasoning_gym", needed_by=f"the dataset {self.dataset!r}")
        settings = json.loads(self.settings)
        if self.dataset == "composite":
            spec = import_for_tasks(
                "reasoning_gym.composite", needed_by="the dataset 'composite'"
            ).DatasetSpec
            parts = settings.get("datasets", [])
            settings["datasets"] = [spec(**{"weight": 1, "config": {}, **part}) for part in parts]
        return reasoning_gym.create_dataset(
            self.dataset, seed=number * BLOCK, size=BLOCK, **settings
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Grader:
    """Reward function that returns reasoning-gym's score of the answer."""

    source: Source
    answer_in: Place

    def __call__(self, rollout: Rollout) -> float:
        """Grade the reply; raises UnparsedAnswer if it has no answer in its place."""
        answer = required_answer(rollout, self.answer_in)
        entry = rollout.prompt.problem.info["entry"]
        if self.answer_in == "last_number":
            answer = _match_expected(answer, entry["answer"])
        return float(self.source.block(0).score_answer(answer, entry))


def _match_expected(answer: str, expected: Any) -> str:
    """Return the expected answer if its only number has the value of `answer`.

    Datasets compare texts.
    """
    numbers = find_numbers(str(expected))
    return str(expected) if len(numbers) == 1 and same_answer(numbers[0], answer) else answer
