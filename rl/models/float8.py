"""Float8 matrix products in linear layers and in the experts of a mixture, from torchao.

Weights keep their dtype in training and for the optimizer: inputs, weights and gradients are scaled
and cast for each product, with dynamic scales. torchao is only imported here and in
`float8_private.py`, and only if a config asks for it.

Shape legend: S rows in the order of their experts, N experts, E and F the widths of a product.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rl.distributed.mesh import Degrees
from rl.distributed.sharding import unwrap
from rl.models.compat import has_forward_hooks
from rl.models.converter import ModelConverter
from rl.models.float8_private import multiply_groups_by_torchao
from rl.models.layers.moe import GroupedExperts, multiply_groups, slice_groups
from rl.models.spec import ModelSpec
from rl.utils.extras import name_pip

MULTIPLE = 16
"""Divisor of all sizes of a float8 product: both sizes of the weight, and the number of tokens."""
CAPABILITIES = ((8, 9),)
"""Lowest NVIDIA compute capability with float8 products (Ada; Hopper is 9.0)."""
GROUPED_CAPABILITIES = ((9, 0), (10, 0))
"""NVIDIA compute capabilities with grouped float8 products (Hopper, data center Blackwell)."""
HEAD = "lm_head"
ModuleT = TypeVar("ModuleT", bound=nn.Module)


class Float8(ModelConverter):
    """Converter of all linear layers to float8, except the output head.

    The head keeps the precision of its logits.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConverter.Config):
        """Granularity of the scales, the layers, and what FSDP gathers in float8."""

        recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
        """Granularity of scales: a tensor (fastest) or a row. The last also computes the gradient
        of the weight in high precision (most accurate)."""
        enable_fsdp_float8_all_gather: bool = False
        """Cast shards before FSDP gathers them, for a quarter of float32's bytes. Tensorwise only.
        """
        precompute_float8_dynamic_scale_for_fsdp: bool = False
        """Compute the scales of all weights together after each step rather than one by one when
        they are gathered.
        """
        filter_fqns: tuple[str, ...] = ()
        """Name parts of layers to leave unconverted."""
        emulate: bool = False
        """Round to float8 and multiply in float32: the numerics without the hardware, slowly."""

        def __post_init__(self) -> None:
            if self.enable_fsdp_float8_all_gather and self.recipe != "tensorwise":
                raise ValueError(
                    f"enable_fsdp_float8_all_gather=True with recipe={self.recipe!r}: shards are "
                    "gathered with one scale a tensor; must be 'tensorwise'"
                )
            if (
                self.precompute_float8_dynamic_scale_for_fsdp
                and not self.enable_fsdp_float8_all_gather
            ):
                raise ValueError(
                    "precompute_float8_dynamic_scale_for_fsdp=True: must be with "
                    "enable_fsdp_float8_all_gather=True, whose scales it computes"
                )

        @property
        def keeps_bits(self) -> bool:
            return False

    config: Config
    compute_dtype = "float8"
    token_multiple = MULTIPLE

    def __init__(
        self, *, config: Config, spec: ModelSpec, degrees: Degrees, device: torch.device
    ) -> None:
        """Store the arguments.

        Raises ValueError if the device has no float8, nothing is sharded for the all-gather, or
        torchao is missing.
        """
        super().__init__(config=config, spec=spec, degrees=degrees, device=device)
        if not config.emulate:
            _check_hardware(device, products="float8", capabilities=CAPABILITIES, or_newer=True)
        if config.enable_fsdp_float8_all_gather and degrees.fsdp == 1:
            raise ValueError(
                "enable_fsdp_float8_all_gather=True: nothing is gathered, parameters are whole on "
                "every rank; must be with parallelism.data_parallel_shard_degree or "
                "context_parallel_degree above 1"
            )
        if find_spec("torchao") is None:
            raise ValueError(f"Float8 needs torchao 0.18: {name_pip()} install 'torchao==0.18.*'")

    def convert(self, model: nn.Module) -> None:
        """Convert the layers.

        Raises ValueError naming an unsupported layer size or an unknown filter.
        """
        linears = _find_modules(model, nn.Linear)
        layers = self._choose_layers(linears)
        for name in layers:
            self._check_layer(name, linears[name])

        torchao = import_module("torchao.float8")
        settings = replace(
            torchao.Float8LinearConfig.from_recipe_name(self.config.recipe),
            enable_fsdp_float8_all_gather=self.config.enable_fsdp_float8_all_gather,
            emulate=self.config.emulate,
        )
        torchao.convert_to_float8_training(
            model, module_filter_fn=lambda module, name: name in layers, config=settings
        )

    def weights_loaded(self, model: nn.Module, *, fresh: bool) -> None:
        # The first all-gather comes before the first step, which would compute the scales.
        self.post_optimizer_hook(model)

    def post_optimizer_hook(self, model: nn.Module) -> None:
        """Compute the scales of the new weights for FSDP's next all-gather, in one collective."""
        if self.config.precompute_float8_dynamic_scale_for_fsdp:
            import_module("torchao.float8").precompute_float8_dynamic_scale_for_fsdp(model)

    def plain_tensor(self, name: str, tensor: Tensor) -> Tensor:
        return unwrap(tensor)

    def _choose_layers(self, linears: dict[str, nn.Linear]) -> list[str]:
        """Return the layers to convert, in the model's order."""
        layers = [name for name in linears if name != HEAD]
        for part in self.config.filter_fqns:
            if not _have_part(linears, part):
                leaves = dict.fromkeys(name.rpartition(".")[2] for name in linears)
                raise ValueError(
                    f"filter_fqns has {part!r}, which no linear layer's name contains: they end in "
                    f"{', '.join(leaves)}"
                )
            layers = [name for name in layers if part not in name]
        return layers

    def _check_layer(self, name: str, linear: nn.Linear) -> None:
        multiple = MULTIPLE * self.degrees.tp
        for field in ("in_features", "out_features"):
            if getattr(linear, field) % multiple:
                raise ValueError(
                    f"{name} has {field}={getattr(linear, field)}: must be a multiple of "
                    f"{multiple} (16 on each tensor-parallel rank), or the layer be named in "
                    "filter_fqns"
                )
        # torchao replaces the module, and the hooks of the old module would never run.
        if has_forward_hooks(linear):
            raise ValueError(
                f"an earlier converter added to {name}, which Float8 would replace: Float8 must "
                "come before it"
            )


