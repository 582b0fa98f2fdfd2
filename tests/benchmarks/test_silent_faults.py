"""SilentBench: its rows fit the tree, and it tells what has noticed a fault from a crash."""

import re
from dataclasses import replace

import pytest

from benchmarks import silent_configs, silent_faults
from benchmarks.processes import ROOT
from benchmarks.silent_faults import FAULTS, Alarm, Bench, Outcome, list_alarms

STOPPED = "starting\nerror: the run stopped: step 2: "


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_fits_the_tree_and_names_its_issue(fault):
    assert (ROOT / fault.file).read_text().count(fault.original) == 1
    assert fault.original.count("\n") == fault.faulty.count("\n")  # one line is changed
    assert fault.original != fault.faulty
    assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", fault.issue)
    assert callable(getattr(silent_configs, fault.config))


def test_faults_differ():
    assert len({fault.name for fault in FAULTS}) == len({fault.faulty for fault in FAULTS}) == 23


@pytest.mark.parametrize("name", silent_configs.CLEAN)
def test_config_of_a_clean_run_is_short_and_checkable(name):
    config = getattr(silent_configs, name)()
    assert config.ledger.enable
    assert config.trainer.checkpoint.interval == 1
    assert config.warmup is None


def test_error_counts_unless_it_is_a_crash(tmp_path):
    run = tmp_path / "none"
    (alarm,), crash = list_alarms(
        run, status=1, printed=f"{STOPPED}logprob parity: ...", first_step=1
    )
    assert (alarm.by, alarm.step, crash) == ("parity", 2, "")
    (alarm,), _ = list_alarms(run, status=1, printed=f"{STOPPED}a reward failed", first_step=1)
    assert (alarm.by, alarm.step) == ("error", 2)
    alarms, crash = list_alarms(
        run, status=1, printed=f"{STOPPED}TypeError: no number", first_step=1
    )
    assert alarms == []
    assert "TypeError" in crash
    assert list_alarms(run, status=0, printed="finished", first_step=1) == ([], "")


def test_steps_are_counted_from_the_first_that_could_show_the_fault():
    alarms = tuple(Alarm(by="replay", step=step, text="") for step in (7, 6))
    outcome = Outcome(alarms=alarms, first_step=5, seconds=1.0)
    assert outcome.num_steps == 2
    assert replace(outcome, alarms=()).num_steps is None


def test_fault_is_taken_out_again(tmp_path, monkeypatch):
    fault = replace(FAULTS[0], file="a.py", original="x = 1", faulty="x = 2")
    file = tmp_path / "a.py"
    file.write_text("x = 1\n")
    seen = []

    def look(*args, **options):
        seen.append(file.read_text())
        raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "_try", look)
    with pytest.raises(KeyboardInterrupt):
        Bench(tmp_path, tree=tmp_path, assets="").try_fault(fault)
    assert (seen, file.read_text()) == (["x = 2\n"], "x = 1\n")


def test_figures_tell_what_escaped_and_which_clean_runs_alarmed(capsys):
    caught = Outcome(alarms=(Alarm(by="replay", step=2, text=""),), first_step=1, seconds=1.0)
    silent = replace(caught, alarms=())
    status = silent_faults._summarize({"a": caught, "b": silent}, [silent, caught])
    printed = capsys.readouterr().out
    assert '"caught": 1' in printed
    assert '"escaped": ["b"]' in printed
    assert '"false_alarms": 1' in printed
    assert status == 1
