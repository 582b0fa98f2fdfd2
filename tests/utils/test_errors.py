import pytest

from rl.utils.errors import RunError, error_context


def test_a_run_error_names_the_innermost_position():
    with pytest.raises(RunError, match=r"^step 3: no good$"), error_context("run"), error_context("step 3"):
        raise RunError("no good")


def test_other_errors_get_the_positions_as_notes():
    with pytest.raises(KeyError, match="'x'") as raised, error_context("run"), error_context("step 3"):
        raise KeyError("x")
    assert raised.value.__notes__ == ["step 3", "run"]
