from itertools import islice

import pytest

from rl.data.order import ShuffledProblems
from rl.rollouts.numbered_problems import NumberedProblems
from rl.types import LoopPosition, Problem


def problem_at(place):
    return Problem(id=str(place), question=f"question {place}", answer="")


def shuffled(*, seed="0", num_problems=10, shuffle=True):
    return ShuffledProblems(problem_at, num_problems=num_problems, seed=seed, shuffle=shuffle)


def ids(problems, count):
    return [problem.id for problem in islice(problems, count)]


def test_every_epoch_has_every_problem_once_in_an_order_of_its_own():
    drawn = ids(shuffled(), 30)
    epochs = [drawn[:10], drawn[10:20], drawn[20:]]
    assert [sorted(epoch, key=int) for epoch in epochs] == [[str(i) for i in range(10)]] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_order_depends_on_the_seed_and_repeats_for_it():
    assert ids(shuffled(seed="0"), 25) == ids(shuffled(seed="0"), 25)
    assert ids(shuffled(seed="0"), 25) != ids(shuffled(seed="1"), 25)


def test_without_shuffling_the_order_is_that_of_the_file():
    assert ids(shuffled(shuffle=False, num_problems=3), 7) == ["0", "1", "2", "0", "1", "2", "0"]


def test_any_problem_is_had_by_its_number_whatever_was_asked_before():
    in_order = ids(shuffled(), 40)
    by_number = shuffled()
    assert [by_number.problem(n).id for n in reversed(range(40))] == in_order[::-1]


def test_a_run_that_continues_asks_for_what_it_needs_and_nothing_before():
    asked = []

    def counted(place):
        asked.append(place)
        return problem_at(place)

    whole = list(islice(NumberedProblems(shuffled(num_problems=1000)), 805))
    position = LoopPosition(step=3, num_problems=800, outstanding=(790, 12))
    problems = NumberedProblems(ShuffledProblems(counted, num_problems=1000, seed="0"), position)
    first = list(islice(problems, 7))
    assert [number for number, _ in first] == [12, 790, 800, 801, 802, 803, 804]
    assert first == [whole[number] for number, _ in first]
    assert len(asked) == 7


def test_problems_that_are_only_an_iterator_are_drawn_again_from_the_first():
    position = LoopPosition(step=3, num_problems=8, outstanding=(5, 2))
    problems = NumberedProblems(iter([problem_at(i) for i in range(20)]), position)
    assert [number for number, _ in islice(problems, 4)] == [2, 5, 8, 9]
    assert problems.num_drawn == 10


@pytest.mark.parametrize("random_access", [True, False])
def test_what_was_outstanding_and_has_had_no_turn_is_outstanding_at_the_next_position_too(random_access):
    def drawn_again():
        return ShuffledProblems(problem_at, num_problems=50, seed="0") if random_access else listed()

    def listed():
        return iter([problem_at(i) for i in range(50)])

    # Four were under way; continued with places for two.
    problems = NumberedProblems(
        drawn_again(), LoopPosition(step=1, num_problems=20, outstanding=(3, 5, 6, 9))
    )
    assert [number for number, _ in islice(problems, 2)] == [3, 5]
    position = problems.position(2, outstanding=(5,))
    assert position == LoopPosition(step=2, num_problems=20, outstanding=(5, 6, 9))
    again = NumberedProblems(drawn_again(), position)
    assert [number for number, _ in islice(again, 5)] == [5, 6, 9, 20, 21]
    assert again.position(3, outstanding=()) == LoopPosition(step=3, num_problems=22, outstanding=())
