"""A sweep: its runs and their names, what is refused before the first of them, and how it ends.

The runs themselves are small programs that write a run's folder; `relay train` is tested elsewhere.
"""

import json
import os
import signal
import sys
import threading
import time

import pytest

from relay import sweep, sweep_plan
from relay.sweep_plan import make_grid, parse_over, plan_runs, read_list
from tests.support.report_runs import MadeRun, make_run

COMMON = ["--module", "sum_digits", "--config", "tiny", "--steps", "5"]


def plan(*over, name="try"):
    return plan_runs(name, make_grid(map(parse_over, over)))


# Options


def test_every_combination_is_a_run_with_its_values_in_its_name():
    runs = plan("lr=1e-5,3e-5", "seed=0,1")
    assert [run.name for run in runs] == [
        "try-lr_1e-5-seed_0", "try-lr_1e-5-seed_1", "try-lr_3e-5-seed_0", "try-lr_3e-5-seed_1",
    ]  # fmt: skip
    assert runs[1].list_arguments() == ["--lr=1e-5", "--seed=1"]


def test_elements_of_a_tuple_are_separated_by_spaces():
    first, second = plan("--trainer.optimizer.betas=0.9 0.95,0.8 0.9")
    assert first.name == "try-betas_0.9_0.95"
    assert second.list_arguments() == ["--trainer.optimizer.betas", "0.8", "0.9"]


def test_values_that_a_folder_cannot_have_stay_apart_and_short():
    runs = plan("data=a/b.jsonl,a_b.jsonl", f"description={'long ' * 60}")
    names = [run.name for run in runs]
    assert len(set(names)) == 2
    assert all(len(name) <= sweep_plan.MAX_NAME and "/" not in name for name in names)
    short = plan("data=a/b,a_b")
    assert all(run.name.startswith("try-data_a_b-") for run in short)
    assert [run.name for run in plan("data=a/b,a_b")] == [run.name for run in short]


def test_options_of_the_same_last_name_are_named_in_full():
    (run,) = plan("trainer.optimizer.lr=1", "warmup.lr=2")
    assert run.name == "try-trainer.optimizer.lr_1-warmup.lr_2"


