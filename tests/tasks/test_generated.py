import pickle
import random
from dataclasses import dataclass
from itertools import combinations, islice

import pytest

from rl.tasks.generated import HELD_OUT_SHARE, GeneratedTask
from rl.types import Problem, Rollout
from tests.support.tasks import demonstrated_scores, ids, played, scored


class Doubled(GeneratedTask):
    """Twice a number."""

    @dataclass(kw_only=True, slots=True)
    class Config(GeneratedTask.Config):
        largest: int = 999

    config: Config

    def draw(self, generator: random.Random) -> Problem:
        number = generator.randint(0, self.config.largest)
        return Problem(
            id=f"doubled/{number}",
            question=str(number),
            answer=str(2 * number),
            demonstration=str(2 * number),
        )

    def reward(self, rollout: Rollout) -> float:
        answer = rollout.prompt.problem.answer
        return 1.0 if rollout.text == answer else 0.25 * rollout.text.isdigit()


class Paired(Doubled):
    """On the same side of the split as its neighbour."""

    def split_key(self, problem: Problem) -> str:
        return str(int(problem.question) // 2)


def held_out(task):
    (problems,) = task.eval_sets().values()
    return {p.question for p in problems}


def test_a_config_builds_the_task_and_its_replies_earn_what_it_says():
    task = Doubled.Config().build()
    problem = Problem(id="doubled/21", question="21", answer="42")
    assert [scored(task, problem, text).reward for text in ("42", "7", "x")] == [1.0, 0.25, 0.0]
    assert [scored(task, problem, text).correct for text in ("42", "7", "x")] == [True, False, False]
    assert scored(task, problem, "7").parts == {"answer": 0.25}


def test_every_demonstration_is_right_where_a_task_says_nothing_else():
    assert {s.reward for _, s in demonstrated_scores(Doubled.Config().build())} == {1.0}


def test_training_and_warm_up_see_all_problems_but_the_held_out():
    task = Doubled.Config(num_eval=100).build()
    trained = {p.question for p in islice(task.train_problems(seed=0), 10_000)}
    warmed_up = {p.question for p in islice(task.warmup_problems(seed=0), 10_000)}
    kept = {
        q
        for q in map(str, range(1000))
        if not task.is_held_out(Problem(id=f"doubled/{q}", question=q, answer=""))
    }
    assert trained == warmed_up == kept
    assert len(held_out(task)) == 100
    assert not held_out(task) & kept
    # 150 are expected, with a standard deviation of 11.
    assert 1 - len(kept) / 1000 == pytest.approx(HELD_OUT_SHARE, abs=0.05)


def test_problems_of_one_key_are_on_the_same_side_of_the_split():
    task = Paired.Config(num_eval=60).build()
    out = {int(q) for q in held_out(task)}
    trained = {int(p.question) for p in islice(task.train_problems(seed=0), 10_000)}
    assert not {n ^ 1 for n in out} & trained  # its neighbour
    assert {n ^ 1 for n in trained} == trained


def test_problems_are_the_same_for_a_seed_and_differ_between_seeds_and_from_the_warm_up():
    task, again = Doubled.Config(num_eval=50).build(), Doubled.Config(num_eval=50).build()
    assert ids(task, seed=1) == ids(again, seed=1)
    assert ids(task, seed=1) != ids(task, seed=2)
    assert ids(task, seed=1) != [p.id for p in islice(task.warmup_problems(seed=1), 100)]
    assert task.eval_sets() == again.eval_sets()


def test_more_held_out_problems_begin_with_the_fewer():
    (few,), (more,) = (Doubled.Config(num_eval=n).build().eval_sets().values() for n in (10, 20))
    assert few == more[:10]


def test_too_few_held_out_problems_are_an_error_with_both_numbers():
    task = Doubled.Config(largest=20, num_eval=12).build()
    num = sum(task.is_held_out(Problem(id=f"doubled/{n}", question="", answer="")) for n in range(21))
    assert num < 12
    with pytest.raises(ValueError, match=f"num_eval=12: only {num} held-out problems were found"):
        task.eval_sets()


@pytest.mark.parametrize("kind", ["train_problems", "warmup_problems"])
def test_a_task_all_of_whose_problems_are_held_out_ends_with_an_error(kind):
    # All have one key; which one is held out is a matter of its hash.
    class OneKey(Doubled):
        def split_key(self, problem: Problem) -> str:
            return held_out_key

    def is_held_out(key: str) -> bool:
        return Doubled.Config().build().is_held_out(Problem(id=key, question="", answer=""))

    held_out_key = next(f"key {n}" for n in range(100) if is_held_out(f"key {n}"))
    problems = getattr(OneKey.Config().build(), kind)(seed=0)
    with pytest.raises(ValueError, match="problems in a row are held out"):
        next(problems)


def test_no_held_out_problems_are_refused():
    with pytest.raises(ValueError, match="num_eval=0 is less than 1"):
        Doubled.Config(num_eval=0)


def tosses(*, seed=0, text="42", version=0, number=21):
    """The noise of 256 samples of a problem."""
    rubric = pickle.loads(pickle.dumps(Doubled.Config(reward="noise").build().rubric(seed=seed)))
    problem = Problem(id=f"doubled/{number}", question="", answer="42")
    (turn,) = played(Doubled.Config().build(), problem, text).turns
    turn.completion.policy_versions[:] = version
    prompt = played(Doubled.Config().build(), problem, text).prompt
    rollouts = [Rollout(prompt=prompt, sample=i, turns=(turn,)) for i in range(256)]
    return [rubric.score(r).reward for r in rollouts]


def test_noise_tosses_a_fair_coin_that_does_not_see_the_reply():
    drawn = [tosses(), tosses(seed=1), tosses(version=1), tosses(number=22)]
    assert tosses(text="no") == drawn[0]
    assert {t for of_one in drawn for t in of_one} == {0.0, 1.0}
    # Of 256 fair tosses 128 are heads and 128 agree with other ones; 48 are six standard deviations.
    assert all(abs(sum(t) - 128) < 48 for t in drawn)
    for a, b in combinations(drawn, 2):
        assert abs(sum(x == y for x, y in zip(a, b, strict=True)) - 128) < 48


def test_noise_does_not_change_what_is_correct():
    task = Doubled.Config(reward="noise").build()
    problem = Problem(id="doubled/21", question="21", answer="42")
    scores = [scored(task, problem, text) for text in ("42", "7")]
    assert [s.correct for s in scores] == [True, False]
    assert [set(s.parts) for s in scores] == [{"noise"}, {"noise"}]
