import torch
from torch import nn

from rl.models import qwen3, qwen3_moe
from rl.models.buffers import persistent_buffers


class Theirs(nn.Module):
    """A module of others, as a generator's attention is."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))


def test_buffers_of_ours_that_are_saved_are_the_only_ones():
    with torch.device("meta"):
        dense = qwen3.model_registry("tiny").model.build()
        mixture = qwen3_moe.model_registry("tiny").model.build(core_attention=lambda layer: Theirs())
    assert persistent_buffers(dense) == {}
    assert [name for name in mixture.state_dict() if name.endswith("scale")]
    assert list(persistent_buffers(mixture)) == [
        f"layers.{i}.feed_forward.router.load_balance_bias" for i in range(3)
    ]
