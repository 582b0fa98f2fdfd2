import asyncio
import dataclasses
import json
from itertools import islice

import pytest

from rl.tasks.data import DifficultyFilter, write_pass_rates
from rl.tasks.dataset import Columns, DatasetTask
from tests.support.scored import reply

ROWS = [{"question": f"question {i}", "answer": str(i)} for i in range(200)]


@pytest.fixture
def build(tmp_path):
    """Return a function that writes files of rows and builds their task."""

    def _build(rows=ROWS, *, files=None, kind=DatasetTask, **options):
        for name, content in {"train.jsonl": rows, **(files or {})}.items():
            (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in content))
        options.setdefault("train_files", ("train.jsonl",))
        if "eval_files" not in options:
            options.setdefault("held_out", 0.2)
        options["train_files"] = tuple(str(tmp_path / name) for name in options["train_files"])
        options["eval_files"] = {
            k: str(tmp_path / v) for k, v in options.get("eval_files", {}).items()
        }
        return kind.Config(**options, cache_folder=str(tmp_path / "cache")).build()

    return _build


def one_epoch(task, *, seed=0):
    return list(islice(task.train_problems(seed=seed), len(task._train)))


def questions(problems):
    return {problem.question for problem in problems}


def test_every_row_is_either_trained_on_or_held_out(build):
    task = build()
    train, (held,) = questions(one_epoch(task)), task.eval_sets().values()
    assert train | questions(held) == {row["question"] for row in ROWS}
    assert not train & questions(held)
    assert 20 <= len(held) <= 60
    assert questions(one_epoch(task, seed=1)) == train
    assert [p.id for p in one_epoch(task, seed=1)] != [p.id for p in one_epoch(task, seed=0)]
    (again,) = build(ROWS[::-1]).eval_sets().values()
    assert questions(held) == questions(again)
    few = build(max_problems=10)
    assert questions(one_epoch(few, seed=3)) == questions(one_epoch(few, seed=4))
    assert len(questions(one_epoch(few))) == 10
    whole = build(held_out=0.0)
    assert (whole.eval_sets(), len(questions(one_epoch(whole)))) == ({}, 200)


def test_rows_with_equal_questions_stay_on_one_side(build):
    twice = [{**row, "question": f" {row['question']} "} for row in ROWS]
    task = build([*ROWS, *twice])
    (held,) = task.eval_sets().values()
    assert not {p.question.strip() for p in held} & {p.question.strip() for p in one_epoch(task)}
    assert len(one_epoch(task)) == 2 * len(questions(one_epoch(build())))


def test_rows_of_an_evaluation_file_are_not_trained_on(build):
    task = build(files={"test.jsonl": ROWS[:30]}, eval_files={"test": "test.jsonl"})
    assert questions(one_epoch(task)) == {row["question"] for row in ROWS[30:]}
    files = {"hard.jsonl": ROWS[:30], "easy.jsonl": ROWS[30:90]}
    several = build(
        files=files, eval_files={"hard": "hard.jsonl", "easy": "easy.jsonl"}, num_eval=40
    )
    assert [(n, len(problems)) for n, problems in several.eval_sets().items()] == [
        ("hard", 30),
        ("easy", 40),
    ]
    assert [p.id for p in task.eval_sets()["test"][:2]] == ["test.jsonl:1", "test.jsonl:2"]


def test_columns_template_and_system_message_make_the_problem(build):
    rows = [{"q": "1 + 1?", "a": 2, "key": "sum-1", "role": "", "level": 3, "steps": ["1+1=", "2"]}]
    rows += [
        {**rows[0], "q": f"{i} + 1?", "key": f"sum-{i}", "role": "You add."} for i in range(2, 30)
    ]
    named = {
        "question": "q",
        "answer": "a",
        "id": "key",
        "system": "role",
        "demonstration": "steps",
    }
    columns = Columns(**named, info=("level",))
    task = build(rows, columns=columns, template="{question}\nBe brief.", system="You count.")
    problems = {p.id: p for p in [*one_epoch(task), *task.eval_sets()["held_out"]]}
    first, second = problems["sum-1"], problems["sum-2"]
    assert (first.question, first.answer, first.demonstration) == (
        "1 + 1?\nBe brief.",
        "2",
        ("1+1=", "2"),
    )
    assert (first.info, second.info["system"]) == ({"level": 3, "system": "You count."}, "You add.")
    opening = task.environment(second).opening()
    assert [(m.role, m.content) for m in opening] == [
        ("system", "You add."),
        ("user", "2 + 1?\nBe brief."),
    ]
    assert asyncio.run(task.environment(second).step(None)).messages == ()


