"""Rotary position embedding, and scalings of its wavelengths for longer texts than in pretraining.

A pair of dimensions turns by one frequency, in radians per position. High frequencies make many
rotations within the pretraining's context and carry over to longer texts; low frequencies have not
made a whole rotation there, so scalings stretch their wavelengths. The scalings differ in what they
do between the two. Their fields have the names of Hugging Face's `rope_parameters`.

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
    """Base of the scalings; a subclass is registered in `SCALINGS`."""

    rope_type: ClassVar[str]
    """Name in a `config.json`."""
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
    """Scaling of Llama 3.1: long wavelengths grow, short ones stay, others are interpolated."""

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
        # 0 where the frequency is divided by the factor, 1 where it stays.
        share = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return torch.lerp(frequencies_F / self.factor, frequencies_F, share.clamp(0, 1))


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
    """Factor of all cosines and sines; None computes it from `factor` and the two `mscale`."""
    mscale: float | None = None
    """Weight of the logarithm in the factor's numerator; counts if `mscale_all_dim` is given too.
    """
    mscale_all_dim: float | None = None
    """Weight of the logarithm in the factor's denominator."""
    truncate: bool = True
    """Round the bounds between the kinds of frequencies to whole numbers."""

    def scale(self, frequencies_F: Tensor, *, theta: float) -> Tensor:
        num_frequencies = len(frequencies_F)
        low = self._find_index(self.beta_fast, theta=theta, num_frequencies=num_frequencies)
        high = self._find_index(self.beta_slow, theta=theta, num_frequencies=num_frequencies)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        # The upper bound is that of dimensions, not of frequencies, as in the authors' code and in
        # transformers.
        low, high = max(low, 0), min(high, 2 * num_frequencies - 1)

        # 0 where the frequency stays, 1 where it is divided by the factor.
        indices = torch.arange(num_frequencies, dtype=torch.float32, device=frequencies_F.device)
        share = ((indices - low) / (high - low or 0.001)).clamp(0, 1)
        return torch.lerp(frequencies_F, frequencies_F / self.factor, share)

    def _find_index(self, rotations: float, *, theta: float, num_frequencies: int) -> float:
        """Return where in the series lies the frequency with so many rotations in the context."""
        wavelength = self.original_max_position_embeddings / rotations
        return num_frequencies * math.log(wavelength / (2 * math.pi)) / math.log(theta)

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._compute_growth(self.mscale) / self._compute_growth(self.mscale_all_dim)
        return self._compute_growth(1.0)

    def _compute_growth(self, scale: float) -> float:
        return 0.1 * scale * math.log(max(self.factor, 1.0)) + 1.0


SCALINGS: dict[str, type[RoPEScaling]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
}
"""Scalings by their `rope_type`."""


class RoPE(Configurable, nn.Module):
    """Rotary position embedding from precomputed tables, indexed once per forward."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Wavelengths, their scaling, and the length of the tables."""

        theta: float = 1_000_000.0
        """Base of the geometric series of wavelengths."""
        max_positions: int = 40_960
        """Longest supported sequence, in tokens."""
        scaling: RoPEScaling | None = None
        """Scaling of the wavelengths; None leaves them as in pretraining."""

    cos_PD: Tensor
    sin_PD: Tensor

    def __init__(self, *, config: Config, head_dim: int) -> None:
        super().__init__()
        self.config = config
        self.head_dim = head_dim
        # Not persistent: checkpoints do not have the tables, which every process can compute.
        cos, sin = self._compute_tables()
        self.register_buffer("cos_PD", cos, persistent=False)
        self.register_buffer("sin_PD", sin, persistent=False)

    def _compute_tables(self, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        config = self.config
        # In float32 in every dtype of the model: bfloat16 does not tell large positions apart.
        dims = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device)
        frequencies_F = 1.0 / config.theta ** (dims / self.head_dim)
        magnitude = 1.0
        if config.scaling is not None:
            frequencies_F = config.scaling.scale(frequencies_F, theta=config.theta)
            magnitude = config.scaling.magnitude

        positions_P = torch.arange(config.max_positions, dtype=torch.float32, device=device)
        angles_PF = torch.outer(positions_P, frequencies_F)
        angles_PD = torch.cat((angles_PF, angles_PF), dim=-1)
        return angles_PD.cos() * magnitude, angles_PD.sin() * magnitude

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
