"""docs/troubleshooting.md: a row for each kind of finding, and no setting that is not there."""

import re
from pathlib import Path

from configs.sum_digits import tiny
from rl.config.tree import walk
from rl.reporting.findings import KINDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
SETTING = re.compile(
    r"(?<![\w./])(?:loop|recorder|generator|reward|trainer|canary)(?:\.(?!md\b)[a-z_]+)+\b(?!\()"
)


def test_every_kind_of_finding_has_a_row_and_no_other():
    rows = re.findall(r"^\| `([a-z_]+)` \|", PAGE, flags=re.MULTILINE)
    assert sorted(rows) == sorted(KINDS)


def test_the_settings_that_page_and_findings_advise_are_settings():
    there = {entry.path for entry in walk(tiny())}
    rules = [path.read_text() for path in (ROOT / "rl" / "reporting" / "rules").glob("*.py")]
    advised = {path for text in (PAGE, *rules) for path in SETTING.findall(text)}
    assert {"loop.max_policy_age", "reward.num_procs", "trainer.training.max_norm"} <= advised
    assert sorted(advised - there) == []
