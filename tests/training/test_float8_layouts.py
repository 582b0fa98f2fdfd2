"""Float8, alone and with LoRA, gives the numbers of one device in every parallel layout."""

import functools

import pytest

from tests.support.distributed import run_ranks
from tests.training.float8_layouts import (
    FLOAT8,
    KINDS,
    measure,
    measure_all,
    ungathered,
)
from tests.training.parts import assert_near
from tests.training.test_layouts import assert_same_result

pytestmark = [pytest.mark.medium, pytest.mark.timeout(300)]
of_kinds = pytest.mark.parametrize(
    ("layout", "kind"), [(layout, kind) for layout, kinds in KINDS.items() for kind in kinds]
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(measure_all, 2, str(tmp_path_factory.mktemp("float8")), timeout_s=250)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return functools.cache(lambda kind: measure("one", FLOAT8[kind], str(folder / kind)))


@of_kinds
def test_float8_equals_one_device(ranks, one, layout, kind):
    expected = one(ungathered(kind))
    for rank in (rank[layout, kind] for rank in ranks):
        assert rank["num_tokens"]
        assert all(number % 16 == 0 for number in rank["num_tokens"])
        assert_same_result(rank["whole"], expected["whole"])
        assert_near(rank["gradients"], expected["gradients"])
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert_near(rank["parameters"], expected["parameters"])


@of_kinds
def test_precomputed_scales_belong_to_the_current_weights(ranks, layout, kind):
    ahead = kind in ("gathered", "gathered_with_lora")
    for rank in (rank[layout, kind] for rank in ranks):
        for scales in rank["scales"].values():
            assert len(scales) == (8 if ahead else 0)
            assert [scale for scale, _ in scales] == pytest.approx([wanted for _, wanted in scales], rel=1e-6)
        if kind == "gathered":
            assert rank["scales"]["stepped"] != rank["scales"]["loaded"]
        # The all-gather uses these scales: other scales change the loss.
        with_scales, with_other_scales = rank["losses"]
        assert (abs(with_other_scales - with_scales) > 0.1) == ahead
