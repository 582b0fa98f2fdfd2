import pytest

from rl.data.difficulty import DifficultyFilter, PassRates, read_pass_rates, write_pass_rates


@pytest.mark.parametrize(
    ("rate", "kept"), [(0.0, False), (0.1, True), (0.5, True), (0.9, True), (1, False), (None, True)]
)
def test_rates_between_the_bounds_are_kept_both_included(rate, kept):
    rates = PassRates(DifficultyFilter(column="rate", min=0.1, max=0.9))
    assert rates.keeps("x", {"rate": rate}) is kept


def test_rows_without_a_rate_are_dropped_if_asked():
    rates = PassRates(DifficultyFilter(column="rate", unrated="drop"))
    assert not rates.keeps("x", {"rate": None})


@pytest.mark.parametrize("rate", [1.5, -0.1, float("nan"), "0.5", True])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ValueError, match=r"rate=.* is not a number from 0 to 1"):
        PassRates(DifficultyFilter(column="rate")).keeps("x", {"rate": rate})


def test_rates_that_are_written_are_read_again(tmp_path):
    rates = {"train.jsonl:1": 0.125, 'ü "quoted"': 1.0}
    write_pass_rates(tmp_path / "rates.jsonl", rates)
    assert read_pass_rates(str(tmp_path / "rates.jsonl")) == rates
    assert [path.name for path in tmp_path.iterdir()] == ["rates.jsonl"]
    with pytest.raises(ValueError, match="pass_rate=nan is not a number from 0 to 1"):
        write_pass_rates(tmp_path / "rates.jsonl", {"a": float("nan")})
    assert read_pass_rates(str(tmp_path / "rates.jsonl")) == rates


def test_rates_are_read_from_what_an_evaluation_wrote(tmp_path):
    file = tmp_path / "rates.jsonl"
    file.write_text('{"id": "a", "pass_rate": 0.25, "num": 4}\n\n{"id": 7, "pass_rate": 1}\n')
    assert read_pass_rates(str(file)) == {"a": 0.25, "7": 1.0}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"id": "b"}', "line 2: needs the keys 'id' and 'pass_rate', has ['id']"),
        ("3", "line 2: needs the keys 'id' and 'pass_rate', has 3"),
        ('{"id": "a", "pass_rate": 1}', "line 2: problem 'a' is rated twice"),
        ('{"id": "b", "pass_rate": 2}', "line 2: pass_rate=2 is not a number from 0 to 1"),
        ("{", "line 2: not JSON"),
    ],
)
def test_a_bad_line_of_the_rates_is_named(tmp_path, line, said):
    file = tmp_path / "rates.jsonl"
    file.write_text('{"id": "a", "pass_rate": 0}\n' + line)
    with pytest.raises(ValueError, match=r"rates\.jsonl, ") as caught:
        read_pass_rates(str(file))
    assert said in str(caught.value)


def test_a_missing_file_of_rates_is_named():
    with pytest.raises(ValueError, match=r"difficulty\.file='nowhere\.jsonl' is no local file"):
        read_pass_rates("nowhere.jsonl")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "column=None, file=None: one of the two"),
        ({"column": "rate", "file": "rates.jsonl"}, "one of the two"),
        ({"column": "rate", "min": 0.5, "max": 0.4}, "min=0.5, max=0.4"),
    ],
)
def test_settings_that_say_nothing_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        DifficultyFilter(**settings)
