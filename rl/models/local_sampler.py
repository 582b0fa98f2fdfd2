"""The model that a process samples from by itself: its versions, its adapters, and its draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from rl.models.batch_invariant.model import make_batch_invariant
from rl.models.decoder import Decoder, reset_buffers
from rl.models.draw_calls import SharedDrawing
from rl.models.generate import DivergedWeightsError, PromptLogprobs, prompt_logprobs
from rl.models.layers.moe import GroupedExperts
from rl.models.low_rank.choice import make_bank
from rl.models.low_rank.shapes import KnownShapes
from rl.models.low_rank.types import HEAD, NONE, Bank
from rl.models.spec import ModelSpec
from rl.types import BASE

if TYPE_CHECKING:
    from rl.models.lora import LoRA


@dataclass(kw_only=True, slots=True, eq=False)
class Pushed:
    """A version of the weights."""

    tensors: Mapping[str, Tensor]
    """All weights; of an adapter its factors, until the bank has them."""
    lora: LoRA.Config | None
    """Settings of an adapter; None for whole weights."""
    num_bytes: int
    """Bytes that were pushed."""
    merge_lost: float | None = None
    """As in `PullResult`."""


class LocalSampler:
    """A model whose weights are exchanged, with a bank of adapters for one set of weights, `BASE`.

    Versions are added to `pushed` from any thread; all methods that compute or change the model
    belong to one.
    """

    def __init__(self, spec: ModelSpec, *, device: torch.device, dtype: torch.dtype) -> None:
        """Make the model, whose parameters have no memory until weights are served.

        Args:
            dtype: dtype of all weights that are pushed.
        """
        self._spec, self._device, self._dtype = spec, device, dtype
        self.pushed: dict[int, Pushed] = {}
        """Versions in the order of the pushes."""
        self.base: Mapping[str, Tensor] = {}
        """The weights beside adapters, once there are any."""
        self.weights: int | None = None
        """Version of the weights in the model; `BASE` for those beside adapters."""
        self.newest = NONE
        """Adapter of calls that name no version."""
        self._shapes = KnownShapes(spec, mesh=None)
        with torch.device("meta"):
            model: Decoder = spec.model.build()
            make_batch_invariant(model, spec=spec, device=device)
            model.float32_head = spec.float32_head
        # Parameters come with the first served weights; buffers such as tables of RoPE do not.
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty_like(buffer, device=device))
        reset_buffers(model)
        self.model = model.requires_grad_(False)

    # Versions

    def get_weights(self, version: int) -> int:
        """Return the weights that a version needs: itself, or of adapters `BASE`."""
        is_adapter = version in self.pushed and self.pushed[version].lora is not None
        return BASE if is_adapter else version

    def find_adapter(self, version: int) -> int:
        """Return the version in the bank, or NONE for whole weights."""
        return version if version != self.get_weights(version) else NONE

    def serve(self, weights: int) -> None:
        """Put whole weights into the model, without a copy."""
        tensors = self.base if weights == BASE else self.pushed[weights].tensors
        unknown = self.model.load_state_dict(tensors, strict=False, assign=True).unexpected_keys
        assert not unknown, f"the sampled model has no tensors {unknown}"
        self.weights = weights

    def pull(self, policy_version: int) -> None:
        """Sample from a version where calls name none, and forget it and all earlier ones.

        Raises:
            ValueError: the version was not pushed, or a later one is served.
        """
        served = self.weights if self.newest == NONE else self.newest
        versions = list(self.pushed)
        if policy_version not in versions:
            if policy_version == served:
                return
            raise ValueError(
                f"policy_version={policy_version} was not pushed, or a later push is served: "
                f"served is {served}, pushed since {versions}"
            )
        self.serve(self.get_weights(policy_version))
        # First, as the number may return with other weights after a checkpoint was loaded.
        self.drop_adapter(self.newest)
        self.newest = self.find_adapter(policy_version)
        self._load_adapter(self.newest)
        for version in versions[: versions.index(policy_version) + 1]:
            del self.pushed[version]

    def drop_adapter(self, version: int) -> None:
        """Drop an adapter from the bank, if it is there."""
        if self.model.bank is not None and version in self.model.bank.versions:
            self.model.bank.drop(version)

    def _load_adapter(self, version: int) -> None:
        """Move the factors of an adapter into the bank, unless they are there."""
        pushed = self.pushed.get(version)
        if pushed is None or pushed.lora is None or not pushed.tensors:
            return
        if self.model.bank is None:
            self.model.bank = self._make_bank()
        self.model.bank.load(version, self._shapes.find(pushed.lora).read(pushed.tensors))
        # The bank has copies in the order of its kernel.
        pushed.tensors = {}

    def _make_bank(self) -> Bank:
        layers: dict[str, nn.Module] = {}
        for name, layer in self.model.named_modules():
            if isinstance(layer, nn.Linear | GroupedExperts) and name != HEAD:
                layers[name] = layer
        head_dtype: torch.dtype | None = None  # A tied head has no adapter of its own.
        if self.model.lm_head is not None:
            head_dtype = torch.float32 if self._spec.float32_head else self._dtype
        return make_bank(layers, dtype=self._dtype, head_dtype=head_dtype, device=self._device)

    # Draws

    def draw(self, group: SharedDrawing, pauses: Callable[[], bool]) -> None:
        """Draw a group's completions until a call has ended or `pauses`, called before each token,
        is true; answer the calls that have ended.
        """
        # Not before: until here the adapter of a waiting call exists once, as it was pushed.
        for version in group.drawing.adapters:
            self._load_adapter(version)
        assert self.weights is not None
        try:
            group.drawing.draw(
                self.model, lambda: not group.is_wanted or group.has_ended_calls or pauses()
            )
            group.deliver(self.weights)
        except DivergedWeightsError as error:
            group.fail(error)

    def prompt_logprobs(
        self, prompt: np.ndarray, *, top_k: int, version: int | None
    ) -> PromptLogprobs:
        """Return the predictions of a prompt by a version; None is that which was pulled."""
        adapter = self.newest if version is None else self.find_adapter(version)
        self._load_adapter(adapter)
        return prompt_logprobs(self.model, prompt, top_k=top_k, adapter=adapter)
