import pytest

from rl.errors import RunError, naming


def test_a_run_error_says_the_innermost_place_in_its_message():
    with pytest.raises(RunError, match=r"^step 3: no good$"), naming("run"), naming("step 3"):
        raise RunError("no good")


def test_any_other_error_keeps_type_and_message_and_gets_the_places_as_notes():
    with pytest.raises(KeyError, match="'x'") as raised, naming("run"), naming("step 3"):
        raise KeyError("x")
    assert raised.value.__notes__ == ["step 3", "run"]
