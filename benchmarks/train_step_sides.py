"""The two sides of `benchmarks.train_step`: the same weights, batch, loss and optimizer.

Shape legend: B sequences of a padded micro-batch, L its longest, V vocabulary.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

# Whole, on both sides, so that the memory of imports is the same and none of it is counted.
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.train_step import Workload, padded_micro_batches
from losses.cross_entropy import CrossEntropyLoss
from rl.distributed.compile import CompileConfig, compile_blocks, compile_function
from rl.models.batch_invariant.probe import read_processor
from rl.models.decoder import Decoder, FeedForward
from rl.models.spec import ModelSpec
from rl.models.spec import model_spec as spec_of
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.training.optimizer import Optimizer
from rl.types import TrainingSample

LR, BETAS, EPS, WEIGHT_DECAY, MAX_NORM = 1e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
IGNORED = -100
"""Target of padding tokens, the default of `F.cross_entropy`."""


PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
}
"""Dense bfloat16 FLOP/s by NVIDIA's data sheets; the first key contained in the device's name
applies.
"""


def model_spec(flavor: str) -> ModelSpec:
    """Return a flavor of the registry, or `small` with 29M parameters for a CPU."""
    if flavor != "small":
        return spec_of("llama" if flavor.startswith("SmolLM2") else "qwen3", flavor)
    spec = spec_of("qwen3", "0.6B")
    model = spec.model
    model.vocab_size, model.dim, model.num_layers = 8192, 512, 8
    attention = model.block.attention
    attention.num_heads, attention.num_kv_heads, attention.head_dim = 8, 4, 64
    feed_forward = model.block.feed_forward
    assert isinstance(feed_forward, FeedForward.Config)
    feed_forward.hidden_dim = 1536
    return spec


def dtypes(workload: Workload) -> tuple[Any, Any]:
    """Return the names of the dtypes of the stored weights and of forward and backward."""
    return (
        ("float32", "bfloat16") if workload.dtype == "mixed" else (workload.dtype, workload.dtype)
    )


def draw_sequences(workload: Workload, *, vocab_size: int) -> list[np.ndarray]:
    """Return the token ids of each sequence, [L + 1] for L inputs and their targets."""
    random = np.random.default_rng(workload.seed)
    return [
        random.integers(0, vocab_size, length + 1, dtype=np.int32) for length in workload.lengths()
    ]


def sum_of_cross_entropies(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    """Return the summed cross-entropy of all targets except padding, [] float32."""
    logits_V = logits_BLV.flatten(0, 1).float()
    return F.cross_entropy(logits_V, targets_BL.flatten(), ignore_index=IGNORED, reduction="sum")


class EngineSide:
    """relay's engine: `forward_backward` on all samples, then `optim_step`.

    `step`, of all sides, trains one step on the batch and returns the loss averaged over all
    tokens.
    """

    def __init__(self, workload: Workload) -> None:
        spec = model_spec(workload.flavor)
        stored, computed = dtypes(workload)
        config = TrainingEngine.Config(
            loss=CrossEntropyLoss(),
            compile=CompileConfig(enable=workload.compile),
            optimizer=Optimizer.Config(lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY),
            training=TrainingConfig(
                max_tokens_per_microbatch=workload.microbatch_tokens,
                logits_chunk_tokens=workload.logits_chunk_tokens,
                max_norm=MAX_NORM,
                dtype=stored,
                param_dtype=computed,
                seed=workload.seed,
            ),
        )
        self.engine = TrainingEngine(
            config=config, model_spec=spec, hf_assets_path=None, device=workload.device
        )
        model = self.engine.policy.model
        assert isinstance(model, Decoder)
        sequences = draw_sequences(workload, vocab_size=model.config.vocab_size)
        self.samples = [to_sample(token_ids) for token_ids in sequences]

    def step(self) -> float:
        result = self.engine.forward_backward(self.samples)
        self.engine.optim_step()
        return result.loss_sum / result.denominator


def to_sample(token_ids: np.ndarray) -> TrainingSample:
    """Return a sample in which every token except the first is a target."""
    num_tokens = len(token_ids)
    return TrainingSample(
        token_ids=token_ids,
        mask=np.arange(num_tokens) > 0,
        generator_logprobs=np.full(num_tokens, np.nan, dtype=np.float32),
        advantages=np.zeros(num_tokens, dtype=np.float32),
        policy_versions=np.full(num_tokens, -1, dtype=np.int32),
    )


class TransformersSide:
    """transformers' model on micro-batches padded to their longest sequence."""

    def __init__(self, workload: Workload, *, by_length: bool) -> None:
        self.device = torch.device(workload.device)
        self.model = _transformers_model(workload, device=self.device)
        compile = CompileConfig(enable=workload.compile)
        compile_blocks(self.model.model.layers, compile)
        self.loss_sum = compile_function(sum_of_cross_entropies, compile)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=LR,
            betas=BETAS,
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )
        self.sequences = draw_sequences(workload, vocab_size=self.model.config.vocab_size)
        self.plan = padded_micro_batches(
            workload.lengths(), max_tokens=workload.microbatch_tokens, by_length=by_length
        )
        self.num_tokens = sum(workload.lengths())
        mixed = workload.dtype == "mixed"
        self.autocast = partial(
            torch.autocast, workload.device, dtype=torch.bfloat16, enabled=mixed
        )

    def step(self) -> float:
        total = torch.zeros((), device=self.device)
        for indices in self.plan:
            inputs_BL, targets_BL, mask_BL = self._padded([self.sequences[i] for i in indices])
            with self.autocast():
                logits_BLV = self.model(
                    input_ids=inputs_BL, attention_mask=mask_BL, use_cache=False
                ).logits
            loss = self.loss_sum(logits_BLV, targets_BL) / self.num_tokens
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total.item()

    def _padded(self, sequences: Sequence[np.ndarray]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return inputs, targets and, where anything is padded, the mask; padding is on the
        right.
        """
        lengths_B = np.asarray([len(ids) - 1 for ids in sequences])
        shape = (len(sequences), int(lengths_B.max()))
        inputs_BL, targets_BL = (
            np.zeros(shape, dtype=np.int64),
            np.full(shape, IGNORED, dtype=np.int64),
        )
        for row, ids in enumerate(sequences):
            inputs_BL[row, : len(ids) - 1], targets_BL[row, : len(ids) - 1] = ids[:-1], ids[1:]
        mask_BL = np.arange(shape[1]) < lengths_B[:, None]
        inputs, targets = (torch.from_numpy(x).to(self.device) for x in (inputs_BL, targets_BL))
        return (
            inputs,
            targets,
            None if mask_BL.all() else torch.from_numpy(mask_BL).long().to(self.device),
        )


def _transformers_model(workload: Workload, *, device: torch.device) -> Any:
    """Return transformers' model with the weights that the engine draws for the same seed."""
    spec = model_spec(workload.flavor)
    dtype = getattr(torch, dtypes(workload)[0])
    adapter = spec.adapter(spec.model)
    values = adapter.hf_config()
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    ours = spec.model.build().to(dtype)
    ours.init_weights(seed=workload.seed)
    theirs = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            for hf_name, tensor in adapter.to_hf(name, parameter).items():
                theirs.pop(hf_name).copy_(tensor)
    assert not theirs, f"without a weight of ours: {', '.join(theirs)}"
    return model.train()


SIDES: dict[str, Callable[[Workload], EngineSide | TransformersSide]] = {
    "relay": EngineSide,
    "transformers": lambda workload: TransformersSide(workload, by_length=False),
    "transformers_sorted": lambda workload: TransformersSide(workload, by_length=True),
}


def describe(workload: Workload) -> dict[str, Any]:
    """Return versions, the operations of a step and the device's peak rate, if it is known."""
    config = model_spec(workload.flavor).model
    with torch.device("meta"):
        model = config.build()
    assert config.tie_embeddings, (
        "an embedding of its own multiplies no token, but would be counted"
    )
    parameters = sum(p.numel() for p in model.parameters())
    attention = config.block.attention
    width = config.num_layers * attention.num_heads * attention.head_dim
    lengths = workload.lengths()
    hardware, peak_flops = f"{os.cpu_count()} cores of {read_processor()}", None
    if workload.device == "cuda":
        hardware = torch.cuda.get_device_name()
        known = (flops for name, flops in PEAK_FLOPS.items() if name in hardware)
        peak_flops = next(known, None) if workload.dtype != "float32" else None
    return {
        "hardware": hardware,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "parameters": parameters,
        "step_flops": 6.0 * parameters * sum(lengths) + 12 * width * sum(n * n for n in lengths),
        "peak_flops": peak_flops,
    }


class Runner:
    """Timer of one side in this process."""

    def __init__(self, *, name: str, workload: Mapping[str, Any], num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._workload = Workload(**workload)
        self.device = torch.device(self._workload.device)
        self._memory_before = _resident_bytes("VmRSS")
        self.side = SIDES[name](self._workload)

    def describe(self) -> dict[str, Any]:
        return describe(self._workload)

    def turn(self, num_steps: int) -> dict[str, Any]:
        """Measure `num_steps` steps; on a GPU after one more step, releasing cached memory at the
        end.
        """
        on_gpu = self.device.type == "cuda"
        losses = [self.side.step()] if on_gpu else []
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew.
        step_s = []
        for _ in range(num_steps):
            started = time.perf_counter()
            losses.append(self.side.step())  # waits for the device, as it returns the loss
            step_s.append(time.perf_counter() - started)
        peak = (
            torch.cuda.max_memory_allocated(self.device)
            if on_gpu
            else _resident_bytes("VmHWM") - self._memory_before
        )
        if on_gpu:
            gc.collect()
            torch.cuda.empty_cache()
        return {"step_s": statistics.median(step_s), "losses": losses, "peak_memory_bytes": peak}


def _resident_bytes(name: str) -> int:
    """Return this process's resident memory: VmRSS now, VmHWM the peak."""
    _, _, value = Path("/proc/self/status").read_text().partition(f"{name}:")
    return int(value.split()[0]) * 1024
