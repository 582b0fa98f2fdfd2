"""docs/reliability.md: its table of deadlines is true."""

import importlib
import re
from pathlib import Path

import pytest

from configs.sum_digits import tiny

PAGE = Path(__file__).parent.parent.parent / "docs" / "reliability.md"
ROW = re.compile(r"\| .+? \| ((?:`[a-zA-Z_.]+`(?:, )?)+) \| ([\d., ]+) \|")


def deadlines():
    """(field or constant, seconds) of each row."""
    table = PAGE.read_text().partition("## Every wait and its deadline")[2].partition("\n\n## ")[0]
    rows = [row for row in map(ROW.match, table.splitlines()) if row]
    assert len(rows) == len([line for line in table.splitlines() if line.startswith("| ")]) - 1
    return [
        (name, float(seconds))
        for row in rows
        for name, seconds in zip(re.findall(r"`(.+?)`", row[1]), row[2].split(","), strict=True)
    ]


def value_of(name):
    """Of a constant of a module, or of a field of a run's config."""
    if name.startswith(("actors.", "rl.")):
        module, _, constant = name.rpartition(".")
        return getattr(importlib.import_module(module), constant)
    value = tiny()
    for part in name.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize(("name", "seconds"), deadlines())
def test_a_deadline_is_what_the_table_says(name, seconds):
    assert value_of(name) == seconds


def test_every_deadline_of_actors_is_in_the_table():
    named = {name for name, _ in deadlines()}
    assert {f"timeouts.{field}" for field in type(tiny().timeouts).__slots__} <= named
