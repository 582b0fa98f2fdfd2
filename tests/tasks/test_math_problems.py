import json
import threading
from itertools import islice
from pathlib import Path

import pytest

from configs import gsm8k
from examples.data import make_tiny_math
from rl.rollouts.rubric import UnparsedAnswer
from rl.tasks.math_problems import AnswerInPlace, MathAnswer, MathProblems, compare_answers
from rl.tasks.task import Solved, find_answer
from rl.types import Problem
from tests.support.scored import reply

GSM8K = [
    {
        "question": f"Ann has {n} eggs and gets 1,000 more. How many?",
        "answer": f"{n}+1000\n#### {n + 1000:,}",
    }
    for n in range(60)
]
MATH = [
    {"question": f"Halve {n}.", "answer": f"So \\boxed{{\\frac{{{n}}}{{2}}}}."} for n in range(60)
]


@pytest.fixture
def build(tmp_path):
    def _build(rows, **options):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = (str(tmp_path / "rows.jsonl"),)
        options = {"held_out": 0.2, "cache_folder": str(tmp_path / "cache"), **options}
        return MathProblems.Config(train_files=files, **options).build()

    return _build


@pytest.mark.parametrize(
    ("rows", "gold", "answers"),
    [
        (GSM8K, "hashes", {f"{n + 1000:,}" for n in range(60)}),
        (MATH, "boxed", {f"\\frac{{{n}}}{{2}}" for n in range(60)}),
    ],
)
def test_gold_stands_in_its_place(build, rows, gold, answers):
    task = build(rows, gold=gold)
    assert {p.answer for p in islice(task.train_problems(seed=0), len(task._train))} <= answers


@pytest.mark.parametrize(
    ("text", "place", "answer"),
    [
        ("a #### 3\n#### 4\nbye", "hashes", "4"),
        ("no mark: 4", "hashes", None),
        ("4 ####  ", "hashes", None),
        (r"\boxed{1} then \boxed{\frac{1}{2}}!", "boxed", r"\frac{1}{2}"),
        (r"cut off \boxed{\frac{1}{2}", "boxed", None),
        (r"\boxed{ }", "boxed", None),
        ("so 4", "whole", "so 4"),
        ("<answer>3</answer> or <answer> 4\n</answer>", "tags", "4"),
        ("<answer>3", "tags", None),
        ("thinking\n 4 \n\n", "last_line", "4"),
        ("3 + 4 = 7, so -7.50.", "last_number", "-7.50"),
        ("The total is 1,000.", "last_number", "1000"),
        ("So x = \u22125", "last_number", "-5"),
        ("p = .5", "last_number", "0.5"),
        ("none", "last_number", None),
        ("<think>3, no, 4</think>\n\n4\n", "whole", "4"),
        ("<think>\n4", "whole", None),
        ("it was opened in the prompt</think>4", "whole", "4"),
        ("<think>a</think>3<think>b</think> 4 ", "whole", "4"),
        ("<think>\n\n</think>\n\n", "whole", None),
        (r"<think>\boxed{3}</think>\boxed{4}", "boxed", "4"),
        ("<think><answer>4</answer></think>I do not know", "tags", None),
    ],
)
def test_answer_is_only_found_in_its_place(text, place, answer):
    assert find_answer(text, place) == answer


@pytest.mark.parametrize(
    ("text", "place", "answer"),
    [
        ("#### 12", "hashes", None),
        ("#### 12\n", "hashes", "12"),
        ("#### 12\nThat", "hashes", "12"),
        (r"so \boxed{12}", "boxed", "12"),
        (r"\boxed{5}, no, \boxed {6}", "boxed", "6"),
        (r"so \boxed{12", "boxed", None),
        ("<answer>12</answer>", "tags", "12"),
        ("<answer>12", "tags", None),
        ("so\n12", "last_line", None),
        ("so it is 12", "last_number", None),
        ("so it is 12, because", "last_number", "12"),
        ("12", "whole", None),
    ],
)
def test_answer_that_nothing_ends_is_none_in_a_reply_that_was_cut_off(text, place, answer):
    assert find_answer(text, place, is_cut_off=True) == answer


