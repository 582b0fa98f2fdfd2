"""Options that save memory or time change no number of a model with converters, in any layout."""

import dataclasses
import itertools

import numpy as np
import pytest

from tests.support.distributed import run_ranks
from tests.training import layout_options
from tests.training.converter_layouts import even_spec, write_adapter
from tests.training.converter_options import COMPILED, EAGER, measure_converters, row, rows_of
from tests.training.layouts import LAYOUTS, half_tolerance


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    return write_adapter(tmp_path_factory.mktemp("adapter") / "start", even_spec(), scale=0.02)


@pytest.fixture(scope="module")
def expected(adapter):
    """On one device without options, by converters and dtype."""
    dtypes = ("float32", "bfloat16")
    rows = [row(name, "none", dtype) for name in ("lora", "float8", "float8_lora") for dtype in dtypes]
    measured = measure_converters("one", adapter, rows)
    return {(each.converters, each.options.param_dtype): m for each, m in zip(rows, measured, strict=True)}


def assert_as_on_one_device(measured, expected, *, layout, row):
    """In bfloat16 up to its rounding, which moves some numbers to the next of float8: measured 0.067."""
    one = expected[row.converters, row.options.param_dtype]
    of_loss = of_gradient = 1e-4 if row.options.compiled else 1e-5
    if row.options.param_dtype == "bfloat16":
        of_loss = 3e-3
        of_gradient = 0.13 if "float8" in row.converters else half_tolerance(LAYOUTS[layout][1])
    assert measured.loss_sum == pytest.approx(one.loss_sum, rel=of_loss), row
    assert list(measured.gradients) == list(one.gradients), row
    for name, tensor in one.gradients.items():
        difference = np.linalg.norm(measured.gradients[name] - tensor)
        assert difference <= of_gradient * np.linalg.norm(tensor), f"{layout}: {row}: {name}: {difference}"
        assert np.linalg.norm(tensor) > 0.0


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.medium if name == "one" else pytest.mark.slow) for name in LAYOUTS],
)
def test_options_change_no_number(adapter, expected, layout):
    eager = [each for each in rows_of(layout) if not each.options.compiled]
    ranks = run_ranks(measure_converters, LAYOUTS[layout][0], layout, adapter, eager, timeout_s=200)
    for rank in ranks:
        for each, measured in zip(eager, rank, strict=True):
            assert_as_on_one_device(measured, expected, layout=layout, row=each)


@pytest.mark.slow
@pytest.mark.parametrize("layout", COMPILED)
def test_compiling_changes_no_number(adapter, expected, layout):
    each = COMPILED[layout]
    for (measured,) in run_ranks(
        measure_converters, LAYOUTS[layout][0], layout, adapter, [each], timeout_s=200
    ):
        assert_as_on_one_device(measured, expected, layout=layout, row=each)


def test_every_pair_of_converters_options_and_layouts_is_run():
    names = ("checkpoint", "compiled", "cpu_offload", "param_dtype")

    def case(layout, converters, options):
        chosen = {name: value for name, value in dataclasses.asdict(options).items() if name in names}
        return {"layout": layout, "converters": converters} | chosen

    run = [case(layout, each.converters, each.options) for layout in LAYOUTS for each in rows_of(layout)]
    plain = [
        case(layout, None, options)
        for layout in LAYOUTS
        for options in (*layout_options.EAGER, layout_options.compiled(layout))
    ]
    values = {name: {each[name] for each in run} for name in run[0]}
    assert values["checkpoint"] == {"none", "full", "op", "2"}
    assert values["converters"] == {"lora", "float8", "float8_lora"}
    for a, b in itertools.combinations(values, 2):
        # Each layout compiles without converters.
        cases = run if "converters" in (a, b) else run + plain
        missing = set(itertools.product(values[a], values[b])) - {(each[a], each[b]) for each in cases}
        assert not missing, f"{a}, {b}"
    assert sum(len(rows) for rows in EAGER) == 12  # each converter under each checkpointing
