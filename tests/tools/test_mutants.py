"""Planted faults: the table fits the tree, and a fault is planted, tested and taken out."""

from pathlib import Path

from tools.mutants import table
from tools.mutants.table import MUTANTS, Mutant, find_stale

ROOT = Path(__file__).parents[2]


def test_every_row_of_the_table_fits_the_tree():
    assert find_stale(ROOT) == []
    assert len({(mutant.file, mutant.original) for mutant in MUTANTS}) == len(MUTANTS)
    assert all(mutant.original != mutant.faulty for mutant in MUTANTS)


def test_row_whose_fragment_or_test_is_gone_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    rows = [
        Mutant(file="a.py", original=original, faulty="x = 2", tests=("test_a.py",))
        for original in ("x = 1", "x = 3")
    ]
    monkeypatch.setattr(table, "MUTANTS", rows)
    first, no_test, second, _ = find_stale(tmp_path)
    assert first == "a.py: 'x = 1' occurs 2 times: must occur once"
    assert second == "a.py: 'x = 3' occurs 0 times: must occur once"
    assert no_test == "a.py: there is no test_a.py"
