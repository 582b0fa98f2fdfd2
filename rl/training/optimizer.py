"""Adam and AdamW over the model's parameters, whole or sharded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rl.config.configurable import Configurable
from rl.types import OptimParams


class Optimizer(Configurable):
    """PyTorch's optimizer with settings that a caller may replace for one step.

    Weight decay applies to every parameter, norms and embeddings included.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        name: Literal["AdamW", "Adam"] = "AdamW"
        """AdamW decays weights apart from the gradient; Adam adds the decay to it."""
        lr: float = 1e-5
        """Peak learning rate; the schedule scales it."""
        betas: tuple[float, float] = (0.9, 0.95)
        """Decay of the running means of the gradient and of its square."""
        eps: float = 1e-8
        """Added to the root of the second mean, against division by zero."""
        weight_decay: float = 0.0
        """Share of lr by which every parameter shrinks each step, norms and embeddings too."""
        implementation: Literal["fused", "foreach", "for-loop"] = "fused"
        """One kernel for all parameters, one per operation, or one per operation and parameter."""

        def __post_init__(self) -> None:
            _check_settings(lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)

    def __init__(self, *, config: Config, parameters: Iterable[nn.Parameter]) -> None:
        self.config = config
        make = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}[config.name]
        self.inner: torch.optim.Optimizer = make(
            list(parameters),
            **self.settings(lr=config.lr),
            fused=config.implementation == "fused",
            foreach=config.implementation == "foreach",
        )

    def settings(self, *, lr: float, params: OptimParams | None = None) -> dict[str, Any]:
        """What one step uses: the configured settings, `lr` of the schedule, and then `params`.

        Raises:
            ValueError: for a setting out of range.
        """
        settings: dict[str, Any] = {
            "lr": lr,
            "betas": tuple(self.config.betas),
            "eps": self.config.eps,
            "weight_decay": self.config.weight_decay,
        }
        if params is not None:
            given = {name: getattr(params, name) for name in settings}
            settings |= {name: value for name, value in given.items() if value is not None}
        _check_settings(**settings)
        return settings

    def step(self, settings: dict[str, Any]) -> None:
        """Update the parameters from their gradients, with what `settings` returned."""
        for group in self.inner.param_groups:
            group.update(settings)
        self.inner.step()

    def reset(self) -> None:
        """Forget the running means."""
        self.inner.state.clear()

    def state_tensors(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """The running means and step count of each parameter, made where there are none yet.

        The tensors are the optimizer's own: writing into them restores a state.
        """
        parameters = [p for group in self.inner.param_groups for p in group["params"]]
        for parameter in parameters:
            state = self.inner.state[parameter]
            if not state:
                device = parameter.device if self.config.implementation == "fused" else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return {parameter: self.inner.state[parameter] for parameter in parameters}


def _check_settings(*, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    if not 0.0 <= lr < float("inf"):
        raise ValueError(f"lr={lr}: must be a finite number of at least 0")
    if not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas={betas}: each must be at least 0 and below 1")
    if not eps >= 0.0:
        raise ValueError(f"eps={eps}: must be at least 0")
    if not weight_decay >= 0.0:
        raise ValueError(f"weight_decay={weight_decay}: must be at least 0")
