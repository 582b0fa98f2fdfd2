import pytest

from rl.rollouts.overlong import OverlongPunishment, overlong_punishment


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, 0.0), (75, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (120, -1.0)],
)
def test_punishment_falls_from_the_buffers_start_to_its_end(num_tokens, expected):
    assert overlong_punishment(num_tokens, max_tokens=100, cache_tokens=20) == pytest.approx(expected)
    settings = OverlongPunishment(enable=True, buffer_tokens=20, penalty=0.5)
    assert settings(num_tokens, max_tokens=100) == pytest.approx(0.5 * expected)
    assert OverlongPunishment(buffer_tokens=20)(num_tokens, max_tokens=100) == 0.0


def test_a_buffer_of_the_whole_completion_punishes_every_token():
    assert overlong_punishment(3, max_tokens=10, cache_tokens=10) == pytest.approx(-0.3)


def test_what_cannot_be_is_refused_with_its_field():
    with pytest.raises(ValueError, match="cache_tokens=11: must be from 1 to 10"):
        overlong_punishment(3, max_tokens=10, cache_tokens=11)
    with pytest.raises(ValueError, match="buffer_tokens=4096: must be at most 32"):
        OverlongPunishment(enable=True)(3, max_tokens=32)
    with pytest.raises(ValueError, match="buffer_tokens=0: must be at least 1"):
        OverlongPunishment(buffer_tokens=0)
    with pytest.raises(ValueError, match="penalty=-1: must be a finite number"):
        OverlongPunishment(penalty=-1)


@pytest.mark.parametrize(
    ("max_tokens", "num_tokens", "expected"), [(40, 30, 0.0), (40, 35, -0.5), (3, 3, -1.0)]
)
def test_a_buffer_that_is_not_given_is_a_quarter_of_what_a_completion_may_have(
    max_tokens, num_tokens, expected
):
    assert OverlongPunishment(enable=True, buffer_tokens=None)(num_tokens, max_tokens=max_tokens) == expected
