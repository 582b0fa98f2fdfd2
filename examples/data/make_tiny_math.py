"""Write configs/tiny_math.jsonl, the problems of `configs/gsm8k.tiny`: sums in GSM8K's columns.

    python examples/data/make_tiny_math.py

The same lines every time: each has a `question`, and an `answer` with the steps and, after `####`,
the number.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

NUM_PROBLEMS = 200
FILE = Path(__file__).resolve().parents[2] / "configs" / "tiny_math.jsonl"


def make_problem(generator: random.Random) -> dict[str, str]:
    """Draw two or three numbers below 30, added or taken off from left to right; never below 0."""
    total = generator.randint(2, 29)
    question, steps = str(total), []
    for _ in range(generator.randint(1, 2)):
        number = generator.randint(1, 29)
        sign = "-" if number <= total and generator.random() < 0.5 else "+"
        after = total - number if sign == "-" else total + number
        steps.append(f"{total}{sign}{number}={after}")
        question += f"{sign}{number}"
        total = after
    return {"question": f"What is {question}?", "answer": f"{', '.join(steps)} #### {total}"}


def make_problems() -> list[dict[str, str]]:
    """Return the problems of the file, all different."""
    # A fixed seed: the file is in the repository, and a test compares it with these.
    generator = random.Random("tiny math")
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < NUM_PROBLEMS:
        row = make_problem(generator)
        rows[row["question"]] = row
    return list(rows.values())


if __name__ == "__main__":
    FILE.write_text("".join(json.dumps(row) + "\n" for row in make_problems()), encoding="utf-8")
