"""Options of a run and what differs from the function that they came from."""

from rl.config.registry import resolve
from rl.config.serialize import to_dict
from rl.reporting.html.config_rows import config_rows

MODULE = "tests.config.example_configs"


def test_an_option_that_was_changed_has_the_functions_value_beside_it():
    values = to_dict(resolve(MODULE, "tiny").config)
    values["trainer"]["optimizer"]["lr"] = 0.5
    values["of_an_older_version"] = [1]
    rows, problem = config_rows({"module": MODULE, "config": "tiny", "values": values})
    assert problem is None
    changed = [row for row in rows if "default" in row]
    assert changed == [
        {"path": "trainer.optimizer.lr", "value": "0.5", "default": "0.001"},
        {"path": "of_an_older_version", "value": "[1]", "default": "absent"},
    ]
    assert {"path": "trainer.optimizer.kind", "value": '"fused"'} in rows


def test_a_function_that_is_gone_leaves_the_options_and_says_so():
    rows, problem = config_rows({"module": MODULE, "config": "gone", "values": {"a": {"b": None}}})
    assert rows == [{"path": "a.b", "value": "null"}]
    assert problem is not None
    assert problem.startswith(f"what differs from {MODULE}.gone is not known: --config gone")