@pytest.mark.parametrize(
    ("gold", "answer", "place", "same"),
    [
        ("-5", "\u22125", "boxed", True),
        ("5", "It is \u22125", "whole", False),
        ("-5", "\u20135", "boxed", True),
        ("1000", r"1\,000", "boxed", True),
        ("1,000", "1e3", "boxed", True),
        ("1,2", "1.2", "boxed", False),
        ("5", "\u0665", "boxed", True),
        ("1,060", "1060", "boxed", True),
        ("72", "72.0", "boxed", True),
        (r"\frac{1}{2}", "0.5", "boxed", True),
        (r"\frac{1}{2}", "2/4", "boxed", True),
        ("x^2-1", "(x-1)(x+1)", "boxed", True),
        ("72", "73", "boxed", False),
        ("18", "18 dollars.", "hashes", True),
        ("18", r"\$18", "boxed", True),
        ("72", "It is $72$.", "whole", True),
        ("72", r"\frac{1", "boxed", None),
        ("72", "?", "hashes", None),
        *(
            ("5", several, "hashes", False)
            for several in ("1, 2, 3, 4, 5", "6 or 5", "5!", r"\pm 5", "x > 5", "5^x")
        ),
        ("5", "5\u00b2", "hashes", False),
        ("25", "5\u00b2", "hashes", True),
        ("5\u00b2", "25", "boxed", True),
        ("5\u00b2", "5", "boxed", False),
        ("3.5", "3\u00bd", "hashes", True),
        ("0.5", r"\frac{1}{2} cups", "hashes", True),
    ],
)
def test_answers_are_compared_by_meaning(gold, answer, place, same):
    assert compare_answers(gold, answer, place) is same


def problem(gold="72"):
    return Problem(id="rows.jsonl:1", question="8 * 9?", answer=gold)


def test_part_of_the_reward_can_be_for_the_form(build):
    assert build(GSM8K).rubric(seed=0).score(reply(problem(), r"\boxed{8}")).reward == 0.0
    rubric = build(GSM8K, format_reward=0.2).rubric(seed=0)
    assert rubric.score(reply(problem(), r"\boxed{72}")).reward == pytest.approx(1.0)
    assert rubric.score(reply(problem(), r"\boxed{8}")).reward == pytest.approx(0.2)
    cut_off = reply(problem(), r"\boxed{8} and", finish_reason="length")
    assert AnswerInPlace(place="boxed")(cut_off) == 0.0


def test_cut_off_answer_is_unparsed():
    grade = MathAnswer(place="hashes")
    assert grade(reply(problem(), "#### 72")) == 1.0
    with pytest.raises(UnparsedAnswer, match="no complete answer"):
        grade(reply(problem(), "#### 72", finish_reason="length"))


@pytest.mark.parametrize("text", ["72", r"\boxed{", r"\boxed{\frac{}", ""])
def test_reply_without_an_answer_is_unparsed(text):
    with pytest.raises(UnparsedAnswer):
        MathAnswer(place="boxed")(reply(problem(), text))
    assert Solved(reward=MathAnswer(place="boxed"))(reply(problem(), text)) is False


def test_grading_works_outside_the_main_thread():
    """math-verify's own time limits, which are alarms, would raise there."""
    found = []
    rollout = reply(problem(r"\frac{7}{3}"), r"\boxed{\frac{14}{6}}")
    thread = threading.Thread(target=lambda: found.append(MathAnswer(place="boxed")(rollout)))
    thread.start()
    thread.join()
    assert found == [1.0]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("It is 72.", "row 4: column 'answer' has no answer (gold='hashes')"),
        (
            "#### \\frac{1}{",
            r"row 4: column 'answer' has '\\frac{1}{', which math-verify cannot read",
        ),
    ],
)
def test_unreadable_gold_is_refused_or_skipped(build, caplog, answer, message):
    rows = [*GSM8K[:3], {"question": "Unreadable?", "answer": answer}, *GSM8K[3:]]
    with pytest.raises(ValueError, match=r"rows\.jsonl, ") as caught:
        build(rows)
    assert message in str(caught.value)
    task = build(rows, unparsed_gold="skip")
    assert "1 of 61 rows cannot be used" in caplog.text
    everything = [
        *islice(task.train_problems(seed=0), len(task._train)),
        *task.eval_sets()["held_out"],
    ]
    assert len(everything) == 60


def test_file_of_the_tiny_config_has_right_solutions_that_fit(tmp_path, monkeypatch):
    root = Path(gsm8k.__file__).parent.parent
    config = gsm8k.tiny()
    assert isinstance(config.task, MathProblems.Config)
    monkeypatch.chdir(root)
    config.task.cache_folder = str(tmp_path / "cache")
    task = config.task.build()
    rows = [json.loads(line) for line in (root / gsm8k.TINY).read_text().splitlines()]
    assert rows == make_tiny_math.make_problems()
    assert len({row["question"] for row in rows}) == 200
    shown = next(task.warmup_problems(seed=0))
    room = config.generator.max_model_len - config.loop.sampling.max_tokens
    assert len(shown.question) < room
    assert len(shown.demonstration) < config.loop.sampling.max_tokens
    score = task.rubric(seed=0).score(reply(shown, shown.demonstration))
    assert (score.reward, score.correct, score.failure) == (1.0, True, None)
