import numpy as np

from tests.models.qwen3_moe.generator_ranks import compute
from tests.support.distributed import run_ranks


def test_two_ranks_compute_what_one_does_with_a_part_of_every_expert():
    ranks = run_ranks(compute, 2, timeout_s=50)
    blocks = {
        f"layers.{i}.{name}": placement
        for i in (0, 1)
        for name, placement in (
            ("attention.qkv_proj.weight", "S(0)"),
            ("attention.o_proj.weight", "S(1)"),
            ("feed_forward.experts.gate_up_proj", "S(1)"),
            ("feed_forward.experts.down_proj", "S(2)"),
        )
    }
    for rank in ranks:
        np.testing.assert_allclose(rank["sharded"], rank["whole"], atol=2e-5, rtol=0)
        assert np.abs(rank["whole"]).max() > 3
        assert rank["placements"] == {"embed_tokens.weight": "S(0)", "lm_head.weight": "S(0)"} | blocks
        assert rank["same_names"]
        assert rank["same_values"]
    # Ranks draw tokens from these: they must be the same bits.
    assert np.array_equal(ranks[0]["sharded"], ranks[1]["sharded"])