def test_warm_up_takes_the_training_rows_that_have_a_demonstration(build):
    rows = [{**row, "shown": row["answer"] if i % 2 else None} for i, row in enumerate(ROWS)]
    task = build(rows, columns=Columns(demonstration="shown"))
    train = one_epoch(task)
    shown = list(islice(task.warmup_problems(seed=0), len(train)))
    assert questions(shown) == {p.question for p in train if p.demonstration}
    assert 0 < len(questions(shown)) < len(train)


def test_rubric_compares_the_answer_after_the_thoughts(build):
    task = build()
    problem = next(task.train_problems(seed=0))
    right = problem.answer
    texts = (
        f" {right}\n",
        f"<think>\n{right}?\n</think>\n\n{right}",
        f"<think>{right}</think>x",
        "x",
    )
    scores = [
        task.rubric(seed=0).score(reply(problem, text)) for text in (*texts, f"<think>{right}")
    ]
    assert [score.reward for score in scores] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert [score.correct for score in scores] == [True, True, False, False, False]


def test_rubric_takes_a_number_in_any_writing_and_nothing_that_was_cut_off(build):
    rows = [{"question": f"question {i}", "answer": "1,000"} for i in range(20)]
    task = build(rows)
    problem = next(task.train_problems(seed=0))
    replies = [reply(problem, text) for text in ("1000", "1,000.", "100", "1000 or 1")]
    replies.append(reply(problem, "1,000", finish_reason="length"))
    assert [task.rubric(seed=0).score(r).reward for r in replies] == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_filter_by_a_column_drops_only_training_rows(build):
    rows = [{**row, "rate": i / 200} for i, row in enumerate(ROWS)]
    difficulty = DifficultyFilter(column="rate", min=0.25, max=0.75)
    task = build(rows, difficulty=difficulty)
    rates = {f"question {i}": i / 200 for i in range(200)}
    assert {0.25 <= rates[p.question] <= 0.75 for p in one_epoch(task)} == {True}
    assert min(rates[p.question] for p in task.eval_sets()["held_out"]) < 0.25


def test_filter_by_a_file_uses_the_ids(build, tmp_path):
    file = tmp_path / "rates.jsonl"
    write_pass_rates(file, {f"train.jsonl:{n}": float(n <= 100) for n in range(1, 181)})
    task = build(difficulty=DifficultyFilter(file=str(file), max=0.9))
    numbers = {int(problem.id.partition(":")[2]) for problem in one_epoch(task)}
    assert min(numbers) > 100
    assert max(numbers) > 180  # unrated ones are kept


def refused(build, *args, **options):
    with pytest.raises(ValueError, match=r".") as caught:
        build(*args, **options)
    return str(caught.value)


RATE = DifficultyFilter(column="rate")
TEST_HAS_ALL = {"files": {"test.jsonl": ROWS}, "eval_files": {"test": "test.jsonl"}}


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"question": " \n"}, {}, "train.jsonl, row 3: column 'question' is ' \\n', not text"),
        ({"answer": None}, {}, "train.jsonl, row 3: column 'answer' is None, not text"),
        ({"answer": ""}, {}, "train.jsonl, row 3: column 'answer' is '', not text"),
        (
            {"rate": 2.0},
            {"difficulty": RATE},
            "train.jsonl, row 3: the pass rate 2.0 is not a number from 0",
        ),
        ({"id": "0"}, {"columns": Columns(id="id")}, "train.jsonl, row 3: id '0' also occurs in "),
    ],
)
def test_invalid_row_is_named(build, change, options, message):
    rows = [{**row, "rate": 0.5, "id": str(i)} for i, row in enumerate(ROWS)]
    rows[2] |= change
    test = {"files": {"test.jsonl": ROWS[:1]}, "eval_files": {"test": "test.jsonl"}}
    assert message in refused(build, rows, **options, **test)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_files": ()}, "train_files is empty"),
        ({"eval_files": {"test": "train.jsonl"}}, "train.jsonl' is one of train_files"),
        ({"difficulty": RATE}, "no column 'rate' (difficulty.column)"),
        (
            {"columns": Columns(answer="a")},
            "no column 'a' (columns.answer); its columns are 'question'",
        ),
        (TEST_HAS_ALL, "no training row is left of 200: 200 are in an evaluation set"),
    ],
)
def test_invalid_settings_are_refused(build, options, message):
    assert message in refused(build, **options)


