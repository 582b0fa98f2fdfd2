"""Examples of agents: they import nothing of relay, and their calculator gives its numbers."""

import ast
import random
import re
from itertools import islice
from pathlib import Path

import pytest

from examples.agents.calculator import calculate
from rl.tasks.calculation import Calculation
from rl.tools.calculator import evaluate

FOLDER = Path(__file__).parents[2] / "examples" / "agents"
OWN = ("rl", "actors", "configs", "losses", "relay", "tests", "tools")


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.name)
def test_agents_do_not_know_that_they_are_trained(file):
    imported = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert imported.isdisjoint(OWN)


def list_expressions():
    """Return what demonstrations write, of products of all sizes, and nested expressions."""
    expressions = []
    for num_digits in (2, 4, 9):
        task = Calculation.Config(num_digits=num_digits, num_products=2).build()
        for problem in islice(task.warmup_problems(seed=num_digits), 50):
            expressions += re.findall(r'"expression": "(.*?)"', " ".join(problem.demonstration))
    generator = random.Random(1)
    for _ in range(200):
        expression = str(generator.randint(0, 999))
        for _ in range(generator.randint(1, 5)):
            sign, number = generator.choice("+-*"), generator.randint(-99, 999)
            expression = f"({expression}) {sign} {number}"
        expressions.append(f"-{expression}" if generator.random() < 0.3 else expression)
    return expressions


def test_calculator_of_the_example_gives_the_numbers_of_the_task():
    expressions = list_expressions()
    assert len(expressions) == 500
    assert [calculate(text) for text in expressions] == [str(evaluate(t)) for t in expressions]


@pytest.mark.parametrize(
    "expression",
    ["", "1 +", "2**9", "6 / 2", "True", "1.5", "None", "f(1)", "9" * 101, "(" * 50 + "1", "1\0"],
)
def test_calculator_of_the_example_says_what_it_does_not_know(expression):
    assert calculate(expression).startswith("Error: not an arithmetic expression")
