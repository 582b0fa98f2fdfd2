"""Which faults the chaos test puts into runs."""

from itertools import product

import pytest

from actors.fault_injection import VICTIMS, parse_fault
from tools.chaos.cases import PHASES, all_cases, fixed_cases, random_cases
from tools.chaos.main import main


def test_every_victim_dies_in_every_phase():
    cases = all_cases()
    assert {(c.fault.phase, c.fault.victim) for c in cases} == set(product(PHASES, VICTIMS))
    assert len({case.name for case in cases}) == len(cases) == 35


def test_a_case_is_told_to_its_run_by_its_text():
    assert all(parse_fault(str(case.fault)) == case.fault for case in all_cases())


def test_only_a_host_that_is_killed_is_asked_for():
    hosts = [case for case in all_cases() if case.options]
    assert {case.fault.victim for case in hosts} == {"host"}
    assert {case.options for case in hosts} == {("--launch.hosts", "process")}


def test_random_cases_are_those_of_their_seed_and_fall_into_the_first_three_steps():
    cases = random_cases(200, seed=3)
    assert cases == random_cases(200, seed=3)
    assert cases != random_cases(200, seed=4)
    assert {case.fault.victim for case in cases} == set(VICTIMS)
    assert max(c.fault.count for c in cases if c.fault.phase == "push") == 3
    assert all(0 <= case.fault.delay_s <= 0.3 for case in cases)


def test_the_short_version_has_all_victims_but_the_host():
    assert {case.fault.victim for case in fixed_cases()} == {"generator", "trainer", "host", "controller"}


@pytest.mark.parametrize("options", [["--runs", "0"], ["--limit_s", "-1"], ["--victims", "nobody"]])
def test_options_that_cannot_be_are_refused(options, capsys):
    with pytest.raises(SystemExit) as refused:
        main(options)
    assert refused.value.code == 2
    assert options[0] in capsys.readouterr().err
