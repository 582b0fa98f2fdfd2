"""The snippets of docs/tools.md, run as they stand, and its tables."""

import asyncio
import dataclasses
import re
from pathlib import Path

from rl.tools.python_sandbox import PythonSandbox
from rl.types import Problem

PAGE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()


def test_snippets_make_an_environment_and_a_tool():
    first, second = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict = {}
    exec(first, names)
    exec(second, names)
    system, question = names["environment"](None, Problem(id="p/0", question="?", answer="")).opening()
    assert '"name": "python"' in system.content
    assert question.content == "?"
    tool = names["tool"]
    assert tool.parameters["required"] == ["first", "second"]
    assert asyncio.run(tool.call({"first": "2026-02-28", "second": "2026-01-31"})) == "28"


def test_table_names_every_setting_of_the_sandbox_and_its_default():
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", PAGE, flags=re.MULTILINE)
    defaults = {field.name: field.default for field in dataclasses.fields(PythonSandbox.Config)}
    assert {name: value.replace(",", "") for name, value in rows} == {
        name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in defaults.items()
    }
