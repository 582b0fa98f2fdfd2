"""What a rank holds of a mixture, in floats, worked out by hand; `test_memory.py` compares peaks."""

import math

import pytest

from rl.distributed.mesh import Degrees
from rl.models.qwen3.model import Qwen3
from rl.training.config import TrainingConfig
from rl.training.memory import estimate
from tests.training.moe_layouts import moe_spec

EXPERTS = 6 * 3 * 20 * 36
"""Of one layer."""
LAYER = EXPERTS + (4 + 2 * 2) * 6 * 36 + 4 * 6 * 36 + 6 * 36 + 2 * 6 + 2 * 36
"""And query, key and value, their output, router, norms of the heads and of the layer."""
ALL = 320 * 36 + 2 * LAYER + 36


def estimated(layout):
    model = moe_spec().model
    assert isinstance(model, Qwen3.Config)
    return estimate(model, degrees=layout, training=TrainingConfig())


@pytest.mark.parametrize(
    ("degrees", "num_held"),
    [
        ({}, ALL),
        ({"dp_shard": 2}, ALL / 2),
        # Experts stay where they are, half of them on each rank.
        ({"dp_shard": 2, "ep": 2}, ALL / 2),
        # Tensor parallelism splits everything but the experts, or these too.
        ({"tp": 2}, (ALL - 2 * EXPERTS) / 2 + 2 * EXPERTS),
        ({"tp": 2, "etp": 2}, ALL / 2),
        ({"dp_shard": 4, "ep": 2, "tp": 2}, (ALL - 2 * EXPERTS) / 8 + 2 * EXPERTS / 4),
    ],
)
def test_a_rank_holds_its_share_of_experts_and_of_the_rest(degrees, num_held):
    layout = Degrees(**({"dp_replicate": 1, "dp_shard": 1, "tp": 1} | degrees))
    need = estimated(layout)
    assert need.parameters == need.gradients == 4 * math.ceil(num_held)
    assert need.optimizer == 2 * need.parameters


ROOT = 320 * 36 + 36
REST = LAYER - EXPERTS


@pytest.mark.parametrize(
    ("degrees", "num_gathered"),
    [
        ({}, 0),
        ({"tp": 2}, 0),
        # Two blocks beside the root, and gradients: the root's, a block's and a copy of the block's.
        ({"dp_shard": 2}, 2 * ROOT + 4 * LAYER),
        # A rank's own experts are whole already: those of both layers, a gradient and its copy.
        ({"dp_shard": 2, "ep": 2}, 2 * ROOT + 4 * REST + (2 + 1 + 1) * EXPERTS / 2),
        # One layer's half of the experts, and their gradients.
        ({"dp_shard": 4, "ep": 2}, 2 * ROOT + 4 * REST + 2 * EXPERTS / 2),
    ],
)
def test_experts_are_gathered_among_the_ranks_that_have_the_same(degrees, num_gathered):
    layout = Degrees(**({"dp_replicate": 1, "dp_shard": 1, "tp": 1} | degrees))
    need = estimated(layout)
    assert need.gathered == 4 * num_gathered
