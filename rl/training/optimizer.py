"""Adam, AdamW and Muon over whole or sharded parameters, and schedules of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rl.config.configurable import Configurable, only_if, unless
from rl.config.tree import check_bounds
from rl.models.adapter import DecoderAdapter
from rl.trainer_types import OptimParams
from rl.training.muon import Muon, MuonConfig, is_hidden_matrix
from rl.training.rounding import Rounding, derive_bits, round_into, rows_of

_DECAYS = unless("decay", "constant")


class Optimizer(Configurable):
    """Adam, AdamW or Muon with settings that a caller can replace for one step.

    Weight decay applies to every parameter, norms and embeddings included. Parameters in bfloat16
    are stepped in float32, piece by piece, and rounded stochastically (`rl.training.rounding`).

    Example:
        optimizer = Optimizer.Config(lr=1e-5).build(parameters=policy.trained_parameters)
        settings = optimizer.make_settings(lr=5e-6, params=OptimParams(weight_decay=0.1))
        optimizer.step(settings, version=7)  # lr 5e-6, betas (0.9, 0.95), weight_decay 0.1
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Choice of the optimizer, and the settings of a step without settings of its own."""

        name: Literal["AdamW", "Adam", "Muon"] = "AdamW"
        """AdamW decays weights apart from the gradient, Adam within it; Muon steps the matrices of
        the blocks, and AdamW all other parameters."""
        lr: float = 1e-5
        """Peak learning rate; the schedule scales it."""
        betas: tuple[float, float] = (0.9, 0.95)
        """Decay of the running means of the gradient and of its square."""
        eps: float = 1e-8
        """Added to the root of the second mean to avoid division by zero."""
        weight_decay: float = 0.0
        """Decay of every parameter in each step as a multiple of lr, including norms and
        embeddings.
        """
        implementation: Literal["fused", "foreach", "for-loop"] = "fused"
        """One kernel for all parameters, one per operation, or one per operation and parameter;
        Adam and AdamW only. Parameters in bfloat16 are always stepped one at a time."""
        muon: MuonConfig = field(default_factory=MuonConfig, metadata=only_if("name", "Muon"))
        """Settings of Muon."""
        early_step_in_backward: bool = False
        """Step each parameter during the backward of a call's last micro-batch, and free its
        gradient; for a loss with normalization none, without clipping, and one forward_backward a
        step."""

        def __post_init__(self) -> None:
            _check_settings(self)

    def __init__(
        self,
        *,
        config: Config,
        parameters: Mapping[str, nn.Parameter],
        adapter: DecoderAdapter | None = None,
        group: ProcessGroup | None = None,
        seed: int = 0,
    ) -> None:
        """Step all parameters that are not frozen.

        Args:
            adapter: Muon needs it, to split a parameter into its matrices.
            group: ranks that share the parameters; for Muon.
            seed: chooses how results are rounded to bfloat16.
        """
        self.config = config
        self.muon: Muon | None = None
        self.rounding = Rounding(seed=seed)

        by_muon: dict[str, nn.Parameter] = {}
        by_adam: list[nn.Parameter] = []
        self._rounded: dict[nn.Parameter, str] = {}
        """Parameters of Adam whose results are rounded, with their names."""
        for name, parameter in parameters.items():
            if not parameter.requires_grad:
                continue
            if config.name == "Muon" and is_hidden_matrix(name, parameter):
                by_muon[name] = parameter
                continue
            by_adam.append(parameter)
            if parameter.dtype == torch.bfloat16:
                self._rounded[parameter] = name

        if config.name == "Muon":
            self.muon = Muon(
                config=config.muon,
                parameters=by_muon,
                adapter=adapter,
                group=group,
                rounding=self.rounding,
            )
        make = torch.optim.Adam if config.name == "Adam" else torch.optim.AdamW
        self.inner: torch.optim.Optimizer = make(
            [{"params": by_adam}],
            fused=config.implementation == "fused",
            foreach=config.implementation == "foreach",
        )

    def make_settings(self, *, lr: float, params: OptimParams | None = None) -> dict[str, Any]:
        """Return one step's settings: the configured ones, `lr` of the schedule, `params`.

        Raises ValueError if a setting is out of range.
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
            _check_settings(params)
            check_bounds(params, "momentum", at_least=0, below=1)
            if params.momentum is not None and self.muon is None:
                raise ValueError(
                    f"momentum={params.momentum}: is Muon's; optimizer.name={self.config.name!r} "
                    "has betas"
                )
            for name in settings:
                value = getattr(params, name)
                if value is not None:
                    settings[name] = value
        return settings

    def step(self, settings: dict[str, Any], *, version: int = 0) -> None:
        """Update the parameters from their gradients with the result of `make_settings`.

        `version` counts the steps before this one, for another rounding in each.
        """
        self.rounding.version = version
        for group in self.inner.param_groups:
            group.update(settings)
        if self.muon is not None:
            self.muon.step(
                lr=settings["lr"],
                weight_decay=settings["weight_decay"],
                momentum=settings["momentum"],
            )
        if not self._rounded:
            self.inner.step()  # Last, so that its hooks find every parameter stepped.
            return

        # One at a time: a float32 copy of all parameters would cost more than bfloat16 saves.
        (group,) = self.inner.param_groups
        for parameter in group["params"]:
            self._step_alone(parameter)

    def step_one(
        self, parameter: nn.Parameter, settings: dict[str, Any], *, version: int = 0
    ) -> None:
        """Update one parameter as `step` would; not with Muon."""
        # The same random bits as in `step`, so that stepping early changes no number.
        self.rounding.version = version
        (group,) = self.inner.param_groups
        group.update(settings)
        self._step_alone(parameter)

    @torch.no_grad()
    def _step_alone(self, parameter: nn.Parameter) -> None:
        if parameter not in self._rounded:
            self._step_only(parameter)
            return
        if parameter.grad is None:
            return

        state = self._get_state(parameter)
        gradient = rows_of(parameter.grad)
        mean, mean_square = rows_of(state["exp_avg"]), rows_of(state["exp_avg_sq"])
        for rows, bits in self.rounding.split_rows(self._rounded[parameter], parameter):
            wide = nn.Parameter(rows_of(parameter)[rows].float())
            wide.grad = gradient[rows].float()
            wide_mean, wide_square = mean[rows].float(), mean_square[rows].float()
            # PyTorch's optimizer steps the piece as if it were a parameter of its own; each piece
            # has a copy of the step count, as the optimizer increments it in place.
            self.inner.state[wide] = {
                "step": state["step"].clone(),
                "exp_avg": wide_mean,
                "exp_avg_sq": wide_square,
            }
            try:
                self._step_only(wide)
            finally:
                del self.inner.state[wide]

            self.rounding.store_weights(parameter, rows, wide.detach(), bits)
            mean_noise, square_noise = derive_bits(bits)
            round_into(mean[rows], wide_mean, mean_noise)
            round_into(mean_square[rows], wide_square, square_noise)
        state["step"] += 1

    def _step_only(self, parameter: nn.Parameter) -> None:
        """Let PyTorch's optimizer step one parameter."""
        # It steps whole groups, so the group has this parameter alone meanwhile.
        (group,) = self.inner.param_groups
        parameters = group["params"]
        group["params"] = [parameter]
        try:
            self.inner.step()
        finally:
            group["params"] = parameters

    def reset(self) -> None:
        """Drop the running means."""
        self.inner.state.clear()
        if self.muon is not None:
            self.muon.momenta.clear()

    def list_tensors(self) -> list[Tensor]:
        """Return the tensors of the state that exist, which are none before the first step."""
        tensors: list[Tensor] = []
        for state in self.inner.state.values():
            tensors += state.values()
        if self.muon is not None:
            tensors += self.muon.momenta.values()
        return tensors

    def state_tensors(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """Return the running means of each parameter and Adam's step count, creating missing ones.

        The tensors are not copied, so writing into them restores a state.
        """
        states: dict[nn.Parameter, dict[str, Tensor]] = {}
        for group in self.inner.param_groups:
            for parameter in group["params"]:
                states[parameter] = self._get_state(parameter)
        if self.muon is not None:
            for parameter in self.muon.parameters.values():
                states[parameter] = {"momentum_buffer": self.muon.get_momentum(parameter)}
        return states

    def _get_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return running means and step count of a parameter of Adam, creating missing ones."""
        state: dict[str, Tensor] = self.inner.state[parameter]
        if not state:
            # A fused kernel reads the count on the device; elsewhere reading it would wait for it.
            device = parameter.device if self.config.implementation == "fused" else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def _check_settings(settings: Optimizer.Config | OptimParams) -> None:
    check_bounds(settings, "lr", at_least=0, below=float("inf"))
    check_bounds(settings, "eps", "weight_decay", at_least=0)
    if not all(0.0 <= beta < 1.0 for beta in settings.betas or ()):
        raise ValueError(f"betas={settings.betas}: each must be at least 0 and below 1")


class LRSchedule(Configurable):
    """Factor on the peak learning rate as a function of the step.

    A linear warm-up, a plateau, and a decay over the last `decay_ratio` of `total_steps`;
    afterwards the factor stays at `min_ratio`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Shape of the schedule; the default keeps the peak learning rate from the first step."""

        warmup_steps: int = 0
        """Steps of linear warm-up; step n has n / warmup_steps of the peak."""
        decay: Literal["constant", "linear", "cosine", "sqrt"] = "constant"
        """Shape of the decay; constant does not decay."""
        decay_ratio: float = field(default=1.0, metadata=_DECAYS)
        """Share of total_steps, at the end, over which the rate decays; never before the warm-up is
        over.
        """
        min_ratio: float = field(default=0.0, metadata=_DECAYS)
        """Learning rate after the decay, as a share of the peak."""
        total_steps: int = field(default=0, metadata=_DECAYS)
        """Optimizer steps of the whole run, over which the rate decays; 0 takes those of the run's
        loop.
        """

        def __post_init__(self) -> None:
            check_bounds(self, "warmup_steps", "total_steps", at_least=0)
            check_bounds(self, "decay_ratio", "min_ratio", at_least=0, at_most=1)
            if self.decay == "constant" or not self.total_steps:
                return
            num_decay = round(self.decay_ratio * self.total_steps)
            if self.total_steps <= self.warmup_steps or not num_decay or self.min_ratio == 1.0:
                raise ValueError(
                    f"decay={self.decay!r} with total_steps={self.total_steps}, "
                    f"warmup_steps={self.warmup_steps}, decay_ratio={self.decay_ratio}, "
                    f"min_ratio={self.min_ratio}: nothing would decay; total_steps must be the "
                    "steps of the run, above warmup_steps, decay_ratio above 0, and min_ratio "
                    "below 1"
                )

    def __init__(self, *, config: Config) -> None:
        """Raises ValueError for a decay without `total_steps`, which a loop fills in."""
        self.config = config
        if config.decay != "constant" and not config.total_steps:
            raise ValueError(
                f"lr_scheduler.total_steps=0 with decay={config.decay!r}: must be the number of "
                "optimizer steps"
            )
        # A decay over the whole run begins when the warm-up is over.
        length = round(config.decay_ratio * config.total_steps)
        self.decay_start = max(config.warmup_steps, config.total_steps - length)

    def compute_factor(self, step: int) -> float:
        """Return the factor of a step, counted from 0."""
        config = self.config
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        if config.decay == "constant" or step < self.decay_start:
            return 1.0
        if step >= config.total_steps:
            return config.min_ratio
        progress = (step - self.decay_start) / (config.total_steps - self.decay_start)
        shape = {
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
            "sqrt": 1.0 - math.sqrt(progress),
        }[config.decay]
        return config.min_ratio + (1.0 - config.min_ratio) * shape


def check_total_steps(config: LRSchedule.Config, *, num_steps: int, num_minibatches: int) -> None:
    """Raise ValueError for a decay that does not end with the loop's optimizer steps."""
    in_loop = num_steps * num_minibatches
    if not config.total_steps:
        try:
            replace(config, total_steps=in_loop)  # Checks that it decays.
        except ValueError as error:
            raise ValueError(f"trainer.lr_scheduler, with the steps of the run: {error}") from None
        return
    if config.decay != "constant" and num_steps and config.total_steps != in_loop:
        raise ValueError(
            f"trainer.lr_scheduler.total_steps={config.total_steps} with decay={config.decay!r}: "
            f"must be 0 or {in_loop}, the optimizer steps of the run: loop.num_steps={num_steps} x "
            f"loop.num_minibatches={num_minibatches}"
        )
