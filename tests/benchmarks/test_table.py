"""The table of all benchmarks: ratios by name, and errors in place of figures."""

import json
import re
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from benchmarks import table
from benchmarks.processes import ROOT
from tests.support.runs import wait_until_gone

PRINTED: dict[str, dict[str, Any]] = {
    "startup": {"compared": "seconds: TRL over relay", "ratio": {"first_s": 1.5, "end_s": 0.875}},
    "busy": {"compared": "slowdown", "ratio": {"2": {"relay": 1.75, "trl": 20.0}}, "threads": 2},
    "observability": {"compared": "a step: all over nothing", "ratio": 1.0234},
}
LINES = [
    {"benchmark": "startup", "seconds": 61.4, **PRINTED["startup"]},
    {"benchmark": "weight_sync", "seconds": 240.1, "error": "not ended after 240 s: pushing"},
    {"benchmark": "busy", "seconds": 99.0, **PRINTED["busy"]},
    {"benchmark": "observability", "seconds": 7.2, **PRINTED["observability"]},
]


def test_each_ratio_has_a_row_and_each_error_too():
    expected = """\
        ratio            of                                      value  seconds
        startup.first_s  seconds: TRL over relay                   1.5       61
        startup.end_s                                            0.875
        weight_sync      FAILED: not ended after 240 s: pushing             240
        busy.2.relay     slowdown                                 1.75       99
        busy.2.trl                                                  20
        observability    a step: all over nothing                 1.02        7
                                                                   all      408"""
    rows = [row.rstrip() for row in table.format_table(LINES).splitlines()]
    assert rows == textwrap.dedent(expected).splitlines()


def test_the_last_line_has_ratios_and_errors_by_benchmark():
    assert table.summarize(LINES) == {
        "benchmark": "table",
        "seconds": 407.7,
        "errors": {"weight_sync": "not ended after 240 s: pushing"},
        "ratio": {name: printed["ratio"] for name, printed in PRINTED.items()},
    }


def test_figures_are_the_last_object_of_a_benchmark_that_ended_well():
    line = json.dumps({"benchmark": "busy", **PRINTED["busy"]})
    part = json.dumps({"benchmark": "grpo_vs_trl", "compared": "a part", "ratio": 9.0})
    text = f"{part}\nrepeat 1\n{line}\n\nlibrary: a thread was still running\n"
    figures = table.read_figures("busy", text, error=None)
    assert figures == {"benchmark": "busy", **PRINTED["busy"]}
    failed = table.read_figures("busy", text, error="ended with status 1")
    assert failed["error"] == "ended with status 1: library: a thread was still running"
    assert "ratio" not in failed


NOTHING_COMPARED = '{"benchmark": "busy", "compared": "slowdown", "ratio": {"2": {}}}\n'


@pytest.mark.parametrize("text", ["", '{"benchmark": "busy", "step_s": 1.0}\n', NOTHING_COMPARED])
def test_a_benchmark_without_a_ratio_has_an_error(text):
    assert table.read_figures("busy", text, error=None)["error"].startswith("printed no ratio")


def test_each_benchmark_of_make_bench_says_what_its_ratio_compares():
    (names,) = re.findall(r"^BENCH \?= (.*)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert "startup" in names.split()
    for name in names.split():
        code = (ROOT / "benchmarks" / f"{name}.py").read_text()
        for printed in (f'"benchmark": "{name}"', '"compared": "', '"ratio": '):
            assert printed in code, f"{name}: {printed}"


# Programs in place of the benchmarks

GOOD = f"print('''{json.dumps({'benchmark': 'good', **PRINTED['observability']})}''')"
FAILING = "raise SystemExit('the engine did not start')"
HANGING = """
import subprocess, sys
print(subprocess.Popen(["sleep", "60"], start_new_session=True).pid, flush=True)
sys.stdin.read() or __import__("time").sleep(60)
"""


@pytest.mark.medium
def test_benchmarks_that_fail_or_hang_are_named_and_the_others_run(tmp_path, monkeypatch, capsys):
    programs = {"failing": FAILING, "hanging": HANGING, "good": GOOD}
    start = subprocess.Popen

    def start_program(command, **options):
        name = command[2].removeprefix("benchmarks.")
        return start([sys.executable, "-c", programs[name]], **options)

    monkeypatch.setattr(subprocess, "Popen", start_program)
    status = table.main([*programs, "--folder", str(tmp_path), "--limit", "3"])
    assert status == 1

    figures = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    assert [line["benchmark"] for line in figures] == [*programs]
    assert figures[0]["error"] == "ended with status 1: the engine did not start"
    child = (tmp_path / "hanging.log").read_text().strip()
    assert figures[1]["error"] == f"not ended after 3 s: {child}"
    assert 3 <= figures[1]["seconds"] < 30
    assert figures[2]["ratio"] == 1.0234
    assert wait_until_gone([int(child)]) == []

    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["ratio"] == {"good": 1.0234}
    assert list(last["errors"]) == ["failing", "hanging"]


def test_the_status_is_0_without_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(
        table, "run_benchmark", lambda name, **_: {"seconds": 1.0} | LINES[3] | {"benchmark": name}
    )
    assert table.main(["observability", "--folder", str(tmp_path)]) == 0
