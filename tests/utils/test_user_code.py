"""A user's own code: functions by their place, and errors that show the user's own lines."""

import pytest

from rl.rollouts.reward_functions import save_function
from rl.utils.user_code import describe_user_error, load_function
from tests.support.user_files import enter_user_folder


@pytest.fixture
def write(tmp_path, monkeypatch):
    with enter_user_folder(tmp_path, monkeypatch) as write:
        yield write


def error_of(place):
    with pytest.raises(ValueError, match=r".") as raised:
        load_function(place)
    return str(raised.value)


def describe(place, *arguments):
    """Return the described error of a call, without the frame of this call."""
    function = load_function(place)
    try:
        function(*arguments)
    except Exception as error:  # noqa: BLE001
        trace = error.__traceback__
        return describe_user_error(error.with_traceback(trace.tb_next if trace else None))
    raise AssertionError("no error")


# Functions by their place


def test_function_is_found_by_module_and_by_file(write):
    write("my_reward.py", "def right(rollout):\n    return 1.0\n")
    write("sub/other.py", "class Rewards:\n    @staticmethod\n    def right(rollout): return 2.0\n")
    assert load_function("my_reward:right")(None) == 1.0
    assert load_function("my_reward.py:right")(None) == 1.0
    assert load_function("sub/other.py:Rewards.right")(None) == 2.0
    assert load_function("sub.other:Rewards.right")(None) == 2.0


def test_file_imports_its_neighbours_and_may_have_the_name_of_an_installed_module(write):
    write("rewards/json.py", "from helper_of_json import VALUE\ndef right(rollout): return VALUE\n")
    write("rewards/helper_of_json.py", "VALUE = 3.0\n")
    assert load_function("rewards/json.py:right")(None) == 3.0


def test_lambda_and_callable_object_are_functions(write):
    text = """
        class Reward:
            def __call__(self, rollout):
                return 0.5

        half = Reward()
        whole = lambda rollout: 1.0
    """
    write("my_reward.py", text)
    assert load_function("my_reward:half")(None) == 0.5
    assert load_function("my_reward:whole")(None) == 1.0


def test_saved_function_is_loaded_with_what_it_uses(tmp_path):
    bonus = 0.25
    file = save_function(lambda rollout: bonus + 1, folder=tmp_path / "functions")
    assert load_function(str(file))(None) == 1.25
    assert error_of(str(tmp_path / "gone.pickle")).endswith(
        "gone.pickle' cannot be read: No such file or directory"
    )
    (tmp_path / "broken.pickle").write_bytes(b"no pickle")
    assert "broken.pickle' cannot be loaded: UnpicklingError: " in error_of(
        str(tmp_path / "broken.pickle")
    )


def test_missing_function_is_an_error_with_the_nearest_or_all_names(write):
    text = """
        from pathlib import Path
        LIMIT = 3
        def is_right(rollout): ...
        def is_short(rollout): ...
    """
    write("my_reward.py", text)
    assert error_of("my_reward:is_rihgt") == (
        "'my_reward:is_rihgt': my_reward has no 'is_rihgt'; did you mean 'is_right'?"
    )
    assert error_of("my_reward.py:bonus") == (
        "'my_reward.py:bonus': my_reward.py has no 'bonus'; its functions are: is_right, is_short"
    )
    assert error_of("my_reward:LIMIT") == "'my_reward:LIMIT' is a int, not a function"


@pytest.mark.parametrize("place", ["my_reward", "my_reward.py", "my_reward:", ":right"])
def test_place_without_module_or_function_is_refused(write, place):
    write("my_reward.py", "def right(rollout): ...\n")
    assert error_of(place) == f"{place!r} must be module:function or file.py:function"


def test_missing_module_or_file_is_named(write):
    write("my_reward.py", "def right(rollout): ...\n")
    assert error_of("nowhere.py:right") == "there is no file 'nowhere.py'"
    assert error_of("my_rewards:right") == (
        "there is no module 'my_rewards' in this folder or among the installed packages; did you "
        "mean 'my_reward'?"
    )
    assert error_of("my-reward:right") == (
        "'my-reward' is not the name of a module; a file is written with its .py"
    )


@pytest.mark.parametrize("place", ["my_reward:right", "my_reward.py:right"])
def test_error_of_any_type_in_a_module_shows_its_line(write, place):
    write("my_reward.py", 'LIMIT = int("three")\ndef right(rollout): ...\n')
    message = error_of(place)
    module = place.partition(":")[0]
    assert message.startswith(f"{module} cannot be imported: ValueError: invalid literal for int()")
    assert message.endswith('\n  my_reward.py, line 1, in <module>\n    LIMIT = int("three")')


