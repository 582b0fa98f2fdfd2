import asyncio
import dataclasses
import json
import logging
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from rl.data.difficulty import DifficultyFilter
from rl.rollouts.rubric import Criterion, Rubric
from rl.tasks.dataset import DatasetTask
from rl.tasks.problem_rows import Columns
from rl.types import Rollout
from tests.support.replies import reply

ROWS = [{"question": f"question {i}", "answer": str(i)} for i in range(200)]


@pytest.fixture
def build(tmp_path):
    """Writes files of rows and makes the task of them; options are those of the config."""

    def _build(rows=ROWS, *, files=None, **options):
        for name, content in {"train.jsonl": rows, **(files or {})}.items():
            (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in content))
        options.setdefault("train_files", ("train.jsonl",))
        if "eval_files" not in options:
            options.setdefault("held_out", 0.2)
        options["train_files"] = tuple(str(tmp_path / name) for name in options["train_files"])
        options["eval_files"] = {k: str(tmp_path / v) for k, v in options.get("eval_files", {}).items()}
        return DatasetTask.Config(**options, cache_folder=str(tmp_path / "cache")).build()

    return _build


def one_epoch(task, *, seed=0):
    return list(islice(task.train_problems(seed=seed), len(task._train)))


def questions(problems):
    return {problem.question for problem in problems}


def test_every_row_is_either_trained_on_or_held_out_the_same_for_every_seed(build):
    task = build()
    train, (held,) = questions(one_epoch(task)), task.eval_sets().values()
    assert train | questions(held) == {row["question"] for row in ROWS}
    assert not train & questions(held)
    assert 20 <= len(held) <= 60
    assert questions(one_epoch(task, seed=1)) == train
    assert [p.id for p in one_epoch(task, seed=1)] != [p.id for p in one_epoch(task, seed=0)]


def test_what_is_held_out_does_not_depend_on_the_order_of_the_file(build):
    (held,) = build().eval_sets().values()
    (turned,) = build(ROWS[::-1]).eval_sets().values()
    assert questions(held) == questions(turned)


def test_without_anything_to_evaluate_on_all_rows_are_trained_on(build):
    task = build(held_out=0.0)
    assert task.eval_sets() == {}
    assert questions(one_epoch(task)) == {row["question"] for row in ROWS}


def test_rows_that_ask_the_same_stay_on_one_side(build):
    twice = [{**row, "question": f" {row['question']} "} for row in ROWS]
    task = build([*ROWS, *twice])
    (held,) = task.eval_sets().values()
    assert not {p.question.strip() for p in held} & {p.question.strip() for p in one_epoch(task)}
    assert len(one_epoch(task)) == 2 * len(questions(one_epoch(build())))


def test_rows_of_an_evaluation_file_are_not_trained_on(build, caplog):
    caplog.set_level(logging.INFO)
    task = build(files={"test.jsonl": ROWS[:30]}, eval_files={"test": "test.jsonl"})
    assert questions(one_epoch(task)) == {row["question"] for row in ROWS[30:]}
    assert [p.id for p in task.eval_sets()["test"][:2]] == ["test.jsonl:1", "test.jsonl:2"]
    assert (
        "170 training problems of 200 rows (30 are in an evaluation set); to evaluate: test 30" in caplog.text
    )


def test_several_evaluation_sets_keep_their_order_and_their_limit(build):
    files = {"hard.jsonl": ROWS[:30], "easy.jsonl": ROWS[30:90]}
    task = build(files=files, eval_files={"hard": "hard.jsonl", "easy": "easy.jsonl"}, num_eval=40)
    assert {name: len(problems) for name, problems in task.eval_sets().items()} == {"hard": 30, "easy": 40}
    assert next(iter(task.eval_sets())) == "hard"


def test_problems_are_limited_to_the_same_ones_for_every_seed(build):
    task = build(max_problems=10)
    assert len(questions(one_epoch(task, seed=3))) == 10
    assert questions(one_epoch(task, seed=3)) == questions(one_epoch(task, seed=4))