class Float8GroupedMM(ModelConverter):
    """Converter of the grouped products of a mixture's experts to float8.

    `Float8` converts the layers around the experts. All factors are rounded to e4m3. Each row of a
    factor has a scale of its own, a power of two, as have the columns in products that sum over
    rows.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConverter.Config):
        """Experts to convert, and how."""

        fqns: tuple[str, ...] = ("experts",)
        """Name parts of the experts' modules to convert; "experts" is in the name of each."""
        emulate: bool = False
        """Round to float8 and multiply in the model's dtype: the numerics without the hardware,
        slowly.
        """

        def __post_init__(self) -> None:
            if not self.fqns:
                raise ValueError("fqns=(): must name at least one part, such as 'experts'")

        @property
        def keeps_bits(self) -> bool:
            return False

    config: Config
    compute_dtype = "float8"

    def __init__(
        self, *, config: Config, spec: ModelSpec, degrees: Degrees, device: torch.device
    ) -> None:
        """Store the arguments.

        Raises ValueError if the model has no experts or a size that 16 does not divide, the device
        has no grouped float8 products, or torchao is missing.
        """
        super().__init__(config=config, spec=spec, degrees=degrees, device=device)
        if not spec.model.has_experts:
            raise ValueError(
                "Float8GroupedMM must not be there for a model without experts; Float8 converts it"
            )
        feed_forward: Any = spec.model.block.feed_forward
        # Ranks that share an expert each have a part of its width, and all of the model's.
        for field, value, num_ranks in (
            ("dim", spec.model.dim, 1),
            ("feed_forward.hidden_dim", feed_forward.hidden_dim, degrees.etp),
        ):
            if value % (MULTIPLE * num_ranks):
                raise ValueError(
                    f"the model has {field}={value}: must be a multiple of {MULTIPLE * num_ranks} "
                    "for grouped products in float8 (16 on each rank that shares an expert)"
                )
        if not config.emulate:
            _check_hardware(device, products="grouped float8", capabilities=GROUPED_CAPABILITIES)
            if find_spec("torchao") is None:
                raise ValueError(
                    f"Float8GroupedMM needs torchao 0.18: {name_pip()} install 'torchao==0.18.*'"
                )

    def convert(self, model: nn.Module) -> None:
        """Convert the experts; raise ValueError naming an unknown part of a name."""
        experts = _find_modules(model, GroupedExperts)
        emulate = self.config.emulate
        product = emulate_groups_in_float8 if emulate else multiply_groups_in_float8
        for part in self.config.fqns:
            if not _have_part(experts, part):
                raise ValueError(
                    f"fqns has {part!r}, which the name of no experts contains: they are "
                    f"{', '.join(experts)}"
                )
            for name, module in experts.items():
                if part in name:
                    module.product = product


def _find_modules(model: nn.Module, kind: type[ModuleT]) -> dict[str, ModuleT]:
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


def _have_part(names: Iterable[str], part: str) -> bool:
    return any(part in name for name in names)


