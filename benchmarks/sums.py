"""Sums as prompts of a chat model, for measurements: the same rows and tokens for every side,
replies of one length.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl.rollouts.rubric import Criterion, Rubric
from rl.tasks.dataset import DatasetTask
from rl.tasks.reasoning_gym_task import Source
from rl.types import Rollout

NAME_THE_END = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)


class Sums(DatasetTask):
    """Rows of a file whose questions are whole prompts, as text with the chat template's tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(DatasetTask.Config):
        shuffle: bool = False

    def rubric(self, *, seed: int) -> Rubric:
        return Rubric(
            criteria=(Criterion(name="answer", function=contains_answer),), correct=contains_answer
        )


def contains_answer(rollout: Rollout) -> bool:
    return bool(reward(rollout.text, rollout.prompt.problem.answer))


def reward(completion: str, answer: str) -> float:
    """Return 1 if the completion contains the answer: often, but not always, so that groups have
    advantages.
    """
    return float(answer in completion)


def write_prompts(file: Path, *, assets: str, num_prompts: int) -> None:
    """Write prompts and answers as JSON lines: sums of two digits through the folder's chat
    template.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(assets)
    source = Source.load(
        "chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    )
    with file.open("w", encoding="utf-8") as lines:
        for problem in map(source.make_problem, range(num_prompts)):
            message = {"role": "user", "content": problem.question}
            prompt = tokenizer.apply_chat_template(
                [message], tokenize=False, add_generation_prompt=True
            )
            lines.write(json.dumps({"question": prompt, "answer": problem.answer}) + "\n")


def read_prompts(file: Path) -> Sequence[tuple[str, str]]:
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [(row["question"], row["answer"]) for row in rows]


def write_endless_model(folder: Path, *, assets: Path, dtype: str) -> None:
    """Copy a model's files into a folder and link its weights, with another end token, so that
    every completion has the full length.

    The new end token is the tokenizer's last special one, which a model practically never writes.
    `dtype` replaces the dtype in config.json, in which vLLM loads the weights.
    """
    end = json.loads((assets / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"][-1]
    new = {"eos_token_id": end["id"], "eos_token": end["content"], "dtype": dtype}
    folder.mkdir()
    for file in assets.resolve().iterdir():
        if file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file)
            continue
        if file.name not in NAME_THE_END:
            shutil.copy(file, folder)
            continue
        settings = json.loads(file.read_text(encoding="utf-8"))
        settings |= {name: value for name, value in new.items() if name in settings}
        (folder / file.name).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
