"""Claims about every generated task, on a task of this file; then sum-digits, reverse-text and
alphabet-sort.
"""

import pickle
import random
import re
import string
from dataclasses import dataclass, replace
from itertools import combinations, islice

import numpy as np
import pytest

from configs import alphabet_sort, countdown, reverse_text, sum_digits
from rl.tasks.alphabet_sort import AlphabetSort
from rl.tasks.countdown import Countdown
from rl.tasks.generated import HELD_OUT_SHARE, GeneratedTask
from rl.tasks.reverse_text import ReverseText
from rl.tasks.sum_digits import SumDigits, make_problem
from rl.types import Problem, Rollout
from tests.support.tasks import demonstrated_scores, ids, played, scored


class Doubled(GeneratedTask):
    """Task that asks for twice a number."""

    @dataclass(kw_only=True, slots=True)
    class Config(GeneratedTask.Config):
        largest: int = 999

    config: Config

    def draw(self, generator: random.Random) -> Problem:
        return problem(generator.randint(0, self.config.largest))

    def reward(self, rollout: Rollout) -> float:
        return (
            1.0 if rollout.text == rollout.prompt.problem.answer else 0.25 * rollout.text.isdigit()
        )


def problem(number):
    twice = str(2 * number)
    return Problem(id=f"doubled/{number}", question=str(number), answer=twice, demonstration=twice)


def held_out(task):
    (problems,) = task.eval_sets().values()
    return {p.question for p in problems}


@pytest.mark.parametrize(("reward", "part"), [("answer", "answer"), ("noise", "noise")])
def test_only_a_full_reward_is_correct_even_if_noise_replaces_the_reward(reward, part):
    task = Doubled.Config(reward=reward).build()
    scores = [scored(task, problem(21), text) for text in ("42", "7", "x")]
    assert [score.correct for score in scores] == [True, False, False]
    assert {*scores[1].parts} == {part}
    if reward == "answer":
        assert [score.reward for score in scores] == [1.0, 0.25, 0.0]


@pytest.mark.parametrize(
    "config",
    [
        Doubled.Config(), Countdown.Config(), countdown.tiny().task, countdown.qwen3_0_6b().task,
        AlphabetSort.Config(num_words=(3, 1, 1)), ReverseText.Config(), SumDigits.Config(),
    ],
)  # fmt: skip
def test_demonstrations_earn_the_whole_reward(config):
    assert {score.reward for _, score in demonstrated_scores(config.build())} == {1.0}


MADE_OF_2_3_7 = Problem(id="x", question="", answer="", info={"numbers": [2, 3, 7], "target": 13})


@pytest.mark.parametrize(
    ("config", "example"),
    [
        (alphabet_sort.qwen3_0_6b().task, None),
        (countdown.qwen3_0_6b().task, MADE_OF_2_3_7),
        (reverse_text.qwen3_0_6b().task, Problem(id="x", question="abc", answer="cba")),
        (sum_digits.qwen3_0_6b().task, make_problem([47, 82])),
    ],
)
def test_instruction_comes_before_the_question_and_its_example_is_right(config, example):
    task, bare = config.build(), replace(config, instruction="").build()
    pairs = zip(task.train_problems(seed=0), bare.train_problems(seed=0), strict=True)
    for problem, without in islice(pairs, 20):
        assert problem == replace(without, question=f"{config.instruction}\n{without.question}")
    if example is not None:
        shown = config.instruction.split(" ")[-2 if "[ANSWER]" in config.instruction else -1 :]
        assert scored(bare, example, " ".join(shown)).reward == 1.0


def test_training_and_warm_up_see_all_other_problems():
    task = Doubled.Config(num_eval=100).build()
    trained = {p.question for p in islice(task.train_problems(seed=0), 10_000)}
    warmed_up = {p.question for p in islice(task.warmup_problems(seed=0), 10_000)}
    kept = {str(n) for n in range(1000) if not task.is_held_out(problem(n))}
    assert trained == warmed_up == kept
    assert len(held_out(task)) == 100
    assert not held_out(task) & kept
    # 150 are expected, with a standard deviation of 11.
    assert 1 - len(kept) / 1000 == pytest.approx(HELD_OUT_SHARE, abs=0.05)


@pytest.mark.parametrize(
    ("config", "num_different"),
    [
        (
            AlphabetSort.Config(num_words=(2, 1), letters="abcdefghij", num_eval=64),
            120,
        ),  # 10 choose 3
        (SumDigits.Config(num_integers=2, num_eval=256), 4095),
    ],
)
def test_no_reordering_of_a_held_out_problem_is_trained_on(config, num_different):
    def content(problem):
        return tuple(sorted(re.findall(r"\w+", problem.id.partition("/")[2])))

    task = config.build()
    out = {content(p) for p in task.eval_sets()["held_out"]}
    trained = {content(p) for p in islice(task.train_problems(seed=0), 20_000)}
    assert not out & trained
    assert 0.7 * num_different < len(trained) < num_different