def test_column_of_infos_does_not_become_the_system_message():
    with pytest.raises(ValueError, match=r"columns\.info has a column 'system', .* rename"):
        DatasetTask.Config(train_files=("x.jsonl",), columns=Columns(info=("system",)))


def test_difficulty_filter_that_drops_everything_is_refused(build, tmp_path):
    rows = [{**row, "rate": 1.0} for row in ROWS]
    below = DifficultyFilter(column="rate", max=0.5)
    assert "no training row is left of" in refused(build, rows, difficulty=below)
    file = tmp_path / "rates.jsonl"
    write_pass_rates(file, {"other": 0.5})
    message = refused(build, difficulty=DifficultyFilter(file=str(file)))
    assert "rates none of the training problems, such as 'train.jsonl:" in message


def test_answer_column_is_optional_and_a_warm_up_needs_demonstrations(build):
    task = build([{"question": f"question {i}"} for i in range(50)], columns=Columns(answer=None))
    assert one_epoch(task)[0].answer == ""
    with pytest.raises(ValueError, match=r"columns\.demonstration=None must name the column"):
        task.warmup_problems(seed=0)


class Halves(DatasetTask):
    """Task of the even answers, halved."""

    def convert(self, problem, row):
        return dataclasses.replace(
            problem, answer=str(int(problem.answer) // 2), info={"whole": row["answer"]}
        )

    def usable(self, problem):
        if problem.answer == "77":
            raise ValueError("77 is not wanted")
        return int(problem.info["whole"]) % 2 == 0


def test_subclass_converts_and_drops_problems(build, caplog):
    task = build(ROWS[:100], kind=Halves)
    assert {int(p.answer) * 2 == int(p.info["whole"]) for p in one_epoch(task)} == {True}
    assert "50 of 100 rows cannot be used" in caplog.text
    assert "train.jsonl, row 155: 77 is not wanted" in refused(build, kind=Halves)


def test_share_of_less_than_a_row_holds_out_one(build):
    task = build(held_out=1e-9)
    held_out = questions(task.eval_sets()["held_out"])
    assert len(held_out) == 1
    assert not held_out & questions(one_epoch(task))


# Questions that are lists of messages

CONVERSATION = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 + 3?"},
]


def write_conversations(tmp_path, *questions):
    file = tmp_path / "conversations.jsonl"
    lines = [json.dumps({"question": question, "answer": "6"}) for question in questions]
    file.write_text("\n".join(lines))
    return DatasetTask.Config(
        train_files=(str(file),),
        template="{question} Reply with a number.",
        cache_folder=str(tmp_path / "cache"),
    )


def test_messages_of_a_question_reach_the_model(tmp_path):
    task = write_conversations(tmp_path, CONVERSATION).build()
    problem = next(task.train_problems(seed=0))
    assert problem.question == "And 3 + 3? Reply with a number."
    opening = task.environment(problem).opening()
    assert [message.role for message in opening] == ["system", "user", "assistant", "user"]
    assert [message.content for message in opening[:3]] == ["Be short.", "2 + 2?", "4"]
    assert opening[3].content == problem.question


def test_system_message_of_the_config_stands_back_behind_the_rows_own(tmp_path):
    config = write_conversations(tmp_path, CONVERSATION, CONVERSATION[1:])
    config.system = "Be polite."
    config.shuffle = False
    task = config.build()
    problems = task.train_problems(seed=0)
    openings = [task.environment(next(problems)).opening() for _ in range(2)]
    assert [opening[0].content for opening in openings] == ["Be short.", "Be polite."]


def test_content_of_text_parts_is_joined(tmp_path):
    parts = [{"type": "text", "text": "3 + "}, {"type": "text", "text": "3?"}]
    task = write_conversations(tmp_path, [{"role": "user", "content": parts}]).build()
    assert next(task.train_problems(seed=0)).question == "3 + 3? Reply with a number."


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ([], "has no messages: a question must end with the user's"),
        (CONVERSATION[:3], "ends with a message of the assistant"),
        ([{"role": "human", "content": "x"}], "role 'human': must be one of system, user"),
        ([{"from": "human", "value": "x"}], "not text or a list of messages with role and content"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            "a part of type 'image': must be text",
        ),
        ([{"role": "user", "content": None}], "a message with None: must be text"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}, CONVERSATION[1]],
            "has a message with tool_calls",
        ),
    ],
)
def test_malformed_messages_name_the_row(tmp_path, question, message):
    with pytest.raises(ValueError, match=message) as error:
        write_conversations(tmp_path, question).build()
    assert "conversations.jsonl, row 1" in str(error.value)