def test_list_holds_sets_of_options(tmp_path):
    file = tmp_path / "sets.json"
    sets = [{"lr": 1e-5, "betas": [0.9, 0.95]}, {"--loop.group-size": 4, "warmup": None, "x": True}]
    file.write_text(json.dumps(sets))
    assert read_list(file) == [
        {"lr": ("1e-05",), "betas": ("0.9", "0.95")},
        {"loop.group_size": ("4",), "warmup": ("None",), "x": ("True",)},
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("{}", "must hold a list"), ("[1]", "entry 1 is no object"),
     ('[{"a": {"b": 1}}]', "is no value of an option")],
)  # fmt: skip
def test_other_list_is_refused(text, message, tmp_path):
    (tmp_path / "sets.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_list(tmp_path / "sets.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--over", "lr"], "--over lr: must be OPTION=VALUE,VALUE"),
        (["--over", "lr=1,,2"], "a value is empty"),
        (["--over", "lr=1", "lr=2"], "--over lr: is given twice"),
        (["--over", "lr=1,1"], "two runs of the sweep have the same options"),
        (["--over", "name=a,b"], "name: a sweep cannot have several values of it"),
        (["--over", "betas='0.9,1"], "No closing quotation"),
        ([], "nothing to sweep over"),
        (["--list", "no.json"], "--list no.json: No such file"),
        (["--over", "lr=1", "--", "--name", "x"], "--name: not for the runs of a sweep; their"),
        (["--over", "lr=1", "--", "--overwrite"], "what has finished is skipped"),
        (["--over", "lr=1", "--", "--lr", "2"], "--lr: the sweep has values of it"),
    ],
)
def test_wrong_options_are_refused_at_once(arguments, message, capsys):
    assert sweep.main(["--name", "try", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_name_that_is_no_folder_is_refused(capsys):
    assert sweep.main(["--name", "a/b", "--over", "lr=1"]) == 2
    assert "--name a/b: must be letters" in capsys.readouterr().err


def test_option_of_the_runs_before_the_dashes_is_refused(capsys):
    with pytest.raises(SystemExit):
        sweep.main(["--name", "try", "--over", "lr=1", "--module", "sum_digits"])
    assert "--module: options of the runs follow after --" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ("lr=1e-5,fast", "'fast' is not of type float"),
        ("loop.group_sise=4,8", "no such option; did you mean --loop.group_size"),
        ("loop.num_steps=5,-1", "num_steps=-1: must be"),
    ],
)
def test_mistake_of_the_last_run_is_found_before_the_first_one(over, message, tmp_path, capsys):
    common = ["--module", "sum_digits", "--config", "tiny", "--dump_folder", str(tmp_path)]
    assert sweep.main(["--name", "try", "--over", over, "--", *common]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "of the sweep" in said
    assert list(tmp_path.iterdir()) == []


def test_dry_run_prints_the_commands_and_writes_nothing(tmp_path, capsys):
    common = [*COMMON, "--dump_folder", str(tmp_path)]
    arguments = ["--name", "try", "--over", "seed=0,1", "--dry_run", "--", *common]
    assert sweep.main(arguments) == 0
    first, second = capsys.readouterr().out.splitlines()
    shown = f"relay train {' '.join(common)} --seed=0 --name=try-seed_0"
    assert first == f"try-seed_0: {shown}"
    assert second.startswith("try-seed_1: relay train")
    assert list(tmp_path.iterdir()) == []


# Runs

CHILD = """
import json, pathlib, signal, sys, time
sys.path.insert(0, sys.argv[1])
from tests.support.report_runs import MadeRun, make_run
action, folder = sys.argv[2], pathlib.Path(sys.argv[3])
with (folder.parent / "log").open("a") as log:
    log.write(f"{action} {folder.name}\\n")
how = json.loads((folder.parent / "how.json").read_text()).get(folder.name, "finish")
if how == "refuse":
    sys.exit(2)
if not folder.exists():
    make_run(folder, MadeRun(num_steps=2, status="running"))
if how == "wait":
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    (folder.parent / "waits").touch()
    time.sleep(60)
if how == "fail":
    sys.exit(1)
(folder / "status.json").write_text('{"status": "finished"}')
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that runs a sweep of small programs, each of which ends as it is told."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    monkeypatch.setattr(
        sweep,
        "make_command",
        lambda task, _: [sys.executable, "-c", CHILD, root, task.action, str(task.folder)],
    )
    monkeypatch.setattr(sweep, "check_runs", lambda runs, common: tmp_path)

    def run(*over, common=(), **how):
        (tmp_path / "how.json").write_text(
            json.dumps({name.replace("__", "-"): end for name, end in how.items()})
        )
        (tmp_path / "log").write_text("")
        status = sweep.main(["--name", "try", "--over", *over, "--", *common])
        return status, (tmp_path / "log").read_text().splitlines()

    return run


def test_failed_run_is_noted_and_retried_while_finished_runs_are_skipped(start, capsys):
    status, log = start("seed=0,1,2", try__seed_1="fail")
    assert (status, log) == (
        1,
        ["start try-seed_0", "start try-seed_1", "start try-seed_2"],
    )
    said = capsys.readouterr()
    assert "error: run try-seed_1 failed with status 1; the same command retries it" in said.err
    table = said.out.split("\n\n")[-1].splitlines()
    assert [line.split()[0] for line in table] == ["run", "try-seed_0", "try-seed_1", "try-seed_2"]
    assert start("seed=0,1,2") == (0, ["resume try-seed_1"])
    assert "try-seed_0 (1 of 3) has finished already" in capsys.readouterr().out
    assert start("seed=0,1,2") == (0, [])


def test_refused_run_has_no_row_and_is_started_anew(start, capsys):
    status, log = start("seed=0,1", try__seed_0="refuse")
    assert (status, log) == (1, ["start try-seed_0", "start try-seed_1"])
    assert len(capsys.readouterr().out.split("\n\n")[-1].splitlines()) == 2
    assert start("seed=0,1") == (0, ["start try-seed_0"])


def test_larger_grid_keeps_the_runs_that_have_finished(start):
    assert start("seed=0,1")[0] == 0
    assert start("seed=0") == (0, [])
    assert start("seed=0,1,2") == (0, ["start try-seed_2"])


def test_run_that_was_killed_before_it_had_a_config_is_replaced(start, tmp_path):
    start("seed=0", try__seed_0="fail")
    (tmp_path / "try-seed_0" / "config.json").unlink()
    assert start("seed=0") == (0, ["replace try-seed_0"])


def test_other_options_do_not_go_on_with_a_sweep(start, capsys):
    assert start("seed=0", common=["--steps", "5"])[0] == 0
    assert start("seed=0", common=["--steps", "9"]) == (2, [])
    assert "was started with other options: `--steps 5`" in capsys.readouterr().err


def test_sweep_whose_runs_were_refused_may_have_other_options(start):
    start("seed=0", common=["--steps", "5"], try__seed_0="refuse")
    assert start("seed=0", common=["--steps", "9"]) == (0, ["start try-seed_0"])


def test_run_that_is_not_of_the_sweep_is_refused(start, tmp_path, capsys):
    make_run(tmp_path / "try-seed_1", MadeRun(num_steps=2))
    assert start("seed=0,1") == (2, [])
    assert "holds a run that is not of this sweep" in capsys.readouterr().err


def test_ctrl_c_stops_the_run_and_the_sweep_and_says_how_to_go_on(start, tmp_path, capsys):
    def interrupt():
        deadline_s = time.monotonic() + 30
        while not (tmp_path / "waits").exists() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=interrupt)
    thread.start()
    status, log = start("seed=0,1,2", try__seed_1="wait")
    thread.join()
    assert (status, log) == (130, ["start try-seed_0", "start try-seed_1"])
    said = capsys.readouterr()
    assert "the sweep was stopped with 1 of 3 runs finished; the same command goes on" in said.err
    assert signal.getsignal(signal.SIGINT) is before
    assert start("seed=0,1,2") == (0, ["resume try-seed_1", "start try-seed_2"])


def test_commands_are_those_of_relay_train(tmp_path):
    (run,) = plan("lr=1e-5")
    task = sweep.SweepTask(run=run, folder=tmp_path / run.name, action="start")
    command = sweep.make_command(task, COMMON)
    assert command[:5] == [sys.executable, "-P", "-m", "relay", "train"]
    assert command[5:] == [*COMMON, "--lr=1e-5", "--name=try-lr_1e-5"]
    resumed = sweep.SweepTask(run=run, folder=tmp_path / run.name, action="resume")
    assert sweep.make_command(resumed, COMMON)[5:] == ["--resume", str(tmp_path / run.name)]
