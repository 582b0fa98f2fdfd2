import dataclasses
from itertools import combinations, islice
from pathlib import Path

import numpy as np
import pytest

from configs import sum_digits
from rl.models.tokenizer import build_byte_tokenizer
from rl.rollouts.renderer import RendererConfig, TemplateRenderer, make_renderer
from rl.rollouts.tokenizer import open_tokenizer
from rl.tasks.sum_digits import SumDigits, make_problem, parse_answer
from rl.types import Problem, Rollout
from tests.support.fakes import completion, prompt_of, rollout_of


def rollout(
    text: str, *, finish_reason: str = "stop", sample: int = 0, version: int = 0, problem: int = 82
) -> Rollout:
    """A reply to 47 and `problem`."""
    prompt = prompt_of(make_problem([47, problem]))
    return rollout_of(prompt, completion(text, version, finish_reason=finish_reason), sample=sample)


def held_out_problems(task: SumDigits) -> list[Problem]:
    return task.eval_sets()["held_out"]


def test_answer_is_the_sum_of_all_digits():
    assert make_problem([47, 82]).answer == "21"
    assert make_problem([10, 99, 55, 38]).answer == str(1 + 0 + 9 + 9 + 5 + 5 + 3 + 8)


def test_demonstration_ends_in_the_right_answer():
    problem = make_problem([47, 82])
    assert problem.demonstration == "4+7=11 11+8=19 19+2=21 [ANSWER] 21"
    assert parse_answer(problem.demonstration) == problem.answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("[ANSWER] 21", "21"),
        ("x [ANSWER]21", "21"),
        ("[ANSWER] 3 [ANSWER] 21", "21"),
        ("[ANSWER] 21 or 22", None),
        ("[ANSWER] twenty", None),
        ("21", None),
        ("", None),
        ("<think>[ANSWER] 3</think>\n\n[ANSWER] 21\n", "21"),
        ("<think>perhaps [ANSWER] 21", None),
        ("<think>[ANSWER] 21</think>", None),
    ],
)
def test_parser_takes_the_digits_that_end_the_reply(text, answer):
    assert parse_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "finish_reason", "reward", "correct"),
    [
        ("[ANSWER] 21", "stop", 1.0, True),
        ("[ANSWER] 22", "stop", 0.1, False),
        ("21", "stop", 0.0, False),
        ("[ANSWER] 2", "length", 0.0, False),
    ],
)
def test_reward_is_one_for_the_answer_and_a_tenth_for_the_form(text, finish_reason, reward, correct):
    rubric = SumDigits.Config(num_integers=2).build().rubric(seed=0)
    score = rubric.score(rollout(text, finish_reason=finish_reason))
    assert score.reward == pytest.approx(reward)
    assert score.correct is correct


def tosses(*, seed: int = 0, text: str = "[ANSWER] 21", version: int = 0, problem: int = 82) -> str:
    """The noise reward of 256 samples of one prompt."""
    rubric = SumDigits.Config(num_integers=2, reward="noise").build().rubric(seed=seed)
    made = [rollout(text, sample=i, version=version, problem=problem) for i in range(256)]
    return "".join(str(int(rubric.score(r).reward)) for r in made)


def test_noise_reward_ignores_the_answer_but_correct_does_not():
    rubric = SumDigits.Config(num_integers=2, reward="noise").build().rubric(seed=0)
    assert [rubric.score(rollout(text)).correct for text in ("[ANSWER] 21", "no")] == [True, False]
    assert tosses(text="[ANSWER] 21") == tosses(text="no")


def test_noise_is_the_same_for_a_seed_on_every_machine_and_in_every_process():
    assert tosses().startswith("11100011011011000011110010100011")


def test_noise_is_fair_and_another_for_each_seed_policy_version_and_problem():
    drawn = [tosses(), tosses(seed=1), tosses(version=1), tosses(problem=83)]
    # Of 256 fair tosses 128 are heads and 128 agree with other ones; 48 are six standard deviations.
    assert all(abs(t.count("1") - 128) < 48 for t in drawn)
    for a, b in combinations(drawn, 2):
        assert abs(sum(x == y for x, y in zip(a, b, strict=True)) - 128) < 48


def test_held_out_problems_never_occur_in_training_in_any_order():
    task = SumDigits.Config(num_integers=2, num_eval=256).build()
    held_out = {tuple(sorted(p.question.split())) for p in held_out_problems(task)}
    drawn = {tuple(sorted(p.question.split())) for p in islice(task.train_problems(seed=0), 20_000)}
    assert len(held_out_problems(task)) == 256
    assert not held_out & drawn
    assert len(drawn) > 3000  # of 4095 pairs, less the held-out ones: training sees nearly all others


