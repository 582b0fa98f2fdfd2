"""Rotary position embedding, and the scalings of its wavelengths for texts longer than those of
pretraining.

Fields of the scalings have the names of Hugging Face's `rope_parameters`.

Shape legend: P positions, D head size, F = D / 2 frequencies, T tokens, H heads.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rl.config.configurable import Configurable


@dataclass(frozen=True, kw_only=True, slots=True)
class RoPEScaling:
    rope_type: ClassVar[str]
    factor: float
    """Number by which the longest wavelengths are multiplied."""

    @abstractmethod
    def scale(self, frequencies_F: Tensor, *, theta: float) -> Tensor:
        """Return the scaled frequencies, in radians per position."""

    @property
    def magnitude(self) -> float:
        """Factor of all cosines and sines."""
        return 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearScaling(RoPEScaling):
    """Position interpolation: Chen et al. (arXiv:2306.15595)."""

    rope_type: ClassVar[str] = "linear"

    def scale(self, frequencies_F: Tensor, *, theta: float) -> Tensor:
        return frequencies_F / self.factor


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling(RoPEScaling):
    """Scaling of Llama 3.1: long wavelengths are stretched, short ones kept, those between are
    interpolated.
    """

    rope_type: ClassVar[str] = "llama3"
    low_freq_factor: float
    """Rotations within the original context below which a frequency is divided by `factor`."""
    high_freq_factor: float
    """Rotations within the original context above which a frequency is kept."""
    original_max_position_embeddings: int
    """Longest text of the pretraining, in tokens."""

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor}: must be above "
                f"low_freq_factor={self.low_freq_factor}"
            )

    def scale(self, frequencies_F: Tensor, *, theta: float) -> Tensor:
        rotations = self.original_max_position_embeddings * frequencies_F / (2 * math.pi)
        kept = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return torch.lerp(frequencies_F / self.factor, frequencies_F, kept.clamp(0, 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnScaling(RoPEScaling):
    """YaRN: Peng et al. (arXiv:2309.00071), sections 3.2 to 3.4."""

    rope_type: ClassVar[str] = "yarn"
    original_max_position_embeddings: int
    """Longest text of the pretraining, in tokens."""
    beta_fast: float = 32.0
    """Rotations within the original context above which a frequency is kept."""
    beta_slow: float = 1.0
    """Rotations within the original context below which a frequency is divided by `factor`."""
    attention_factor: float | None = None
    """Factor of all cosines and sines; None computes it from `factor`, and `mscale` if there are
    both.
    """
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    """Round the bounds between the kinds of frequencies to whole ones."""

    def scale(self, frequencies_F: Tensor, *, theta: float) -> Tensor:
        num = len(frequencies_F)

        def index(rotations: float) -> float:
            wavelength = self.original_max_position_embeddings / rotations
            return num * math.log(wavelength / (2 * math.pi)) / math.log(theta)

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * num - 1)
        indices = torch.arange(num, dtype=torch.float32, device=frequencies_F.device)
        stretched = ((indices - low) / (high - low or 0.001)).clamp(0, 1)
        return torch.lerp(frequencies_F, frequencies_F / self.factor, stretched)

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor

        def growth(scale: float) -> float:
            return 0.1 * scale * math.log(max(self.factor, 1.0)) + 1.0

        if self.mscale and self.mscale_all_dim:
            return growth(self.mscale) / growth(self.mscale_all_dim)
        return growth(1.0)


SCALINGS: dict[str, type[RoPEScaling]] = {
    kind.rope_type: kind for kind in (LinearScaling, Llama3Scaling, YarnScaling)
}


class RoPE(Configurable, nn.Module):
    """Rotary position embedding from precomputed tables, indexed once per forward."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        theta: float = 1_000_000.0
        """Base of the geometric series of wavelengths."""
        max_positions: int = 40_960
        """Longest supported sequence, in tokens."""
        scaling: RoPEScaling | None = None

    cos_PD: Tensor
    sin_PD: Tensor

    def __init__(self, *, config: Config, head_dim: int) -> None:
        super().__init__()
        self.config = config
        self.head_dim = head_dim
        cos, sin = self._compute_tables()
        self.register_buffer("cos_PD", cos, persistent=False)
        self.register_buffer("sin_PD", sin, persistent=False)

    def _compute_tables(self, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        config = self.config
        exponents = (
            torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device) / self.head_dim
        )
        frequencies, magnitude = 1.0 / config.theta**exponents, 1.0
        if config.scaling is not None:
            frequencies = config.scaling.scale(frequencies, theta=config.theta)
            magnitude = config.scaling.magnitude
        positions = torch.arange(config.max_positions, dtype=torch.float32, device=device)
        angles = torch.outer(positions, frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * magnitude, angles.sin() * magnitude

    def reset_buffers(self) -> None:
        """Recompute the tables after `to_empty` has moved the module off the meta device."""
        self.cos_PD, self.sin_PD = self._compute_tables(self.cos_PD.device)

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [T, 1, D] float32."""
        return self.cos_PD[positions_T].unsqueeze(1), self.sin_PD[positions_T].unsqueeze(1)


def rotate(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotate the halves of each head by the angles of its position, in the input's dtype."""
    first, second = x_THD.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x_THD * cos_T1D + turned * sin_T1D
