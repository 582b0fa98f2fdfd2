"""math-verify as a reward function: it sets and clears the process's alarm, at each parse and comparison."""

from math_verify import parse, verify

from rl.rollouts.rubric import Criterion, Rubric

HALF = parse("$\\frac{1}{2}$")
"""Made while the module is loaded: the first parse takes longest."""


def is_half(rollout):
    """Whether the reply is a half; if it is so in words, for ever."""
    assert HALF
    answer = parse(rollout.text, parsing_timeout=5)
    while rollout.text == "loop":
        pass
    return float(verify(HALF, answer, timeout_seconds=5))


async def is_half_later(rollout):
    return is_half(rollout)


MAIN_THREAD = Rubric(criteria=(Criterion(name="half", function=is_half),))
EVENT_LOOP = Rubric(criteria=(Criterion(name="half", function=is_half_later),))