def multiply_groups_in_float8(x_SE: Tensor, weight_NFE: Tensor, ends_N: Tensor) -> Tensor:
    """Return `multiply_groups` in float8, by torchao's kernels on a GPU, which have results in
    bfloat16.

    The kernels need a multiple of 16 rows in each group, and not zero. Rows of zeros are put after
    each group's, 16 a group in all, so that the number of rows is known without waiting for the
    GPU. Then rows are added up to one of eight numbers from each power of two to the next: a kernel
    is tuned anew for each number, 4 s on an H100.
    """
    # The most rows that groups of this many rows can fill, rounded up to the kernel's sizes.
    num_rows = x_SE.size(0)
    total = (num_rows // MULTIPLE + ends_N.numel()) * MULTIPLE
    step = max(MULTIPLE, 1 << (total.bit_length() - 4))
    total = -(-total // step) * step

    # The rows of a group move down by the padding of the groups before it.
    sizes_N = ends_N.diff(prepend=ends_N.new_zeros(1))
    padded_N = (-(-sizes_N // MULTIPLE) * MULTIPLE).clamp(min=MULTIPLE)
    padded_ends_N = padded_N.cumsum(0)
    moved_N = padded_ends_N - padded_N - (ends_N - sizes_N)
    moved_S = moved_N.repeat_interleave(sizes_N, output_size=num_rows)
    places_S = torch.arange(num_rows, device=x_SE.device) + moved_S
    padded_ends_N[-1] = total  # The last group takes the remaining rows, which are zeros.

    out = multiply_groups_by_torchao(
        x_SE.new_zeros(total, x_SE.size(1)).index_copy(0, places_S, x_SE),
        weight_NFE.transpose(1, 2),
        padded_ends_N.to(torch.int32),
    )
    selected: Tensor = out.index_select(0, places_S).to(x_SE.dtype)
    return selected


def emulate_groups_in_float8(x_SE: Tensor, weight_NFE: Tensor, ends_N: Tensor) -> Tensor:
    """Return `multiply_groups` of factors rounded to float8; the gradients are such products
    too.
    """
    product: Tensor = _EmulatedGroupedLinear.apply(x_SE, weight_NFE, ends_N)
    return product


class _EmulatedGroupedLinear(torch.autograd.Function):
    """`multiply_groups` with factors rounded to float8 in the forward and in both gradients."""

    @staticmethod
    def forward(ctx: Any, x_SE: Tensor, weight_NFE: Tensor, ends_N: Tensor) -> Tensor:
        ctx.save_for_backward(x_SE, weight_NFE, ends_N)
        return multiply_groups(
            _round_to_float8(x_SE, dim=1), _round_to_float8(weight_NFE, dim=2), ends_N
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_SE, weight_NFE, ends_N = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad_x = grad_weight = None
        if needs_x:
            weight_NEF = _round_to_float8(weight_NFE, dim=1).transpose(1, 2)
            grad_x = multiply_groups(_round_to_float8(grad_SF, dim=1), weight_NEF, ends_N)
        if needs_weight:
            grad_weight = torch.zeros_like(weight_NFE)
            for n, rows in enumerate(slice_groups(ends_N.tolist())):
                # A group without rows has no largest number to scale by; its gradient is zero.
                if rows.start < rows.stop:
                    grad_FS = _round_to_float8(grad_SF[rows], dim=0).t()
                    torch.mm(grad_FS, _round_to_float8(x_SE[rows], dim=0), out=grad_weight[n])
        return grad_x, grad_weight, None


def _round_to_float8(x: Tensor, *, dim: int) -> Tensor:
    """Round to e4m3, with a common power of two as the scale along `dim`; exact in bfloat16."""
    # torchao's least scale: rows of zeros have none of their own.
    largest = x.abs().amax(dim, keepdim=True).float().clamp(min=1e-12)
    scale = (torch.finfo(torch.float8_e4m3fn).max / largest).log2().floor().exp2()
    return ((x * scale).to(torch.float8_e4m3fn).float() / scale).to(x.dtype)


def _check_hardware(
    device: torch.device,
    *,
    products: str,
    capabilities: tuple[tuple[int, int], ...],
    or_newer: bool = False,
) -> None:
    if device.type == "meta":  # a check of the config, on a machine that may have no GPU
        return
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if capability in capabilities or (or_newer and capability >= max(capabilities)):
        return
    needed = " or ".join(f"{major}.{minor}" for major, minor in capabilities)
    raise ValueError(
        f"emulate=False: this {device.type} has no {products} products, which need NVIDIA "
        f"compute capability {needed}{' or newer' if or_newer else ''}; emulate=True gives "
        "their rounding anywhere, slowly"
    )
