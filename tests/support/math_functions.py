"""Reward functions that use math-verify, which sets and clears the process's alarm in each call."""

from math_verify import parse, verify

from rl.rollouts.rubric import Criterion, Rubric

HALF = parse("$\\frac{1}{2}$")
"""Parsed at import, because the first parse is the slowest."""


def is_half(rollout):
    """Return 1 if the reply is a half; loop forever for the reply "loop"."""
    assert HALF
    answer = parse(rollout.text, parsing_timeout=5)
    while rollout.text == "loop":
        pass
    return float(verify(HALF, answer, timeout_seconds=5))


MAIN_THREAD = Rubric(criteria=(Criterion(name="half", function=is_half),))
