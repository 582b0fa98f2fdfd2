import asyncio
import functools
import json
import math
import random

import numpy as np
import pytest

from rl.observability.metrics import (
    Last,
    Max,
    Mean,
    Metric,
    MetricsWriter,
    Std,
    Sum,
    merge,
    read_metrics,
    reduce_metric,
)


def test_standard_deviations_merge_exactly():
    # 2, 4, 4, 4, 5, 5, 7, 9 have mean 5 and deviations whose squares sum to 32.
    first = Std(2).merge(Std(4)).merge(Std(4))
    rest = Std(4).merge(Std(5).merge(Std(5))).merge(Std(7).merge(Std(9)))
    assert first.merge(rest).mean == pytest.approx(5)
    assert first.merge(rest).value == pytest.approx(2)
    # The difference of mean square and squared mean would have no digit left here.
    assert Std(1e9).merge(Std(1e9 + 1)).value == 0.5
    assert Std(3.0).value == 0


def test_reductions_of_many_values_are_bit_identical_to_merged_ones():
    rng = random.Random(0)
    for num in (1, 2, 16, 50):
        values = [rng.choice([0.0, 0.1, 1.0, rng.gauss(0, 1e3)]) for _ in range(num)]
        assert Mean.of(values) == functools.reduce(Mean.merge, map(Mean, values))
        assert Std.of(values) == functools.reduce(Std.merge, map(Std, values))
    assert reduce_metric(Mean.of([])) is None


def test_each_reduction_merges_correctly():
    parts: list[dict[str, Metric]] = [
        {"loss": Mean(1.0, 2), "diff": Max(0.5), "tokens": Sum(10), "lr": Last(0.1)},
        {
            "loss": Mean(5.0, 2),
            "diff": Max(0.25),
            "tokens": Sum(7),
            "lr": Last(0.2),
            "extra": Sum(1),
        },
    ]
    merged = merge(parts)
    values = {name: metric.value for name, metric in merged.items()}
    assert values == {"loss": 1.5, "diff": 0.5, "tokens": 17, "lr": 0.2, "extra": 1}


def test_maximum_of_nan_is_nan():
    assert math.isnan(Max(math.nan).merge(Max(1.0)).value)
    assert math.isnan(Max(1.0).merge(Max(math.nan)).value)


def test_line_is_in_the_file_after_each_write(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(
            {"step": 1, "policy_version": 1, "reward/mean": Mean(3.0, 4), "time/step_s": 0.5}
        )
        assert path.read_text() == (
            '{"step": 1, "policy_version": 1, "reward/mean": 0.75, "time/step_s": 0.5}\n'
        )
        writer.write({"step": 1, "eval/correct": 0.25})
    assert read_metrics(path)[1] == {"step": 1, "eval/correct": 0.25}


def test_numbers_that_are_not_finite_are_restored(tmp_path):
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    with MetricsWriter(tmp_path / "m") as writer:
        empty = {"none": None, "mean": Mean(0.0, 0)}
        writer.write(
            {
                "step": 1,
                "a": math.nan,
                "b": math.inf,
                "c": Max(-math.inf),
                "d": np.float32("nan"),
                **empty,
            }
        )
    line = json.loads((tmp_path / "m").read_text(), parse_constant=refuse)
    assert line == {"step": 1, "a": "nan", "b": "inf", "c": "-inf", "d": "nan"}
    (record,) = read_metrics(tmp_path / "m")
    assert math.isnan(record["a"])
    assert (record["b"], record["c"]) == (math.inf, -math.inf)


def test_damaged_lines_are_skipped(tmp_path):
    (tmp_path / "m").write_text(
        '{"step": 1}\n{"reward/mean": 1}\n[]\n\0\n{"step": 2}\n{"step": 3, "rew'
    )
    assert read_metrics(tmp_path / "m") == [{"step": 1}, {"step": 2}]
    assert read_metrics(tmp_path / "none") == []


def test_metrics_of_older_runs_have_their_present_names(tmp_path):
    (tmp_path / "m").write_text(
        '{"step": 1, "age/mean": 0.5, "age/max": 2, "time/canary_s": 0.125, '
        '"canary/logprob_diff": "nan", "time/step_s": 3.0}\n'
        '{"step": 2, "staleness/mean": 0.25, "staleness/max": 1, "parity/logprob_diff": 1e-6}\n'
    )
    first, second = read_metrics(tmp_path / "m")
    assert math.isnan(first.pop("parity/logprob_diff"))
    assert first == {
        "step": 1,
        "staleness/mean": 0.5,
        "staleness/max": 2,
        "time/parity_s": 0.125,
        "time/step_s": 3.0,
    }
    assert second == {
        "step": 2,
        "staleness/mean": 0.25,
        "staleness/max": 1,
        "parity/logprob_diff": 1e-6,
    }


def test_writer_counts_earlier_lines(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        assert writer.num_records == 0
        for step in (1, 2):
            writer.write({"step": step})
        asyncio.run(writer.flush_to_disk())
        assert writer.num_records == 2
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write({"step": 3})
        assert writer.num_records == 3
