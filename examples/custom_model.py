"""A model family of your own: IBM's Granite, which is Llama with four multipliers (docs/models.md).

    python -m rl.train --module examples.custom_model --config tiny
    python -m rl.train --module examples.custom_model --config granite \
        --hf_assets_path /models/granite-3.3-2b

The layers, both parallel plans, LoRA, the loading of folders and the generator's attention are
relay's own. A family says where it computes differently, and what its config.json and its tensors
are called.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from actors.controller import Controller
from configs import sum_digits
from rl.models.adapter import DecoderAdapter, read_field
from rl.models.decoder import Decoder, FeedForward, TransformerBlock
from rl.models.layers.rope import RoPE
from rl.models.spec import ModelSpec, register_family, spec_of_flavor

MULTIPLIERS = {
    "embedding_multiplier": 4.0, "attention_multiplier": 0.125, "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}  # fmt: skip
"""Fields of config.json, with the values of the tiny model."""


class GraniteBlock(TransformerBlock):
    """Block whose attention and feed-forward layers are multiplied before they are added."""

    @dataclass(kw_only=True, slots=True)
    class Config(TransformerBlock.Config):
        residual_multiplier: float
        """Factor of what a layer adds to its input."""

    def __init__(self, *, config: Config, **runtime: Any) -> None:
        super().__init__(config=config, **runtime)
        self.factor = config.residual_multiplier

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sequences: Any) -> Tensor:
        x = x + self.factor * self.attention(self.attention_norm(x), cos, sin, sequences)
        return x + self.factor * self.feed_forward(self.ffn_norm(x))


class GraniteDecoder(Decoder):
    """Decoder with factors for embeddings, attention scores and logits."""

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        embedding_multiplier: float
        """Factor of the embeddings."""
        attention_multiplier: float
        """Factor of the scores of attention, in place of 1 / sqrt(head size)."""
        logits_scaling: float
        """Divisor of the logits."""

    config: Config

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) * self.config.embedding_multiplier

    def tables(self, rope: RoPE, positions: Tensor, *, dtype: Any) -> tuple[Tensor, Tensor]:
        # Queries and keys are multiplied by the same tables, and so the scores by the square of
        # this factor. So every attention of relay's, the generator's too, can stay as it is.
        factor = (
            self.config.attention_multiplier * self.config.block.attention.head_dim**0.5
        ) ** 0.5
        cos, sin = rope(positions)
        return (cos * factor).to(dtype), (sin * factor).to(dtype)

    def normed(self, x: Tensor) -> Tensor:
        # The head is linear, so this divides the logits.
        return super().normed(x) / self.config.logits_scaling


@register_family
class GraniteAdapter(DecoderAdapter):
    """Names and fields of Granite's config.json; its tensors are called as Llama's are."""

    model_type = "granite"
    architecture = "GraniteForCausalLM"

    @classmethod
    def sized(
        cls, *, multipliers: dict[str, float] = MULTIPLIERS, **sizes: Any
    ) -> GraniteDecoder.Config:
        # Llama's config, with one multiplier in each block and the others in the decoder.
        base, of_decoder = super().sized(**sizes), dict(multipliers)
        block = GraniteBlock.Config(
            **list_fields(base.block), residual_multiplier=of_decoder.pop("residual_multiplier")
        )
        return GraniteDecoder.Config(**list_fields(base) | of_decoder | {"block": block})

    @classmethod
    def switches_from_hf(cls, hf: dict[str, Any]) -> dict[str, Any]:
        # A multiplier that the folder does not name is 1.
        read = {name: read_field(hf, name, float, 1.0) for name in MULTIPLIERS}
        return super().switches_from_hf(hf) | {"multipliers": read}

    def hf_config(self) -> dict[str, Any]:
        known = list_fields(self.config.block) | list_fields(self.config)
        return super().hf_config() | {name: known[name] for name in MULTIPLIERS}


def list_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a config by name; nested configs stay as they are."""
    return {f.name: getattr(config, f.name) for f in fields(config)}


def model_registry(flavor: str) -> ModelSpec:
    """Return the spec of a size by name; folders say their sizes themselves."""
    tiny = GraniteAdapter.sized(
        dim=128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32, vocab_size=320,
        max_positions=1024,
        theta=10_000.0, init_std=0.06, feed_forward=FeedForward.Config(hidden_dim=384),
        multipliers=MULTIPLIERS,
    )  # fmt: skip
    return spec_of_flavor(flavor, {"tiny": tiny}, adapter=GraniteAdapter)


def tiny(config: Controller.Config | None = None) -> Controller.Config:
    """Train 0.8M parameters that the run creates and warms up itself, on two CPU cores."""
    config = config or sum_digits.tiny()
    config.description = "Granite of 0.8M parameters on sum-digits"
    config.model = model_registry("tiny")
    return config


def tiny_tp2() -> Controller.Config:
    """Tensor parallelism over two processes, in the trainer and in the generator."""
    return tiny(sum_digits.tiny_tp2())


def granite() -> Controller.Config:
    """A checkpoint of any size on one GPU or two; its folder says the family and the sizes."""
    config = sum_digits.qwen3_0_6b()
    config.description, config.model = "Granite on sum-digits", None
    config.hf_assets_path = "./assets/granite"
    return config