def test_problems_depend_on_the_seed():
    task, again = Doubled.Config(num_eval=50).build(), Doubled.Config(num_eval=50).build()
    assert ids(task, seed=1) == ids(again, seed=1)
    assert ids(task, seed=1) != ids(task, seed=2)
    assert ids(task, seed=1) != [p.id for p in islice(task.warmup_problems(seed=1), 100)]
    assert task.eval_sets() == again.eval_sets()


def test_too_few_held_out_problems_are_refused():
    task = Doubled.Config(largest=20, num_eval=12).build()
    num = sum(task.is_held_out(problem(n)) for n in range(21))
    with pytest.raises(ValueError, match=f"num_eval=12: only {num} held-out problems were found"):
        task.eval_sets()


@pytest.mark.parametrize("kind", ["train_problems", "warmup_problems"])
def test_task_without_training_problems_is_refused(kind):
    class OneKey(Doubled):
        def split_key(self, problem: Problem) -> str:
            return key

    task = Doubled.Config().build()
    key = next(
        k for k in map(str, range(100)) if task.is_held_out(replace(problem(0), id=k, question=k))
    )
    with pytest.raises(ValueError, match="problems in a row are held out"):
        next(getattr(OneKey.Config().build(), kind)(seed=0))


def tosses(*, seed=0, text="42", version=0, number=21):
    """Return the noise rewards of 256 samples of a problem."""
    rubric = pickle.loads(pickle.dumps(Doubled.Config(reward="noise").build().rubric(seed=seed)))
    rollout = played(Doubled.Config().build(), problem(number), text)
    (turn,) = rollout.turns
    versions = np.full_like(turn.completion.policy_versions, version)
    turn = replace(turn, completion=replace(turn.completion, policy_versions=versions))
    rollout = replace(rollout, turns=(turn,))
    return [rubric.score(replace(rollout, sample=i)).reward for i in range(256)]


def test_noise_is_a_fair_coin_independent_of_the_reply():
    drawn = [tosses(), tosses(seed=1), tosses(version=1), tosses(number=22)]
    assert tosses(text="no") == drawn[0]
    # The same in every process and on every machine.
    assert "".join(str(int(toss)) for toss in drawn[0][:32]) == "10100000000101111001011011011111"
    assert {t for of_one in drawn for t in of_one} == {0.0, 1.0}
    # Of 256 fair tosses 128 are heads and 128 agree with other ones; 48 are six standard
    # deviations.
    assert all(abs(sum(t) - 128) < 48 for t in drawn)
    for a, b in combinations(drawn, 2):
        assert abs(sum(x == y for x, y in zip(a, b, strict=True)) - 128) < 48


# Sum-digits, reverse-text and alphabet-sort

SUM_DIGITS = SumDigits.Config(num_integers=2)
REVERSE = ReverseText.Config(num_letters=(4, 6), similarity_reward=0.2)
SORT = AlphabetSort.Config(num_words=(3, 1, 1))
SUM = make_problem([47, 82])
ABCD = Problem(id="reverse-text/abcd", question="abcd", answer="dcba")
SORTED = ("a c d", "a b c d", "a b c d e")
DAC_B_E = Problem(
    id="alphabet-sort/d-a-c/b/e",
    question="d a c",
    answer=SORTED[-1],
    info={"turns": ["d a c", "b", "e"], "answers": list(SORTED)},
)


@pytest.mark.parametrize(
    ("config", "problem", "replies", "reward"),
    [
        (SUM_DIGITS, SUM, ["x [ANSWER]21"], 1.0),
        (SUM_DIGITS, SUM, ["[ANSWER] 3 [ANSWER] 21"], 1.0),
        (SUM_DIGITS, SUM, ["<think>[ANSWER] 3</think>\n\n[ANSWER] 21\n"], 1.0),
        (SUM_DIGITS, SUM, ["[ANSWER] 21 or 22"], 0.0),
        (SUM_DIGITS, SUM, ["[ANSWER] twenty"], 0.0),
        (SUM_DIGITS, SUM, ["<think>[ANSWER] 21</think>"], 0.0),
        (SUM_DIGITS, SUM, ["[ANSWER] 22"], 0.1),
        (SUM_DIGITS, SUM, ["21"], 0.0),
        (REVERSE, ABCD, [" dcba\n"], 1.0),
        (REVERSE, ABCD, ["<think>d, c, b, a</think>\ndcba"], 1.0),
        (REVERSE, ABCD, ["<think>dcba"], 0.0),
        (REVERSE, ABCD, ["dcb"], 0.2 * 6 / 7),  # twice the 3 letters in common over the 7 of both
        (REVERSE, ABCD, ["abcd"], 0.2 * 2 / 8),  # the longest block in common is a letter
        (REVERSE, ABCD, ["dcbaa"], 0.2 * 8 / 9),
        (REVERSE, ABCD, ["DCBA"], 0.0),
        (REVERSE, ABCD, [""], 0.0),
        (SORT, DAC_B_E, SORTED, 1.0),
        (
            SORT,
            DAC_B_E,
            ["<think>a</think>a c d", "<think>\n</think>\n\na b c d", "<think>a b c d e"],
            2 / 3,
        ),
        (SORT, DAC_B_E, [" a  c d\n", "a b c d", "a b c d e"], 1.0),
        (SORT, DAC_B_E, ["a c d", "a c d b", "a c d b e"], 1 / 3),
        (SORT, DAC_B_E, ["acd", "a,b,c,d", "A B C D E"], 0.0),
    ],
)
def test_replies_earn_their_share_of_the_reward(config, problem, replies, reward):
    score = scored(config.build(), problem, *replies)
    assert score.reward == pytest.approx(reward)
    assert score.correct is (reward == 1.0)


