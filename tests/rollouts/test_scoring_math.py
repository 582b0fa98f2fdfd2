"""math-verify sets and clears the alarm of its process, and works in a main thread alone."""

import pytest

from rl.rollouts.scoring import score_within
from tests.support.math_functions import EVENT_LOOP, MAIN_THREAD
from tests.support.scored import replied
from tests.support.scoring_functions import LIMIT_S, Driven, failure_of


@pytest.mark.medium
def test_math_verify_grades_in_the_process_and_does_not_switch_the_time_limit_off():
    driven = Driven(MAIN_THREAD)
    try:
        process = driven.start()
        (scores,) = driven.score([replied(text) for text in ("$0.5$", "loop", "$\\frac{2}{4}$", "$0.4$")])
        assert driven.start() is process
    finally:
        driven.close()
    assert [s.failure is not None for s in scores] == [False, True, False, False]
    assert [s.reward for s in scores] == [1.0, 0.0, 1.0, 0.0]
    assert f"reward 'half' took longer than time_limit_s={LIMIT_S} (stopped after " in failure_of(scores[1])


def test_off_the_main_thread_its_alarm_is_a_failure_that_says_so():
    score = score_within(EVENT_LOOP, replied("$0.5$"), 20)
    assert "reward 'half' raised ValueError(" in failure_of(score)
    assert "threaded environment" in failure_of(score)
