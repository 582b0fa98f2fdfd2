"""Adam, AdamW and Muon over the model's parameters, whole or sharded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rl.config.configurable import Configurable
from rl.models.adapter import DecoderAdapter
from rl.training.config import check_refused
from rl.training.muon import Muon, MuonConfig, check_momentum, is_hidden_matrix
from rl.types import OptimParams


class Optimizer(Configurable):
    """Adam, AdamW or Muon with settings that a caller can replace for one step.

    Weight decay applies to every parameter, norms and embeddings included.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        name: Literal["AdamW", "Adam", "Muon"] = "AdamW"
        """AdamW decays weights apart from the gradient, Adam within it; Muon steps the matrices of the blocks, and
        AdamW all other parameters."""
        lr: float = 1e-5
        """Peak learning rate; the schedule scales it."""
        betas: tuple[float, float] = (0.9, 0.95)
        """Decay of the running means of the gradient and of its square."""
        eps: float = 1e-8
        """Added to the root of the second mean to avoid division by zero."""
        weight_decay: float = 0.0
        """Decay of every parameter in each step as a multiple of lr, including norms and embeddings."""
        implementation: Literal["fused", "foreach", "for-loop"] = "fused"
        """One kernel for all parameters, one per operation, or one per operation and parameter; Adam and AdamW
        only."""
        muon: MuonConfig = field(default_factory=MuonConfig)
        """Settings of Muon; refused for other names."""
        early_step_in_backward: bool = False
        """Step each parameter during backward; refused."""

        def __post_init__(self) -> None:
            check_refused(self)
            _check_settings(lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)
            self.muon.__post_init__()  # Callers may have edited fields.
            if self.name != "Muon" and self.muon != MuonConfig():
                raise ValueError(
                    f"muon={self.muon} has no effect with name={self.name!r}: leave its defaults"
                )

    def __init__(
        self,
        *,
        config: Config,
        parameters: Mapping[str, nn.Parameter],
        adapter: DecoderAdapter | None = None,
    ) -> None:
        """
        Args:
            parameters: by name; frozen ones are skipped.
            adapter: splits parameters into matrices for Muon.
        """
        self.config = config
        self.muon: Muon | None = None
        parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        if config.name == "Muon":
            matrices = {name: p for name, p in parameters.items() if is_hidden_matrix(name, p)}
            self.muon = Muon(config=config.muon, parameters=matrices, adapter=adapter)
            parameters = {name: p for name, p in parameters.items() if name not in matrices}
        make = torch.optim.Adam if config.name == "Adam" else torch.optim.AdamW
        self.inner: torch.optim.Optimizer = make(
            [{"params": list(parameters.values())}],
            **self._adam_settings(self.settings(lr=config.lr)),
            fused=config.implementation == "fused",
            foreach=config.implementation == "foreach",
        )

    def settings(self, *, lr: float, params: OptimParams | None = None) -> dict[str, Any]:
        """Return the settings of one step: the configured ones, `lr` of the schedule, and then `params`.

        Raises:
            ValueError: a setting is out of range.
        """
        settings: dict[str, Any] = {
            "lr": lr,
            "betas": tuple(self.config.betas),
            "eps": self.config.eps,
            "weight_decay": self.config.weight_decay,
        }
        if self.muon is not None:
            settings["momentum"] = self.config.muon.momentum
        if params is not None:
            if params.momentum is not None and self.muon is None:
                raise ValueError(
                    f"momentum={params.momentum}: is Muon's; optimizer.name={self.config.name!r} has betas"
                )
            given = {name: getattr(params, name) for name in settings}
            settings |= {name: value for name, value in given.items() if value is not None}
        _check_settings(**settings)
        return settings

    def step(self, settings: dict[str, Any]) -> None:
        """Update the parameters from their gradients with the result of `settings`."""
        for group in self.inner.param_groups:
            group.update(self._adam_settings(settings))
        if self.muon is not None:
            self.muon.step(
                lr=settings["lr"], weight_decay=settings["weight_decay"], momentum=settings["momentum"]
            )
        self.inner.step()  # Last, so that its hooks find every parameter stepped.

    @staticmethod
    def _adam_settings(settings: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in settings.items() if name != "momentum"}

    def reset(self) -> None:
        """Drop the running means."""
        self.inner.state.clear()
        if self.muon is not None:
            self.muon.momenta.clear()

    def state_tensors(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """Return the running means of each parameter and Adam's step count, creating missing ones.

        The tensors are not copied, so writing into them restores a state.
        """
        parameters = [p for group in self.inner.param_groups for p in group["params"]]
        for parameter in parameters:
            state = self.inner.state[parameter]
            if not state:
                device = parameter.device if self.config.implementation == "fused" else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        states: dict[nn.Parameter, dict[str, Tensor]] = {p: self.inner.state[p] for p in parameters}
        if self.muon is not None:
            matrices = self.muon.parameters.values()
            states |= {p: {"momentum_buffer": self.muon.momentum_of(p)} for p in matrices}
        return states


def _check_settings(
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    momentum: float | None = None,
) -> None:
    if not 0.0 <= lr < float("inf"):
        raise ValueError(f"lr={lr}: must be a finite number of at least 0")
    if not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas={betas}: each must be at least 0 and below 1")
    if not eps >= 0.0:
        raise ValueError(f"eps={eps}: must be at least 0")
    if momentum is not None:
        check_momentum(momentum)
    if not weight_decay >= 0.0:
        raise ValueError(f"weight_decay={weight_decay}: must be at least 0")