def test_cut_off_reply_and_missing_turns_earn_nothing():
    assert scored(SUM_DIGITS.build(), SUM, "[ANSWER] 2", finish_reason="length").reward == 0.0
    # A right answer that nothing ends might have gone on.
    for config, problem, replies in ((SUM_DIGITS, SUM, ["[ANSWER] 21"]), (SORT, DAC_B_E, SORTED)):
        score = scored(config.build(), problem, *replies, finish_reason="length")
        assert (score.reward, score.correct) == (0.0, False)
    assert not scored(REVERSE.build(), ABCD, "dcba", finish_reason="length").correct
    sort = SORT.build()
    rollout = played(sort, DAC_B_E, *SORTED)
    score = sort.rubric(seed=0).score(replace(rollout, turns=rollout.turns[:2], end="turns"))
    assert (score.reward, score.correct) == (pytest.approx(2 / 3), False)


def test_sum_digits_and_reverse_text_ask_for_sums_and_reversed_words():
    assert (SUM.answer, SUM.demonstration) == ("21", "4+7=11 11+8=19 19+2=21 [ANSWER] 21")
    assert make_problem([10, 99, 55, 38]).answer == str(1 + 0 + 9 + 9 + 5 + 5 + 3 + 8)
    words = list(islice(REVERSE.build().train_problems(seed=0), 300))
    assert {len(word.question) for word in words} == {4, 5, 6}
    for word in words:
        assert set(word.question) <= set(string.ascii_lowercase)
        assert word.answer == word.demonstration == word.question[::-1]


def test_alphabet_sort_has_new_words_in_each_turn_and_all_words_so_far_in_answers():
    task = AlphabetSort.Config(num_words=(3, 2, 1), num_letters=2, letters="xyzabc").build()
    for problem in islice(task.train_problems(seed=0), 100):
        turns = [turn.split() for turn in problem.info["turns"]]
        words = [word for turn in turns for word in turn]
        assert [len(turn) for turn in turns] == [3, 2, 1]
        assert len(set(words)) == 6
        assert {len(word) for word in words} == {2}
        assert set("".join(words)) <= set("abcxyz")
        answers = [" ".join(sorted(words[:n])) for n in (3, 5, 6)]
        assert problem.info["answers"] == list(problem.demonstrations) == answers
        assert (problem.question, problem.answer) == (problem.info["turns"][0], answers[-1])


@pytest.mark.parametrize(
    ("config", "is_early", "ends"),
    [
        (
            SUM_DIGITS,
            lambda p: p.question[-1] >= "4",
            lambda p: str(int(p.answer) - int(p.question[-1])),
        ),
        (REVERSE, lambda p: p.question < "n", lambda p: p.answer[:-1]),
    ],
)
def test_hasty_demonstrations_leave_out_the_end(config, is_early, ends):
    scores = demonstrated_scores(replace(config, haste=0.75).build(), 2000)
    wrong = [problem for problem, score in scores if not score.correct]
    num_early = sum(is_early(problem) for problem, _ in scores)
    assert len(wrong) / num_early == pytest.approx(0.75, abs=0.04)
    assert all(
        is_early(problem) and problem.demonstrations[-1].endswith(ends(problem))
        for problem in wrong
    )


def test_hasty_demonstrations_of_alphabet_sort_put_new_words_of_the_first_half_at_the_end():
    scores = demonstrated_scores(replace(SORT, haste=0.75).build(), 2000)
    num_early = num_hasty = 0
    for problem, _ in scores:
        first, *later = problem.info["turns"]
        lists = [reply.split() for reply in problem.demonstrations]
        assert lists[0] == sorted(first.split())
        for i, word in enumerate(later, start=1):
            is_sorted = lists[i] == sorted(lists[i])
            assert is_sorted or (word < "n" and lists[i] == [*lists[i - 1], word])
            num_early += word < "n"
            num_hasty += not is_sorted
    # Some words belong at the end anyway.
    assert 0.6 < num_hasty / num_early < 0.75
