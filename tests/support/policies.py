"""Small models whose weights expose mistakes, and the logprobs that they should sample with."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.distributed.sharding import local_tensor, slice_local_shard
from rl.models.decoder import Decoder, FeedForward, find_persistent_buffers, linear_head
from rl.models.files.hf import find_hf_buffers, write_hf_folder
from rl.models.layers.attention import SequenceLayout
from rl.models.layers.moe import MoE
from rl.models.sampling import process_logits
from rl.models.spec import ModelSpec, model_spec
from rl.types import Completion, SamplingParams

VOCAB_SIZE = 64


def small_spec(
    *,
    tie: bool = True,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    family: str = "qwen3",
    experts: bool = False,
    normalize_weights: bool = True,
    vocab_size: int = VOCAB_SIZE,
    max_positions: int = 256,
    hidden_dim: int = 48,
    ffn_bias: bool = False,
    switches: dict[str, Any] | None = None,
    **attention: bool,
) -> ModelSpec:
    """Return a model of 2 layers of width 32 of a family; with `experts`, Qwen3 MoE with 6 of them.

    Args:
        switches: further arguments of the adapter's `sized`, such as window and global_layers.
        attention: qk_norm, qkv_bias or o_bias.
    """
    spec = model_spec("qwen3_moe" if experts else family, "tiny")
    mixture = MoE.Config(
        num_experts=6, num_experts_per_token=2, hidden_dim=24, normalize_weights=normalize_weights
    )
    dense = FeedForward.Config(hidden_dim=hidden_dim, bias=ffn_bias)
    model = spec.adapter.sized(
        vocab_size=vocab_size, dim=32, num_layers=2, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, feed_forward=mixture if spec.name == "qwen3_moe" else dense,
        tie_embeddings=tie, theta=1e4, max_positions=max_positions, **switches or {},
    )  # fmt: skip
    model.block.attention = replace(model.block.attention, **attention)
    return replace(spec, flavor="small", model=model)


def random_model(spec: ModelSpec, *, seed: int, biased_router: bool = True) -> Decoder:
    """Return large weights and uneven norms, so that a swapped row or norm shows in the logits."""
    model: Decoder = spec.model.build()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            mean = 0.0 if spec.model.norm_offset else 1.0
            parameter.copy_(mean + 0.3 * noise if name.endswith("norm.weight") else 0.2 * noise)
        for name, buffer in find_persistent_buffers(model).items():
            if name.endswith("load_balance_bias") and biased_router:
                buffer.copy_(0.05 * torch.randn(buffer.shape, generator=generator))
    return model


def config_folder(path: Path, spec: ModelSpec) -> str:
    """Write a folder with the model's config but without weights."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(spec.adapter(spec.model).hf_config()))
    return str(path)


def model_folder(path: Path, spec: ModelSpec, model: Decoder) -> str:
    adapter = spec.adapter(spec.model)
    tensors = chain(model.named_parameters(), find_hf_buffers(model, adapter).items())
    write_hf_folder(path, tensors, adapter, dtype=torch.float32)
    return str(path)


def writer(model: Decoder) -> Callable[[dict[str, Tensor]], Awaitable[None]]:
    """Return an argument for `GeneratorEngine.update_weights` that copies this model's weights into
    any layout."""

    async def write(state_dict: dict[str, Tensor]) -> None:
        source = model.state_dict()
        assert state_dict.keys() == source.keys()
        for name, target in state_dict.items():
            local_tensor(target).copy_(slice_local_shard(source[name], target))

    return write


def prompts_of(lengths: Sequence[int], *, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB_SIZE, length).astype(np.int32) for length in lengths]


def full_logits(model: Decoder, tokens: np.ndarray | Tensor) -> Tensor:
    """Return logits [T, V] of one forward over the whole sequence, with gradient."""
    layout = SequenceLayout.from_lengths([len(tokens)])
    ids = torch.as_tensor(tokens, dtype=torch.int64)
    return model(ids, positions=torch.arange(len(tokens)), sequences=layout, head=linear_head)


@torch.no_grad()
def recomputed_logprobs(
    model: Decoder, prompt: np.ndarray, completion: Completion, sampling: SamplingParams
) -> np.ndarray:
    """Return the completion's logprobs [C] under its sampling distribution."""
    logits = full_logits(model, np.concatenate([prompt, completion.token_ids[:-1]]))
    logprobs = process_logits(logits[len(prompt) - 1 :], sampling)
    ids = torch.from_numpy(completion.token_ids.astype(np.int64))
    return logprobs.gather(1, ids.unsqueeze(1)).squeeze(1).numpy()


def logprob_errors(
    model: Decoder,
    prompts: Sequence[np.ndarray],
    completions: Sequence[Sequence[Completion]],
    sampling: SamplingParams,
) -> np.ndarray:
    """Return the distances of all logprobs of all completions from recomputed ones, in one row."""
    return np.concatenate(
        [
            np.abs(completion.logprobs - recomputed_logprobs(model, prompt, completion, sampling))
            for prompt, of_prompt in zip(prompts, completions, strict=True)
            for completion in of_prompt
        ]
    )


@torch.no_grad()
def sequence_logprobs(model: Decoder, tokens: np.ndarray) -> np.ndarray:
    """Return logprobs [T] in nats from one forward; entry 0 is 0."""
    logprobs = full_logits(model, tokens).log_softmax(-1).numpy()
    return np.concatenate([[0.0], logprobs[np.arange(len(tokens) - 1), tokens[1:]]])


def tokens_of(completions: list[list[Completion]]) -> list[list[list[int]]]:
    return [[c.token_ids.tolist() for c in of_prompt] for of_prompt in completions]
