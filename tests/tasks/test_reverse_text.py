from itertools import islice

import pytest

from configs import reverse_text
from rl.tasks.reverse_text import ReverseText
from rl.types import Problem
from tests.support.tasks import demonstrated_scores, ids, scored

ABCD = Problem(id="reverse-text/abcd", question="abcd", answer="dcba")


def test_a_problem_asks_for_a_word_of_lower_case_letters_from_the_end():
    task = ReverseText.Config(num_letters=(4, 6)).build()
    problems = list(islice(task.train_problems(seed=0), 300))
    assert {len(p.question) for p in problems} == {4, 5, 6}
    for problem in problems:
        assert problem.question.islower()
        assert problem.answer == problem.demonstration == "".join(reversed(problem.question))
        assert problem.id == f"reverse-text/{problem.question}"


@pytest.mark.parametrize(
    ("text", "similarity", "correct"),
    [
        ("dcba", 1.0, True),
        (" dcba\n", 1.0, True),
        ("<think>d, c, b, a</think>\ndcba", 1.0, True),
        ("<think>dcba", 0.0, False),
        # Twice the 3 letters in common over the 7 of both.
        ("dcb", 6 / 7, False),
        # The longest block in common is a letter.
        ("abcd", 2 / 8, False),
        ("dcbaa", 8 / 9, False),
        ("DCBA", 0.0, False),
        ("", 0.0, False),
        ("dc ba", 8 / 9, False),
    ],
)
def test_a_fifth_of_the_reward_is_for_resemblance(text, similarity, correct):
    score = scored(ReverseText.Config().build(), ABCD, text)
    assert score.parts == {"answer": float(correct), "similarity": pytest.approx(similarity)}
    assert score.reward == pytest.approx(0.8 * correct + 0.2 * similarity)
    assert score.correct is correct


def test_the_share_of_resemblance_can_be_set():
    assert scored(ReverseText.Config(similarity_reward=0.0).build(), ABCD, "dcb").reward == 0.0
    half = scored(ReverseText.Config(similarity_reward=0.5).build(), ABCD, "dcb")
    assert half.reward == pytest.approx(3 / 7)


def test_noise_replaces_both_parts_of_the_reward():
    score = scored(ReverseText.Config(reward="noise").build(), ABCD, "dcba")
    assert set(score.parts) == {"noise"}
    assert score.correct


def test_no_word_is_both_held_out_and_trained_on():
    # 676 words, so that both sides are seen whole.
    task = ReverseText.Config(num_letters=(2, 2), num_eval=64).build()
    out = {p.question for p in task.eval_sets()["held_out"]}
    trained = {p.question for p in islice(task.train_problems(seed=0), 10_000)}
    assert len(out) == 64
    assert len(trained) > 500
    assert not out & trained


def test_problems_are_the_same_for_a_seed():
    assert ids(ReverseText.Config().build(), seed=3) == ids(ReverseText.Config().build(), seed=3)
    assert ids(ReverseText.Config().build(), seed=3) != ids(ReverseText.Config().build(), seed=4)


def test_demonstrations_earn_the_whole_reward():
    assert {s.reward for _, s in demonstrated_scores(ReverseText.Config().build())} == {1.0}


def test_hasty_demonstrations_leave_out_the_last_letter_of_words_of_the_first_half():
    scores = demonstrated_scores(ReverseText.Config(haste=0.75).build(), 2000)
    early = [(p, s) for p, s in scores if p.question < "n"]
    late = [(p, s) for p, s in scores if p.question >= "n"]
    assert {s.reward for _, s in late} == {1.0}
    hasty = [(p, s) for p, s in early if not s.correct]
    assert len(hasty) / len(early) == pytest.approx(0.75, abs=0.04)
    assert {p.demonstration for p, _ in hasty} == {p.answer[:-1] for p, _ in hasty}
    assert all(s.reward < 0.2 for _, s in hasty)


def test_an_instruction_is_said_before_the_word_and_changes_nothing_else():
    bare = ReverseText.Config(num_letters=(8, 24)).build()
    told = reverse_text.qwen3_0_6b().task.build()
    for a, b in zip(
        islice(bare.train_problems(seed=0), 20), islice(told.train_problems(seed=0), 20), strict=True
    ):
        assert b.question == f"{told.config.instruction}\n{a.question}"
        assert (a.id, a.answer) == (b.id, b.answer)
    # The form that the instruction's own example shows is the one that is right.
    example, shown = told.config.instruction.rpartition("for ")[2].split(" write: ")
    assert scored(bare, Problem(id="x", question=example, answer=example[::-1]), shown).reward == 1.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_letters", (5, 4)),
        ("num_letters", (1, 4)),
        ("similarity_reward", 1.5),
        ("haste", -0.1),
        ("num_eval", 0),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        ReverseText.Config(**{field: value})
