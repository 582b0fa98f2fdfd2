from __future__ import annotations

import pytest

from rl.tinker.service.limits import Limits


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"models": 0}, "models is 0; a limit is a number above 0"),
        ({"gap_timeout_s": -1.0}, "gap_timeout_s is -1.0"),
        ({"name_length": 129}, "name_length is 129"),
    ],
)
def test_limits_that_make_no_sense_are_named(values: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Limits(**values)
