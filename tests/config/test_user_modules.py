"""A user's registry module on the command line: what is wrong with it, in the user's own lines."""

import pytest

from rl.config.cli import parse_cli
from rl.utils.user_code import TREE
from tests.support.user_files import enter_user_folder

TASK = """
from configs import sum_digits

def small():
    config = sum_digits.tiny()
    {line}
    return config
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    with enter_user_folder(tmp_path, monkeypatch) as write:
        yield write


def error_of(capsys, *argv, module="sum_digits", config="tiny"):
    with pytest.raises(SystemExit) as stopped:
        parse_cli(argv, default_module=module, default_config=config)
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "config.loop.num_step = 3",
            "AttributeError: 'LoopConfig' object has no attribute 'num_step'; did you mean "
            "'num_steps'?",
        ),
        (
            "config.trainer.optimizer.lrr = 1e-5",
            "AttributeError: 'Config' object has no attribute 'lrr'; did you mean 'lr'?",
        ),
        ("config = sum_digit.tiny()", "NameError: name 'sum_digit' is not defined; did you mean "
                                      "'sum_digits'?"),
        (
            "config.loop = type(config.loop)(num_step=3)",
            "TypeError: LoopConfig.__init__() got an unexpected keyword argument 'num_step'; did "
            "you mean 'num_steps'?",
        ),
        ("raise KeyError('answer')", "KeyError: 'answer'"),
    ],
)  # fmt: skip
def test_error_in_a_config_function_is_its_line_and_the_nearest_name(write, capsys, line, says):
    write("my_task.py", TASK.format(line=line))
    assert error_of(capsys, "--module", "my_task", "--config", "small") == (
        f"error: --config small: my_task.small() raised {says}\n"
        f"  my_task.py, line 6, in small\n    {line}\n"
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def small(:\n    pass\n", "SyntaxError: invalid syntax\n  my_task.py, line 1\n"
                                    "    def small(:\n"),
        (
            "from rl.loop.loop import Lop\n",
            "ImportError: cannot import name 'Lop' from 'rl.loop.loop' "
            f"({TREE / 'rl/loop/loop.py'}); did you mean 'Loop'?\n"
            "  my_task.py, line 1, in <module>\n    from rl.loop.loop import Lop\n",
        ),
        (
            "import zzz_no_such_package\n",
            "ModuleNotFoundError: No module named 'zzz_no_such_package'; it is neither a file "
            "beside yours nor installed here\n"
            "  my_task.py, line 1, in <module>\n    import zzz_no_such_package\n",
        ),
        (
            "import my_task.part\n",
            "ModuleNotFoundError: No module named 'my_task.part'; 'my_task' is not a package; it "
            "is neither a file beside yours nor installed here\n"
            "  my_task.py, line 1, in <module>\n    import my_task.part\n",
        ),
    ],
)  # fmt: skip
def test_error_in_a_module_is_its_line(write, capsys, text, says):
    write("my_task.py", text)
    assert error_of(capsys, "--module", "my_task") == f"error: --module my_task: {says}"


def test_refused_value_shows_where_the_user_set_it(write, capsys):
    write("my_task.py", TASK.format(line="config.loop = type(config.loop)(group_size=0)"))
    error = error_of(capsys, "--module", "my_task", "--config", "small")
    assert "group_size=0" in error
    assert error.endswith("    config.loop = type(config.loop)(group_size=0)\n")
    assert "rl/" not in error


def test_file_in_place_of_a_module_is_answered_with_the_module(write, capsys, tmp_path):
    write("my_task.py", "")
    write("tasks/mine.py", "")
    write("my-task.py", "")
    says = "error: --module {}: no such module{}\n"
    for name, hint in (
        ("my_task.py", ": write --module my_task"),
        ("tasks/mine.py", ": write --module tasks.mine"),
        (
            f"{tmp_path}/my_task.py",
            f": write --module my_task, and start in the folder '{tmp_path}'",
        ),
        (
            "my-task",
            ": the name of my-task.py must be that of a Python module, without - or spaces",
        ),
    ):
        assert error_of(capsys, "--module", name) == says.format(name, hint)


def test_misspelled_module_and_config_are_answered_with_the_nearest(write, capsys):
    write("my_task.py", "def small(): ...\n")
    assert "no such module; did you mean gsm8k?; in configs are: " in error_of(
        capsys, "--module", "gsm8"
    )
    assert "no such module; did you mean my_task?; in configs" in error_of(
        capsys, "--module", "my_tsk"
    )
    assert "not a config of my_task; did you mean small? there are: small\n" in error_of(
        capsys, "--module", "my_task", "--config", "smal"
    )


def test_name_of_two_files_is_refused_with_both(write, capsys):
    file = write("sum_digits.py", "raise OSError\n")
    assert error_of(capsys, "--module", "sum_digits") == (
        f"error: --module sum_digits could be {file.name} or relay's own "
        f"{TREE / 'configs/sum_digits.py'}: write configs.sum_digits for relay's, or rename yours\n"
    )
    # relay's own by its whole name, and as the default of a command.
    argv = ["--module", "configs.sum_digits", "--config", "tiny"]
    for given in (argv, []):
        request = parse_cli(given, default_module="sum_digits", default_config="tiny")
        assert request.function == "tiny"


def test_package_of_the_name_of_a_config_module_is_refused_too(write, capsys):
    write("gsm8k/__init__.py", "")
    error = error_of(capsys, "--module", "gsm8k")
    assert error.startswith("error: --module gsm8k could be gsm8k/__init__.py or relay's own ")
