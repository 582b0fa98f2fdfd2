"""Scaled rotary embeddings, compared with transformers'."""

from typing import Any

import pytest
import torch

from rl.models.adapter import describe_rope, read_rope

HEAD_DIM, THETA, POSITIONS = 64, 500_000.0, 4096
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
SCALED: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "yarn": YARN,
    "yarn without rounding": YARN | {"truncate": False, "beta_fast": 16, "beta_slow": 2.0},
    "yarn with a factor": YARN | {"attention_factor": 0.8},
    "yarn with mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    # Both bounds are the first frequency.
    "yarn of a short context": YARN | {"original_max_position_embeddings": 4},
}


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
def test_tables_equal_those_of_transformers(name, form):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    given = SCALED[name] | ({"rope_theta": THETA} if form == "rope_parameters" else {})
    hf = {"max_position_embeddings": POSITIONS, "rope_theta": THETA, form: given}
    rope = read_rope(hf)
    assert (
        read_rope({"max_position_embeddings": POSITIONS, "rope_parameters": describe_rope(rope)})
        == rope
    )
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM, num_attention_heads=4, max_position_embeddings=POSITIONS,
        rope_parameters=describe_rope(rope),
    )  # fmt: skip
    positions = torch.arange(0, POSITIONS, 7)
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    ours = rope.build(head_dim=HEAD_DIM)(positions)
    for table, expected in zip(ours, theirs, strict=True):
        # Angles reach 4,096 radians, of which float32 keeps 2.4e-4.
        torch.testing.assert_close(table[:, 0], expected[0], atol=5e-4, rtol=0)
        torch.testing.assert_close(table[:4, 0], expected[0, :4], atol=1e-6, rtol=1e-6)


def test_llama3_keeps_short_wavelengths_and_stretches_long_ones():
    rope = read_rope({"max_position_embeddings": POSITIONS, "rope_scaling": SCALED["llama3"]})
    assert rope.theta == 10_000.0
    assert rope.scaling is not None
    frequencies = torch.tensor([2048.0, 4.0, 2.5, 1.0, 0.1]) * 2 * torch.pi / 2048
    ratios = rope.scaling.scale(frequencies, theta=rope.theta) / frequencies
    # 2.5 rotations are half-way between 1 and 4.
    torch.testing.assert_close(ratios, torch.tensor([1.0, 1.0, 0.5 + 0.5 / 32, 1 / 32, 1 / 32]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_type": "longrope"}, "'longrope'.*must be one of default, linear, llama3, yarn"),
        ({"rope_type": "yarn", "factor": -1.0}, "factor=-1.0: must be a positive number"),
        (
            {"rope_type": "yarn", "factor": 2.0, "truncate": "no"},
            "truncate='no': must be true or false",
        ),
        (
            {"rope_type": "linear", "factor": 2.0, "beta_fast": 1},
            "has beta_fast: 'linear' has no such field",
        ),
        (
            SCALED["llama3"] | {"high_freq_factor": 1.0},
            "high_freq_factor=1.0: must be above low_freq_factor",
        ),
        (
            {"rope_type": "default", "partial_rotary_factor": 0.5},
            "partial_rotary_factor=0.5 is not supported",
        ),
    ],
)
def test_unsupported_scaling_is_rejected(change, message):
    with pytest.raises(ValueError, match=message):
        read_rope({"max_position_embeddings": POSITIONS, "rope_parameters": change})
