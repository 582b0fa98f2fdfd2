"""Options that save memory or time change no number, in any layout."""

import dataclasses
import itertools

import numpy as np
import pytest

from tests.support.distributed import run_ranks
from tests.training.layout_options import EAGER, Options, compiled, measure_options
from tests.training.layouts import LAYOUTS, half_tolerance
from tests.training.parts import make_samples, write_assets

RANKS = {name: num_ranks for name, (num_ranks, _) in LAYOUTS.items()}


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return write_assets(tmp_path_factory.mktemp("assets") / "model")


@pytest.fixture(scope="module")
def expected(assets):
    """On one device without options, in the same dtype."""
    rows = [Options(), Options(param_dtype="bfloat16")]
    return {
        row.param_dtype: each for row, each in zip(rows, measure_options("one", assets, rows), strict=True)
    }


def measure(layout, assets, rows):
    """By rank, by row."""
    if RANKS[layout] == 1:
        return [measure_options(layout, assets, rows)]
    return run_ranks(measure_options, RANKS[layout], layout, assets, rows, timeout_s=280)


def assert_as_on_one_device(measured, expected, *, layout, row, relative=1e-5):
    """In bfloat16 up to its rounding."""
    expected, case = expected[row.param_dtype], f"{layout}: {row}"
    of_loss = of_gradient = relative
    if row.param_dtype == "bfloat16":
        of_loss, of_gradient = 3e-3, half_tolerance(LAYOUTS[layout][1])
    assert measured.result.loss_sum == pytest.approx(expected.result.loss_sum, rel=of_loss), case
    assert measured.result.entropy_mean == pytest.approx(expected.result.entropy_mean, rel=of_loss), case
    assert measured.result.denominator == expected.result.denominator, case
    assert list(measured.gradients) == list(expected.gradients), case
    for name, tensor in expected.gradients.items():
        difference = np.linalg.norm(measured.gradients[name] - tensor) / np.linalg.norm(tensor)
        assert difference <= of_gradient, f"{case}: {name}: {difference}"


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=pytest.mark.slow if num_ranks > 2 else pytest.mark.medium)
        for name, num_ranks in RANKS.items()
    ],
)
def test_options_change_no_number(assets, expected, layout):
    for rank in measure(layout, assets, EAGER):
        for row, measured in zip(EAGER, rank, strict=True):
            assert_as_on_one_device(measured, expected, layout=layout, row=row)
            assert measured.num_graphs == 0


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=pytest.mark.slow if num_ranks > 1 else pytest.mark.medium)
        for name, num_ranks in RANKS.items()
    ],
)
def test_compiling_changes_no_number(assets, expected, layout):
    row = compiled(layout)
    for (measured,) in measure(layout, assets, [row]):
        assert_as_on_one_device(measured, expected, layout=layout, row=row, relative=1e-4)
        assert measured.num_graphs > 0
        assert measured.num_graph_breaks == 0


@pytest.mark.slow
def test_inductor_changes_no_number(assets, expected):
    row = Options(compiled=True, backend="inductor", checkpoint="op")
    ((measured,),) = measure("one", assets, [row])
    assert_as_on_one_device(measured, expected, layout="one", row=row, relative=1e-4)
    assert measured.num_graphs > 0


@pytest.mark.medium
def test_context_parallel_ranks_share_the_tokens(assets, expected):
    ranks = [rank[0].num_tokens for rank in measure("cp2", assets, [Options()])]
    num_tokens = sum(len(sample.token_ids) - 1 for sample in make_samples())
    assert expected["float32"].num_tokens < num_tokens  # one device has a prompt of several samples once
    assert ranks[0] == ranks[1]
    assert num_tokens <= sum(ranks) < num_tokens + 4 * 4  # padding of at most 3 in each micro-batch


def test_every_pair_of_options_and_layouts_is_run():
    run = [
        {"layout": layout, **dataclasses.asdict(row)}
        for layout in LAYOUTS
        for row in (*EAGER, compiled(layout))
    ]
    values = {name: {case[name] for case in run} for name in run[0]}
    for a, b in itertools.combinations(values, 2):
        missing = set(itertools.product(values[a], values[b])) - {(case[a], case[b]) for case in run}
        assert not missing, f"{a}, {b}"