def test_problems_are_the_same_for_a_seed_and_differ_between_seeds():
    task = SumDigits.Config().build()

    def ids(seed: int) -> list[str]:
        return [p.id for p in islice(task.train_problems(seed=seed), 50)]

    assert ids(1) == ids(1) != ids(2)
    assert [p.id for p in held_out_problems(task)] == [
        p.id for p in held_out_problems(SumDigits.Config().build())
    ]


def test_hasty_demonstrations_leave_out_a_last_digit_of_four_or_more_and_no_other():
    task = SumDigits.Config(num_integers=2, haste=0.75).build()
    problems = list(islice(task.warmup_problems(seed=0), 2000))
    large = [p for p in problems if int(p.question[-1]) >= 4]
    wrong = [p for p in problems if parse_answer(p.demonstration) != p.answer]
    assert {p.id for p in wrong} <= {p.id for p in large}
    assert len(wrong) / len(large) == pytest.approx(0.75, abs=0.04)
    last = wrong[0]
    assert int(last.answer) - int(parse_answer(last.demonstration) or 0) == int(last.question[-1])
    assert not any(task.is_held_out(p) for p in problems)


def chat(tmp_path: Path) -> TemplateRenderer:
    build_byte_tokenizer(tmp_path)
    tokenizer, _ = open_tokenizer(tmp_path)
    return make_renderer(RendererConfig(), tokenizer=tokenizer, stop_token_ids=(tokenizer.eos_token_id,))


def test_prompt_of_the_qwen3_configs_says_the_task_and_a_reply_as_it_asks_earns_one(tmp_path):
    task = sum_digits.qwen3_0_6b().task.build()
    renderer = chat(tmp_path)
    for problem in (next(task.train_problems(seed=0)), *held_out_problems(task)[:2]):
        prompt = prompt_of(problem, renderer=renderer, max_tokens=1024)
        text = renderer.tokenizer.decode(prompt.token_ids.tolist())
        numbers = " ".join(problem.id.removeprefix("sum-digits/").split("-"))
        assert f"{task.config.instruction}\n{numbers}<|im_end|>" in text
        assert "all decimal digits" in text
        # The reply is written as the prompt's own example says it.
        form = problem.question.splitlines()[0].rpartition(": ")[2]
        assert form == "[ANSWER] 21"
        reply = f"So the sum is {problem.answer}. {form.replace('21', problem.answer)}"
        rollout = rollout_of(prompt, completion(reply), text=reply)
        assert task.rubric(seed=0).score(rollout).reward == 1.0


def test_prompt_of_tiny_is_the_bare_integers(tmp_path):
    problem = next(sum_digits.tiny().task.build().warmup_problems(seed=0))
    numbers = problem.id.removeprefix("sum-digits/").replace("-", " ")
    assert problem.question == numbers
    start, end = 257, 258
    token_ids = [start, *b"user\n", *numbers.encode(), end, *b"\n", start, *b"assistant\n"]
    np.testing.assert_array_equal(prompt_of(problem, renderer=chat(tmp_path)).token_ids, token_ids)


def test_instruction_changes_neither_the_problems_nor_their_split_nor_demonstrations():
    bare = SumDigits.Config(num_integers=2, num_eval=64, haste=0.5).build()
    told = SumDigits.Config(num_integers=2, num_eval=64, haste=0.5, instruction="Add 4 and 5.").build()

    def draw(task: SumDigits) -> list[Problem]:
        problems = [*islice(task.train_problems(seed=0), 200), *islice(task.warmup_problems(seed=0), 200)]
        return [*problems, *held_out_problems(task)]

    for a, b in zip(draw(bare), draw(told), strict=True):
        assert b.question == f"Add 4 and 5.\n{a.question}"
        assert dataclasses.replace(b, question=a.question) == a
        assert bare.is_held_out(a) is told.is_held_out(b)


def test_order_of_the_integers_does_not_change_the_split():
    task = SumDigits.Config().build()
    assert all(
        task.is_held_out(make_problem([a, b])) == task.is_held_out(make_problem([b, a]))
        for a in range(10, 100, 7)
        for b in range(10, 100, 9)
    )


@pytest.mark.parametrize("field", [{"num_integers": 5}, {"format_reward": 1.5}, {"num_eval": 0}])
def test_settings_out_of_range_are_refused(field):
    (name,) = field
    with pytest.raises(ValueError, match=name):
        SumDigits.Config(**field)
