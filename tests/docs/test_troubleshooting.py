"""docs/troubleshooting.md has a row for each kind of finding, and names only existing settings."""

import re
from pathlib import Path

from configs.sum_digits import tiny
from rl.config.tree import walk
from rl.reporting.findings import KINDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
SETTING = re.compile(
    r"(?<![\w./])(?:loop|recorder|generator|reward|trainer|parity)(?:\.(?!md\b)[a-z_]+)+\b(?!\()"
)


def test_table_has_exactly_the_kinds_of_findings():
    rows = re.findall(r"^\| `([a-z_]+)` \|", PAGE, flags=re.MULTILINE)
    assert sorted(rows) == sorted(KINDS)


def test_advised_settings_exist():
    there = {entry.path for entry in walk(tiny())}
    rules = [path.read_text() for path in (ROOT / "rl" / "reporting").glob("*.py")]
    advised = {path for text in (PAGE, *rules) for path in SETTING.findall(text)}
    assert {"loop.max_off_policy_steps", "reward.num_procs", "trainer.training.max_norm"} <= advised
    assert sorted(advised - there) == []
