import pytest
import torch

from rl.models.batch_invariant.probe import check_machine, check_rows, linear, linear_shapes, row_counts
from rl.models.qwen3 import model_registry

TINY = model_registry("tiny").model


def test_the_tiny_models_layers_pass_in_whole_tiles():
    for dtype in (torch.float32, torch.bfloat16):
        check_machine(TINY, dtype=dtype, max_rows=512)  # type: ignore[arg-type]


def test_a_layer_whose_rows_depend_on_their_number_is_refused_by_machine_dtype_and_width():
    # Products of a few rows are summed in another order here, which is why there are tiles at all.
    message = (
        r"batch_invariant=True: must be False on this machine \(.+, PyTorch 2\..*, \d+ threads\): "
        r"a linear layer 1024 -> 512 in float32 gives other bits in batches of 1.* rows than in tiles of 32"
    )
    layer = linear(1024, 512, dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        check_rows(
            "a linear layer 1024 -> 512", layer, width=1024, dtype=torch.float32, counts=[1, 2, 3, 5, 32]
        )
    check_rows("whole tiles", layer, width=1024, dtype=torch.float32, counts=[32, 64, 96])


def test_a_layer_that_mixes_rows_is_refused():
    with pytest.raises(ValueError, match="centred in float32 gives other bits in batches of 64, 96 rows"):
        check_rows("centred", lambda x: x - x.mean(0), width=8, dtype=torch.float32, counts=row_counts(96))


def test_rows_are_tried_up_to_the_first_whole_tile_that_holds_the_most():
    assert row_counts(1) == [32]
    assert row_counts(100) == [32, 64, 96, 128]
    assert row_counts(2048)[:9] == [32, 64, 96, 128, 160, 192, 224, 256, 352]
    assert row_counts(2050)[-1] == 2080


def test_the_products_are_those_of_one_rank():
    # 8 heads and 4 + 4 key-value heads of 32, feed-forward 384, vocabulary 320, width 128.
    whole = [(128, 512), (256, 128), (128, 768), (384, 128), (128, 320)]
    assert list(linear_shapes(TINY, tensor_parallel_degree=1)) == whole  # type: ignore[arg-type]
    half = [(128, 256), (128, 128), (128, 384), (192, 128), (128, 160)]
    assert list(linear_shapes(TINY, tensor_parallel_degree=2)) == half  # type: ignore[arg-type]