def test_columns_template_and_system_message_make_the_problem(build):
    rows = [{"q": "1 + 1?", "a": 2, "key": "sum-1", "role": "", "level": 3, "steps": ["1+1=", "2"]}]
    rows += [{**rows[0], "q": f"{i} + 1?", "key": f"sum-{i}", "role": "You add."} for i in range(2, 30)]
    columns = Columns(
        question="q", answer="a", id="key", system="role", demonstration="steps", info=("level",)
    )
    task = build(rows, columns=columns, template="{question}\nBe brief.", system="You count.")
    problems = {p.id: p for p in [*one_epoch(task), *task.eval_sets()["held_out"]]}
    first, second = problems["sum-1"], problems["sum-2"]
    assert (first.question, first.answer, first.demonstration) == ("1 + 1?\nBe brief.", "2", ("1+1=", "2"))
    assert (first.info, second.info["system"]) == ({"level": 3, "system": "You count."}, "You add.")
    opening = task.environment(second).opening()
    assert [(m.role, m.content) for m in opening] == [("system", "You add."), ("user", "2 + 1?\nBe brief.")]
    assert asyncio.run(task.environment(second).step(None)).messages == ()


def test_warm_up_takes_the_training_rows_that_have_a_demonstration(build):
    rows = [{**row, "shown": row["answer"] if i % 2 else None} for i, row in enumerate(ROWS)]
    task = build(rows, columns=Columns(demonstration="shown"))
    train = one_epoch(task)
    shown = list(islice(task.warmup_problems(seed=0), len(train)))
    assert questions(shown) == {p.question for p in train if p.demonstration}
    assert 0 < len(questions(shown)) < len(train)


def test_warm_up_without_demonstrations_is_refused(build):
    with pytest.raises(ValueError, match=r"columns\.demonstration=None must name the column of full replies"):
        build().warmup_problems(seed=0)


def test_rubric_is_the_answer_and_nothing_else(build):
    task = build()
    problem = next(task.train_problems(seed=0))
    rubric = task.rubric(seed=0)
    right, wrong = (rubric.score(reply(problem, text)) for text in (f" {problem.answer}\n", "x"))
    assert (right.reward, right.correct, wrong.reward, wrong.correct) == (1.0, True, 0.0, False)
    thoughts = f"<think>\nis it {problem.answer}?\n</think>\n\n"
    for text, is_right in (
        (f"{thoughts}{problem.answer}", True),
        (f"{thoughts}x", False),
        (f"<think>{problem.answer}", False),
    ):
        score = rubric.score(reply(problem, text))
        assert (score.reward, score.correct) == (float(is_right), is_right)


def test_filter_by_a_column_leaves_out_training_rows_alone(build, caplog):
    caplog.set_level(logging.INFO)
    rows = [{**row, "rate": i / 200} for i, row in enumerate(ROWS)]
    difficulty = DifficultyFilter(column="rate", min=0.25, max=0.75)
    task = build(rows, difficulty=difficulty)
    rates = {f"question {i}": i / 200 for i in range(200)}
    assert {0.25 <= rates[p.question] <= 0.75 for p in one_epoch(task)} == {True}
    assert min(rates[p.question] for p in task.eval_sets()["held_out"]) < 0.25
    assert "fail the difficulty filter" in caplog.text


def test_filter_by_a_file_goes_by_the_ids(build, tmp_path):
    rates = [{"id": f"train.jsonl:{n}", "pass_rate": float(n <= 100)} for n in range(1, 181)]
    (tmp_path / "rates.jsonl").write_text("".join(json.dumps(rate) + "\n" for rate in rates))
    file = str(tmp_path / "rates.jsonl")
    numbers = {
        int(p.id.partition(":")[2]) for p in one_epoch(build(difficulty=DifficultyFilter(file=file, max=0.9)))
    }
    assert min(numbers) > 100
    assert max(numbers) > 180  # unrated ones are kept
    dropped = build(difficulty=DifficultyFilter(file=file, max=0.9, unrated="drop"))
    assert {100 < int(p.id.partition(":")[2]) <= 180 for p in one_epoch(dropped)} == {True}


def refused(build, *args, **options):
    with pytest.raises(ValueError, match=r".") as caught:
        build(*args, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "", "answer": "1"}, "train.jsonl, row 3: column 'question' is empty"),
        ({"question": " \n", "answer": "1"}, "train.jsonl, row 3: column 'question' is empty"),
        ({"question": None, "answer": "1"}, "train.jsonl, row 3: column 'question' is None, not text"),
        ({"question": "a", "answer": None}, "train.jsonl, row 3: column 'answer' is None, not text"),
        ({"question": "a", "answer": ""}, "train.jsonl, row 3: column 'answer' is empty"),
    ],
)
def test_a_row_without_question_or_answer_is_named(build, row, said):
    assert refused(build, [*ROWS[:2], row, *ROWS[3:]]).endswith(said)


