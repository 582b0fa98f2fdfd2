import asyncio
from itertools import islice

import pytest

from configs import alphabet_sort
from rl.tasks.alphabet_sort import AlphabetSort, SortingTurns
from rl.types import Problem
from tests.support.tasks import demonstrated_scores, ids, played, scored

DAC_B_A = Problem(
    id="alphabet-sort/d-a-c/b/e",
    question="d a c",
    answer="a b c d e",
    demonstration=("a c d", "a b c d", "a b c d e"),
    info={"turns": ["d a c", "b", "e"], "answers": ["a c d", "a b c d", "a b c d e"]},
)


def tiny(**settings):
    return AlphabetSort.Config(**{"num_words": (3, 1, 1)} | settings).build()


def test_a_problem_has_new_different_words_each_turn_and_all_until_then_as_its_answers():
    task = AlphabetSort.Config(num_words=(3, 2, 1), num_letters=2).build()
    for problem in islice(task.train_problems(seed=0), 100):
        turns = [turn.split() for turn in problem.info["turns"]]
        assert [len(turn) for turn in turns] == [3, 2, 1]
        words = [word for turn in turns for word in turn]
        assert len(set(words)) == 6
        assert {len(word) for word in words} == {2}
        answers = [" ".join(sorted(words[:n])) for n in (3, 5, 6)]
        assert problem.info["answers"] == answers
        assert problem.demonstrations == tuple(answers)
        assert (problem.question, problem.answer) == (problem.info["turns"][0], answers[-1])
        assert problem.id == "alphabet-sort/" + "/".join("-".join(turn) for turn in turns)


def test_the_environment_tells_the_words_turn_by_turn_and_ends_after_the_last():
    rollout = played(tiny(), DAC_B_A, "x", "y", "z")
    told = [[m.content for m in turn.messages] for turn in rollout.turns]
    assert told == [["d a c"], ["b"], ["e"]]
    assert {m.role for turn in rollout.turns for m in turn.messages} == {"user"}
    assert rollout.turns[-1].observation.messages == ()


def test_each_environment_begins_at_the_first_turn():
    async def first_answers():
        environments = [tiny().environment(DAC_B_A) for _ in range(2)]
        return [(await e.step(played_reply)).messages[0].content for e in environments]

    (played_reply, *_) = played(tiny(), DAC_B_A, "x", "y", "z").turns
    assert asyncio.run(first_answers()) == ["b", "b"]
    assert isinstance(tiny().environment(DAC_B_A), SortingTurns)


@pytest.mark.parametrize(
    ("replies", "reward"),
    [
        (("a c d", "a b c d", "a b c d e"), 1.0),
        (("<think>a</think>a c d", "<think>\n</think>\n\na b c d", "<think>a b c d e"), 2 / 3),
        ((" a  c d\n", "a b c d", "a b c d e"), 1.0),
        (("a c d", "a c d b", "a b c d e"), 2 / 3),
        (("a c d", "a c d b", "a c d b e"), 1 / 3),
        (("a d", "b", ""), 0.0),
        (("acd", "a,b,c,d", "A B C D E"), 0.0),
    ],
)
def test_every_turn_with_the_right_list_earns_its_share(replies, reward):
    score = scored(tiny(), DAC_B_A, *replies)
    assert score.reward == pytest.approx(reward)
    assert score.parts == {"turns": pytest.approx(reward)}
    assert score.correct is (reward == 1.0)


def test_a_conversation_that_a_limit_ended_has_nothing_for_the_turns_that_are_missing():
    rollout = played(tiny(), DAC_B_A, "a c d", "a b c d", "a b c d e")
    cut = type(rollout)(prompt=rollout.prompt, sample=0, turns=rollout.turns[:2], end="turns")
    score = tiny().rubric(seed=0).score(cut)
    assert score.reward == pytest.approx(2 / 3)
    assert not score.correct


def test_noise_replaces_the_reward():
    score = scored(tiny(reward="noise"), DAC_B_A, "a c d", "a b c d", "a b c d e")
    assert set(score.parts) == {"noise"}
    assert score.correct


def test_no_words_are_both_held_out_and_trained_on_in_any_order():
    task = AlphabetSort.Config(num_words=(2, 1), letters="abcdefghij", num_eval=64).build()

    def words(problem):
        return "".join(sorted("".join(problem.info["turns"]).replace(" ", "")))

    out = {words(p) for p in task.eval_sets()["held_out"]}
    trained = {words(p) for p in islice(task.train_problems(seed=0), 10_000)}
    assert not out & trained
    assert len(out | trained) == 120  # 10 choose 3: every one is on one side


def test_problems_are_the_same_for_a_seed():
    assert ids(tiny(), seed=3) == ids(tiny(), seed=3)
    assert ids(tiny(), seed=3) != ids(tiny(), seed=4)


def test_demonstrations_earn_the_whole_reward_when_they_are_played():
    assert {s.reward for _, s in demonstrated_scores(tiny())} == {1.0}


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


def test_an_instruction_is_said_before_the_first_words_alone():
    task = alphabet_sort.qwen3_0_6b().task.build()
    problem = next(task.train_problems(seed=0))
    assert problem.question == f"{task.config.instruction}\n{problem.info['turns'][0]}"
    assert scored(task, problem, *problem.demonstrations).reward == 1.0
    told = [m.content for turn in played(task, problem, "", "", "").turns for m in turn.messages]
    assert told == [problem.question, *problem.info["turns"][1:]]


def test_letters_are_those_that_words_are_made_of():
    problems = islice(AlphabetSort.Config(letters="xyzabc").build().train_problems(seed=0), 100)
    assert {letter for p in problems for letter in p.answer.replace(" ", "")} == set("abcxyz")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_words", ()),
        ("num_words", (3, 0)),
        ("num_letters", 0),
        ("letters", "aab"),
        ("letters", "a1"),
        ("letters", "abcd"),  # five words of one letter are asked for
        ("haste", 1.5),
        ("num_eval", 0),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        AlphabetSort.Config(**{field: value})


def test_a_task_of_a_single_set_of_words_is_refused_by_what_it_lacks():
    task = AlphabetSort.Config(num_words=(2,), letters="ab", num_eval=1).build()
    lacks = "problems in a row are held out|only 0 held-out problems"
    with pytest.raises(ValueError, match=lacks):
        (task.eval_sets(), next(task.train_problems(seed=0)))