def test_module_that_failed_is_read_again(write):
    file = write("my_reward.py", "raise OSError\n")
    assert "OSError" in error_of("my_reward.py:right")
    file.write_text("def right(rollout): return 1.0\n")
    assert load_function("my_reward.py:right")(None) == 1.0


# Errors


def test_error_three_calls_deep_shows_only_the_lines_of_the_user(write):
    text = """
        import json

        from losses.policy import GRPOLoss

        def outer():
            return middle()

        def middle():
            return json.loads("{}", object_hook=inner)

        def inner(pairs):
            return GRPOLoss(clip_low=-1)
    """
    write("my_task.py", text)
    described = describe("my_task:outer")
    first, *lines = described.splitlines()
    assert first.startswith("ValueError: ")
    assert "clip_low" in first
    assert lines == [
        "  my_task.py, line 7, in outer",
        "    return middle()",
        "  my_task.py, line 10, in middle",
        '    return json.loads("{}", object_hook=inner)',
        "  my_task.py, line 13, in inner",
        "    return GRPOLoss(clip_low=-1)",
    ]


def test_deep_error_shows_the_innermost_lines(write):
    write("my_task.py", "def count(n):\n    return 1 / 0 if n == 0 else count(n - 1)\n")
    described = describe("my_task:count", 20)
    lines = [line for line in described.splitlines() if line.startswith("  my_task.py")]
    assert lines == ["  my_task.py, line 2, in count"] * 6


TYPOS = {
    "a name": ("batch_size = 3\nbatch_sze", "NameError", "batch_size"),
    "a built-in name": ("pritn()", "NameError", "print"),
    "an attribute that is read": ("config().loop.num_step", "AttributeError", "num_steps"),
    "an attribute of a module": ("import math\nmath.flor(1)", "AttributeError", "floor"),
    "a field that is set": ("c = config()\nc.loop.num_step = 3", "AttributeError", "num_steps"),
    "a field of a nested Config": (
        "c = config()\nc.trainer.optimizer.lrr = 3", "AttributeError", "lr",
    ),
    "a keyword of a Config": ("LoopConfig(num_step=3)", "TypeError", "num_steps"),
    "a keyword of a function": ("config(lrate=3)", "TypeError", "rate"),
    "a keyword of a module's function": (
        "from configs import algorithms\nalgorithms.with_kl(config(), coeff=3)",
        "TypeError",
        "coef",
    ),
    "a name of a module": ("from rl.loop.config import LoopConfg", "ImportError", "LoopConfig"),
    "a module of a package": ("from rl.loop import confg", "ImportError", "config"),
    "an own module": ("import rl.loop.confg", "ModuleNotFoundError", "rl.loop.config"),
    "a file beside": ("import my_tsk", "ModuleNotFoundError", "my_task"),
}  # fmt: skip


TASK = """
from rl.loop.config import LoopConfig

def config(rate=1.0):
    from configs.sum_digits import tiny
    return tiny()

def fail():
"""


@pytest.mark.parametrize("typo", TYPOS)
def test_typo_is_answered_with_the_nearest_name(write, typo):
    code, error, near = TYPOS[typo]
    write("my_task.py", TASK + "".join(f"    {line}\n" for line in code.splitlines()))
    described = describe("my_task:fail")
    assert described.startswith(f"{error}: ")
    assert f"; did you mean {near!r}?\n" in described
    assert described.endswith(code.splitlines()[-1])


def test_name_like_no_other_gets_no_suggestion(write):
    write("my_task.py", "def fail():\n    return xylophone_quartet\n")
    described = describe("my_task:fail")
    assert described.startswith("NameError: name 'xylophone_quartet' is not defined\n")


def test_missing_package_is_told_apart_from_a_typo(write):
    write("my_task.py", "def fail():\n    import zzz_no_such_package\n")
    assert describe("my_task:fail") == (
        "ModuleNotFoundError: No module named 'zzz_no_such_package'; it is neither a file beside "
        "yours nor installed here\n"
        "  my_task.py, line 2, in fail\n"
        "    import zzz_no_such_package"
    )


def test_syntax_error_shows_the_line_that_python_names(write):
    write("my_task.py", "def tiny(:\n    pass\n")
    assert error_of("my_task:tiny") == (
        "my_task cannot be imported: SyntaxError: invalid syntax\n"
        "  my_task.py, line 1\n"
        "    def tiny(:"
    )
    write("my_other.py", "def tiny():\npass\n")
    assert "IndentationError: expected an indented block" in error_of("my_other:tiny")


def test_file_of_another_folder_is_shown_with_its_whole_path(write, tmp_path, monkeypatch):
    file = write("my_task.py", "def fail():\n    raise OSError\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert f"  {file}, line 2, in fail" in describe("my_task:fail")
