"""No option without a word in docs/, and no word there about an option that does not exist."""

import dataclasses
import re
import typing
from pathlib import Path

import pytest

from actors.calls import Timeouts
from actors.canary import CanaryConfig
from actors.controller import Controller
from actors.launch_config import LaunchConfig
from actors.supervision import RecoveryConfig
from actors.trainer import PolicyTrainer
from configs.sum_digits import tiny
from losses.cispo import CISPOLoss
from losses.cross_entropy import CrossEntropyLoss
from losses.dapo import DAPOLoss
from losses.dr_grpo import DrGRPOLoss
from losses.dro import DROLoss
from losses.grpo import GRPOLoss
from losses.gspo import GSPOLoss
from losses.importance_sampling import ImportanceSamplingLoss
from losses.ppo import PPOLoss
from losses.reinforce_plus_plus import ReinforcePlusPlusLoss
from losses.rloo import RLOOLoss
from rl.config.tree import is_node
from rl.loop import Loop
from rl.machine_limits import LimitsConfig
from rl.observability.span_file import TimelineConfig
from rl.rollouts.renderer import RendererConfig
from rl.weights.store import WeightStore

DOCS = Path(__file__).parent.parent / "docs"
LOSSES = (
    GRPOLoss, PPOLoss, DrGRPOLoss, DAPOLoss, GSPOLoss, CISPOLoss, RLOOLoss, ReinforcePlusPlusLoss,
    ImportanceSamplingLoss, DROLoss, CrossEntropyLoss,
)  # fmt: skip


def fields_of(config, *, prefix):
    """Dotted paths of all leaves of a config class, of its components that may be None too."""
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        path = f"{prefix}{field.name}"
        if field.name == "loss":
            nodes: tuple[typing.Any, ...] = LOSSES
        else:
            arms = typing.get_args(hints[field.name]) or (hints[field.name],)
            nodes = tuple(arm for arm in arms if dataclasses.is_dataclass(arm))
        if nodes and field.name != "model":
            for node in nodes:
                yield from fields_of(node, prefix=f"{path}.")
        else:
            yield path


def trainer_fields():
    """And those of the weights' way and the deadlines."""
    trainer = set(fields_of(PolicyTrainer.Config, prefix="trainer."))
    others = (("weights.", WeightStore.Config), ("timeouts.", Timeouts))
    return trainer.union(*(fields_of(config, prefix=prefix) for prefix, config in others))


def root_leaves():
    """Of the run itself: its components are somebody else's to document."""
    config = tiny()
    names = [field.name for field in dataclasses.fields(Controller.Config)]
    return {name for name in names if name in ("task", "model") or not is_node(getattr(config, name))} - {
        "warmup"
    }


def documented(text):
    """Rows of tables under a heading, and paths in backticks anywhere.

    The heading names the component whose fields the rows are: `## Optimizer: `trainer.optimizer``; without
    a name they are the run's own.
    """
    group, rows, anywhere = "", set(), set()
    for line in text.splitlines():
        if line.startswith("#"):
            named = re.search(r"`([a-z_.]+)`\s*$", line)
            group = f"{named[1]}." if named else ""
            continue
        anywhere |= set(re.findall(r"`(?:--)?((?:trainer|weights|timeouts)\.[a-z_.0-9]+)`", line))
        if row := re.match(r"\| (`[a-z_0-9.]+`(?:, `[a-z_0-9.]+`)*) \|", line):
            rows |= {group + name for name in re.findall(r"`([^`]+)`", row[1])}
    return rows, anywhere


def in_docs():
    texts = [path.read_text() for path in sorted(DOCS.glob("*.md"))]
    found = [documented(text) for text in texts]
    return set().union(*(rows | anywhere for rows, anywhere in found))


def test_every_field_of_the_trainer_is_in_the_docs():
    fields = trainer_fields()
    assert len(fields) > 60
    assert sorted(fields - in_docs()) == []


def test_every_field_of_the_trainer_is_in_its_own_list():
    rows, anywhere = documented((DOCS / "trainer.md").read_text())
    assert sorted(trainer_fields() - rows - anywhere) == []


def test_every_field_of_the_run_is_in_the_docs():
    rows, _ = documented((DOCS / "trainer.md").read_text())
    assert sorted(root_leaves() - rows) == []


def test_every_row_of_the_options_is_a_field():
    rows, _ = documented((DOCS / "trainer.md").read_text())
    assert sorted(rows - trainer_fields() - root_leaves()) == []


def test_launch_has_a_page_with_a_row_for_each_of_its_fields_and_no_other():
    rows, _ = documented((DOCS / "launch.md").read_text())
    assert sorted(rows) == sorted(fields_of(LaunchConfig, prefix="launch."))


def test_every_field_of_loop_and_canary_is_in_their_page_and_no_other():
    rows, _ = documented((DOCS / "async.md").read_text())
    fields = {*fields_of(Loop.Config, prefix="loop."), *fields_of(CanaryConfig, prefix="canary.")}
    assert sorted(rows) == sorted(fields)


def test_recovery_has_a_table_with_a_row_for_each_of_its_fields():
    rows, _ = documented((DOCS / "reliability.md").read_text())
    recovery = {row for row in rows if row.startswith("recovery.")}
    assert sorted(recovery) == sorted(fields_of(RecoveryConfig, prefix="recovery."))


def test_timeline_and_limits_have_a_page_with_a_row_for_each_field_and_no_other():
    rows, _ = documented((DOCS / "timeline.md").read_text())
    fields = {
        *fields_of(TimelineConfig, prefix="timeline."),
        *fields_of(LimitsConfig, prefix="limits."),
    }
    assert sorted(rows) == sorted(fields)


def test_renderers_have_a_page_with_a_row_for_each_field_and_no_other():
    rows, _ = documented((DOCS / "renderers.md").read_text())
    assert sorted(rows) == sorted(fields_of(RendererConfig, prefix="renderer."))


def test_every_page_is_linked_from_the_readme_and_every_link_leads_somewhere():
    readme = DOCS.parent / "README.md"
    linked = {path.name for path in DOCS.glob("*.md") if f"(docs/{path.name})" in readme.read_text()}
    assert linked == {path.name for path in DOCS.glob("*.md")}
    for page in (readme, *DOCS.glob("*.md")):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("## Steps: `trainer.optimizer`\n\n| `lr` | works |\n", {"trainer.optimizer.lr"}),
        ("# The run\n\n| `seed` | works |\n| plain | no |\n", {"seed"}),
        ("set `--trainer.comm.train_timeout_s` higher", {"trainer.comm.train_timeout_s"}),
    ],
)
def test_docs_are_read_by_heading_and_row(text, expected):
    rows, anywhere = documented(text)
    assert rows | anywhere == expected
