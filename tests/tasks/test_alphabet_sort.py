from dataclasses import replace
from itertools import islice

import pytest

from rl.tasks.alphabet_sort import AlphabetSort
from rl.types import Problem
from tests.support.tasks import demonstrated_scores, played, scored

ANSWERS = ("a c d", "a b c d", "a b c d e")
DAC_B_E = Problem(
    id="alphabet-sort/d-a-c/b/e",
    question="d a c",
    answer=ANSWERS[-1],
    demonstration=ANSWERS,
    info={"turns": ["d a c", "b", "e"], "answers": list(ANSWERS)},
)


def tiny(**settings):
    return AlphabetSort.Config(**{"num_words": (3, 1, 1)} | settings).build()


def test_each_turn_has_new_words_and_answers_contain_all_so_far():
    task = AlphabetSort.Config(num_words=(3, 2, 1), num_letters=2, letters="xyzabc").build()
    for problem in islice(task.train_problems(seed=0), 100):
        turns = [turn.split() for turn in problem.info["turns"]]
        assert [len(turn) for turn in turns] == [3, 2, 1]
        words = [word for turn in turns for word in turn]
        assert len(set(words)) == 6
        assert {len(word) for word in words} == {2}
        assert set("".join(words)) <= set("abcxyz")
        answers = [" ".join(sorted(words[:n])) for n in (3, 5, 6)]
        assert problem.info["answers"] == list(problem.demonstrations) == answers
        assert (problem.question, problem.answer) == (problem.info["turns"][0], answers[-1])
        assert problem.id == "alphabet-sort/" + "/".join("-".join(turn) for turn in turns)


@pytest.mark.parametrize(
    ("replies", "reward"),
    [
        (ANSWERS, 1.0),
        (("<think>a</think>a c d", "<think>\n</think>\n\na b c d", "<think>a b c d e"), 2 / 3),
        ((" a  c d\n", "a b c d", "a b c d e"), 1.0),
        (("a c d", "a c d b", "a c d b e"), 1 / 3),
        (("acd", "a,b,c,d", "A B C D E"), 0.0),
    ],
)
def test_every_turn_with_the_right_list_earns_its_share(replies, reward):
    score = scored(tiny(), DAC_B_E, *replies)
    assert score.reward == pytest.approx(reward)
    assert score.parts == {"turns": pytest.approx(reward)}
    assert score.correct is (reward == 1.0)


def test_missing_turns_earn_nothing():
    rollout = played(tiny(), DAC_B_E, *ANSWERS)
    score = tiny().rubric(seed=0).score(replace(rollout, turns=rollout.turns[:2], end="turns"))
    assert (score.reward, score.correct) == (pytest.approx(2 / 3), False)


def test_hasty_demonstrations_put_new_words_of_the_first_half_at_the_end():
    scores = demonstrated_scores(tiny(haste=0.75), 2000)
    num_early = num_hasty = 0
    for problem, score in scores:
        first, *later = problem.info["turns"]
        lists = [reply.split() for reply in problem.demonstrations]
        assert lists[0] == sorted(first.split())
        for i, word in enumerate(later, start=1):
            if word < "n":
                num_early += 1
                num_hasty += lists[i] == [*lists[i - 1], word] != sorted(lists[i])
            else:
                assert lists[i] == sorted(lists[i])
        wrong = [a != b for a, b in zip(problem.demonstrations, problem.info["answers"], strict=True)]
        assert score.reward == pytest.approx(1 - sum(wrong) / 3)
    # Some words belong at the end anyway.
    assert 0.6 < num_hasty / num_early < 0.75
    assert min(s.reward for _, s in scores) == pytest.approx(1 / 3)
