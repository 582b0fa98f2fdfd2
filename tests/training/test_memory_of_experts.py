"""What a rank holds of a mixture, in floats, worked out by hand."""

import pytest

from rl.distributed.mesh import Degrees
from rl.training.config import TrainingConfig
from rl.training.memory import estimate
from tests.training.moe_layouts import moe_spec

EXPERTS = 6 * 3 * 20 * 36
"""Of one layer."""
LAYER = EXPERTS + (4 + 2 * 2) * 6 * 36 + 4 * 6 * 36 + 6 * 36 + 2 * 6 + 2 * 36
"""And query, key and value, their output, router, norms of the heads and of the layer."""
ALL = 320 * 36 + 2 * LAYER + 36


@pytest.mark.parametrize(
    ("degrees", "num_held", "num_gathered"),
    [
        ({}, ALL, 0),
        ({"dp_shard": 2}, ALL / 2, ALL),
        # Experts stay where they are, half of them on each rank.
        ({"dp_shard": 2, "ep": 2}, ALL / 2, ALL - 2 * EXPERTS / 2),
        # Tensor parallelism splits everything but the experts, or these too.
        ({"tp": 2}, (ALL - 2 * EXPERTS) / 2 + 2 * EXPERTS, 0),
        ({"tp": 2, "etp": 2}, ALL / 2, 0),
    ],
)
def test_parameters_of_a_rank_are_its_share_of_experts_and_of_the_rest(degrees, num_held, num_gathered):
    layout = Degrees(**({"dp_replicate": 1, "dp_shard": 1, "tp": 1} | degrees))
    need = estimate(moe_spec().model, degrees=layout, training=TrainingConfig())
    assert need.parameters == 4 * num_held
    assert need.optimizer == 2 * need.parameters
    assert need.gathered == 4 * num_gathered


def test_activations_grow_with_the_experts_of_a_token():
    training = TrainingConfig(max_tokens_per_microbatch=100)
    one = Degrees(dp_replicate=1, dp_shard=1, tp=1)
    spec = moe_spec()
    before = estimate(spec.model, degrees=one, training=training).activations
    spec.model.block.feed_forward.num_experts_per_token = 3
    after = estimate(spec.model, degrees=one, training=training).activations
    # Of each layer and token, one more copy in and one out, and 4 times the expert's width.
    assert after - before == 100 * 2 * (2 * 36 + 4 * 20) * 4