def test_an_answer_is_not_asked_for_where_the_grader_needs_none(build):
    rows = [{"question": f"question {i}"} for i in range(50)]
    assert one_epoch(build(rows, columns=Columns(answer=None)))[0].answer == ""
    assert "no column 'answer' (columns.answer); its columns are 'question'" in refused(build, rows)


def test_an_id_that_stands_twice_is_named_with_both_rows(build):
    rows = [{**row, "id": i % 150} for i, row in enumerate(ROWS)]
    message = refused(build, rows, columns=Columns(id="id"))
    assert "train.jsonl, row 151: id '0' is also that of " in message
    assert "train.jsonl, row 1;" in message


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"train_files": ()}, "train_files is empty"),
        ({"held_out": 1e-9}, "held_out=1e-09 holds out none of 200 rows"),
        ({"held_out": 1.0}, "held_out=1.0: must be at least 0 and below 1"),
        ({"eval_files": {"test": "train.jsonl"}}, "train.jsonl' is one of train_files"),
        ({"max_problems": 0}, "max_problems=0: must be at least 1"),
        ({"template": "Think."}, "template='Think.': must contain {question}"),
        ({"difficulty": DifficultyFilter(column="rate")}, "no column 'rate' (difficulty.column)"),
    ],
)
def test_settings_that_cannot_work_are_named(build, options, said):
    assert said in refused(build, **options)


def test_when_all_is_filtered_away_the_filter_is_named(build):
    rows = [{**row, "rate": 1.0} for row in ROWS]
    message = refused(build, rows, difficulty=DifficultyFilter(column="rate", max=0.5))
    assert "no training row is left of" in message
    assert "fail the difficulty filter" in message
    message = refused(build, files={"test.jsonl": ROWS}, eval_files={"test": "test.jsonl"})
    assert message == "no training row is left of 200: 200 are in an evaluation set"


def test_rates_of_other_problems_are_refused(build, tmp_path):
    (tmp_path / "rates.jsonl").write_text('{"id": "other", "pass_rate": 0.5}\n')
    message = refused(build, difficulty=DifficultyFilter(file=str(tmp_path / "rates.jsonl")))
    assert "rates none of the training problems, whose ids are such as 'train.jsonl:" in message


def test_a_rate_that_is_none_names_its_row(build):
    rows = [{**row, "rate": 2.0 if i == 7 else 0.5} for i, row in enumerate(ROWS)]
    held = {"files": {"test.jsonl": ROWS[:1]}, "eval_files": {"test": "test.jsonl"}}
    message = refused(build, rows, difficulty=DifficultyFilter(column="rate"), **held)
    assert "train.jsonl, row 8: rate=2.0 is not a number from 0 to 1" in message


class Halves(DatasetTask):
    """Even answers alone, halved."""

    def convert(self, problem, row):
        return dataclasses.replace(
            problem, answer=str(int(problem.answer) // 2), info={"whole": row["answer"]}
        )

    def usable(self, problem):
        if problem.answer == "77":
            raise ValueError("77 is not wanted")
        return int(problem.info["whole"]) % 2 == 0


def test_a_subclass_makes_and_chooses_its_problems(tmp_path, caplog):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:100]))
    config = Halves.Config(
        train_files=(str(tmp_path / "rows.jsonl"),), held_out=0.3, cache_folder=str(tmp_path / "cache")
    )
    task = config.build()
    assert {int(p.answer) * 2 == int(p.info["whole"]) for p in one_epoch(task)} == {True}
    assert "50 of 100 rows cannot be used" in caplog.text
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 155: 77 is not wanted"):
        config.build()


def test_the_task_of_the_docs_works_as_it_is_shown(tmp_path):
    page = (Path(__file__).parent.parent.parent / "docs" / "data.md").read_text()
    names = {"DatasetTask": DatasetTask, "Rubric": Rubric, "Criterion": Criterion, "Rollout": Rollout}
    shown: dict[str, Any] = {"__name__": __name__, **names}
    code = page.partition("```python\n")[2].partition("```")[0]
    exec("from __future__ import annotations\n" + code, shown)
    rows = [{"question": f"Capital of land {i}?", "answer": f"Town {i}"} for i in range(50)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = (str(tmp_path / "rows.jsonl"),)
    task = shown["Capitals"].Config(train_files=files, held_out=0.2, cache_folder=str(tmp_path / "c")).build()
    problem = next(task.train_problems(seed=0))
    score = task.rubric(seed=0).score(reply(problem, f"It is {problem.answer.upper()}."))
    assert (score.reward, score.correct) == (1.0, True)
