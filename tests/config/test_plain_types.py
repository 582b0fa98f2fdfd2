from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest

from rl.config.plain_types import is_of_type


class Named(Protocol):
    name: str


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (1, int, True),
        (True, int, False),
        (1.0, int, False),
        (1, float, True),
        (float("inf"), float, True),
        (True, float, False),
        ("1", float, False),
        (True, bool, True),
        (0, bool, False),
        ("x", str, True),
        (Path("x"), str, False),
        (Path("x"), Path, True),
        ("x", Path, False),
        (None, int | None, True),
        (None, int, False),
        ("a", Literal["a", "b"], True),
        ("c", Literal["a", "b"], False),
        (1, Literal[True], False),
        (None, Literal["a"] | None, True),
        ((1.0, 2), tuple[float, float], True),
        ([1.0, 2], tuple[float, float], True),
        ((1.0,), tuple[float, float], False),
        ((1, 2, 3), tuple[int, ...], True),
        ((), tuple[int, ...], True),
        ((1, "2"), tuple[int, ...], False),
        ("ab", tuple[str, ...], False),
        ([1, 2], list[int], True),
        (["a"], Sequence[Literal["a"]], True),
        (["b"], Sequence[Literal["a"]], False),
        ({"a": 1}, dict[str, int], True),
        ({"a": "1"}, Mapping[str, int], False),
        ([1], dict[str, int], False),
        (object(), Any, True),
        (object(), Named, True),
    ],
)
def test_a_value_is_of_its_type_or_not(value, annotation, expected):
    assert is_of_type(value, annotation) is expected
