"""Estimated memory compared with the measured peak of a step."""

import math
import os
import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from configs.sum_digits import qwen3_8b
from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.distributed.compat import use_one_gloo_worker
from rl.distributed.mesh import Degrees, ParallelismConfig
from rl.distributed.process_group import World
from rl.models import qwen3, qwen3_moe
from rl.models.converter import ModelConverter
from rl.models.decoder import FeedForward
from rl.models.layers.moe import MoE
from rl.models.lora import LoRA
from rl.models.spec import ModelSpec
from rl.training.config import TrainingConfig
from rl.training.device_memory import use_growing_segments
from rl.training.engine import TrainingEngine
from rl.training.memory import check_device_memory, estimate_memory
from rl.training.optimizer import Optimizer
from tests.support.distributed import run_ranks
from tests.training.parts import make_sample, moe_spec

BOUND = 0.3
LENGTH = 64
"""Number of input tokens of each sample."""
NUM_PROCESSES = 2
"""Number of processes that measure at the same time, with one thread each."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of a model and of its micro-batches, layout and options."""

    dim: int
    num_layers: int
    num_heads: int
    hidden_dim: int
    vocab_size: int
    num_tokens: int
    num_experts: int = 0
    """Number of experts, each as wide as `hidden_dim`; 0 for a dense model."""
    degrees: dict[str, int] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    reference: bool = False
    rotation: str = "allgather"
    """Exchange of context parallelism."""
    converters: tuple[ModelConverter.Config, ...] = ()
    float32_head: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks; experts are split over existing ranks."""
        return math.prod(
            size for name, size in self.degrees.items() if not name.startswith("expert")
        )

    def spec(self) -> ModelSpec:
        feed_forward: Any = FeedForward.Config(hidden_dim=self.hidden_dim)
        if self.num_experts:
            feed_forward = MoE.Config(
                num_experts=self.num_experts, num_experts_per_token=2, hidden_dim=self.hidden_dim
            )
        spec = (qwen3_moe if self.num_experts else qwen3).model_registry("tiny")
        model = spec.adapter.sized(
            vocab_size=self.vocab_size, dim=self.dim, num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads // 2, head_dim=32, feed_forward=feed_forward,
            tie_embeddings=True,
            theta=1e4, max_positions=512,
        )  # fmt: skip
        return replace(spec, model=model, float32_head=self.float32_head)

    def config(self) -> TrainingEngine.Config:
        layout: dict[str, Any] = {f"{name}_degree": degree for name, degree in self.degrees.items()}
        layout["context_parallel_rotation"] = self.rotation
        config = TrainingEngine.Config(
            optimizer=Optimizer.Config(**self.optimizer),
            parallelism=ParallelismConfig(**layout),
            training=TrainingConfig(max_tokens_per_microbatch=self.num_tokens, **self.training),
            activation_checkpoint=ActivationCheckpointConfig(**self.checkpoint),
            converters=self.converters,
        )
        config.reference.enable = self.reference
        # As many rows for each expert, as the estimate assumes.
        config.experts.force_load_balance = bool(self.num_experts)
        return config


# Each of these is dominated by another part, and takes a second or two to compute.
PARAMETERS = Case(
    dim=512, num_layers=8, num_heads=16, hidden_dim=1536, vocab_size=2048, num_tokens=128
)
ACTIVATIONS = Case(
    dim=128, num_layers=8, num_heads=8, hidden_dim=384, vocab_size=320, num_tokens=2048
)
LOGITS = Case(dim=64, num_layers=2, num_heads=4, hidden_dim=192, vocab_size=16_384, num_tokens=1024)
MIXED = Case(dim=256, num_layers=6, num_heads=8, hidden_dim=1024, vocab_size=4096, num_tokens=1024)
EXPERTS = replace(MIXED, hidden_dim=256, vocab_size=2048, num_tokens=256, num_experts=16)
CHUNKED = Case(
    dim=256, num_layers=2, num_heads=8, hidden_dim=1024, vocab_size=8192, num_tokens=6144
)
FSDP2 = {"data_parallel_shard": 2}
DDP2 = {"data_parallel_replicate": 2, "data_parallel_shard": 1}
TP2 = {"tensor_parallel": 2}
CP2 = {"context_parallel": 2}
PP2 = {"pipeline_parallel": 2}
BF16 = {"param_dtype": "bfloat16"}
FULL, BY_OP = {"mode": "full"}, {"mode": "selective"}
EVERY_SECOND = {"mode": "selective", "selective_option": "2"}
LORA = (LoRA.Config(rank=16),)

CASES = {
    "parameters": PARAMETERS,
    "logits bf16": replace(LOGITS, num_tokens=5120, training=BF16),
    "logits bf16, float32 head": replace(LOGITS, num_tokens=2560, training=BF16, float32_head=True),
    "parameters all bf16": replace(PARAMETERS, training=BF16 | {"dtype": "bfloat16"}),
    "logits, TP2": replace(LOGITS, num_tokens=2048, degrees=TP2),
    "activations bf16": replace(ACTIVATIONS, num_tokens=3072, training=BF16),
    "4 layers, every second": replace(
        ACTIVATIONS, num_layers=4, num_tokens=6144, checkpoint=EVERY_SECOND
    ),
    "mixed, full": replace(MIXED, num_tokens=2048, checkpoint=FULL),
    "parameters, FSDP2": replace(PARAMETERS, degrees=FSDP2),
    "parameters, DDP2": replace(PARAMETERS, degrees=DDP2),
    "parameters, PP2": replace(PARAMETERS, degrees=PP2),
    "logits, PP2": replace(LOGITS, num_tokens=4096, degrees=PP2),
    "activations, TP2": replace(ACTIVATIONS, num_tokens=4096, degrees=TP2),
    "op, CP2 by alltoall": replace(
        ACTIVATIONS, num_tokens=4096, checkpoint=BY_OP, degrees=CP2, rotation="alltoall"
    ),
    "experts, FSDP2 x EP2": replace(EXPERTS, degrees=FSDP2 | {"expert_parallel": 2}),
    "LoRA, FSDP2": replace(PARAMETERS, num_tokens=512, converters=LORA, degrees=FSDP2),
    "LoRA, full, chunked logits": replace(
        CHUNKED, converters=LORA, checkpoint=FULL, training={"logits_chunk_tokens": 3072}
    ),
    "LoRA, op": replace(ACTIVATIONS, converters=LORA, checkpoint=BY_OP),
    "LoRA of experts, op": replace(EXPERTS, num_tokens=1024, converters=LORA, checkpoint=BY_OP),
}


RESOLUTION = 0.003
"""Share of the peak that may be allocated before the sum is computed again."""


class TensorBytes(TorchDispatchMode):
    """Tracker of the memory of every tensor returned by an operation, within a `with` block.

    A storage counts once, by its size at the moment, as FSDP resizes them; what kernels use
    inside themselves does not. Tensors made before are not seen.
    """

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._unsummed = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(t not in (Tensor, torch.nn.Parameter, FakeTensor) for t in types):
            return (
                NotImplemented  # a DTensor: the operations on its shards are dispatched separately
            )
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            # Wrapper and fake tensors have no memory of their own.
            if type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu":
                self._follow(tensor.untyped_storage())
        if self._unsummed > RESOLUTION * self.peak:
            self.peak = max(self.peak, self.now())
        return result

    def now(self):
        """Return the live bytes."""
        self._unsummed = 0
        alive = (reference() for reference in list(self._storages.values()))
        return sum({s.data_ptr(): s.nbytes() for s in alive if s is not None}.values())

    def _follow(self, storage):
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _: self._storages.pop(key, None))
            self._unsummed += storage.nbytes()


def measure(case):
    """Return this rank's peak in bytes of a whole step, after a small one that creates the
    optimizer state."""
    spec, config = case.spec(), case.config()
    with TensorBytes() as tracked:
        world = World(rank=dist.get_rank() if dist.is_initialized() else 0, size=case.world_size)
        engine = TrainingEngine(
            config=config, model_spec=spec, hf_assets_path=None, device="cpu", world=world
        )
        num_samples = 2 * case.num_tokens // LENGTH * engine.policy.data_rank.count
        trained = np.arange(LENGTH + 1) > 0  # Logits are made of trained tokens alone.
        samples = [
            replace(make_sample(length=LENGTH + 1, seed=i), mask=trained)
            for i in range(num_samples)
        ]
        assert len(engine.policy.pack(samples)) == 2
        for step in (samples[: engine.policy.data_rank.count], samples):
            tracked.peak = 0
            engine.forward_backward(step)
            engine.optim_step()
            engine.model_state_dict()
        return tracked.peak


def measure_all():
    """Return this process's share of the peaks by name; both processes compute the cases of two
    ranks.
    """
    alone = [name for name, case in CASES.items() if case.world_size == 1]
    peaks = {name: measure(CASES[name]) for name in alone[int(os.environ["RANK"]) :: NUM_PROCESSES]}
    use_one_gloo_worker()
    dist.init_process_group("gloo")
    return peaks | {name: measure(case) for name, case in CASES.items() if case.world_size > 1}


def estimated(case):
    config = case.config()
    degrees = config.parallelism.resolve_degrees(case.world_size)
    return estimate_memory(config, spec=case.spec(), degrees=degrees, on_gpu=False)


@pytest.fixture(scope="module")
def peaks():
    ranks = run_ranks(measure_all, NUM_PROCESSES, timeout_s=500)
    # Stages differ; of the others each rank has the same, or one alone has it.
    return {name: max(rank.get(name, 0) for rank in ranks) for name in CASES}


@pytest.mark.medium
@pytest.mark.timeout(560)
@pytest.mark.parametrize("name", CASES)
def test_estimate_is_within_30_percent_of_the_peak(peaks, name):
    need = estimated(CASES[name])
    assert peaks[name] > 200e6
    assert need.total == pytest.approx(peaks[name], rel=BOUND), need.describe()


def test_parameters_gradients_and_state_are_counted_exactly():
    # 8 blocks of 512 x (1024 + 512 + 3072 + 1536) + 1024 + 64 numbers, embedding and a norm.
    block = 512 * (2 * 512 + 512 + 2 * 1536 + 1536) + 2 * 512 + 2 * 32
    numbers = 8 * block + 2048 * 512 + 512
    matrices = 8 * 512 * (2 * 512 + 512 + 2 * 1536 + 1536)
    adam = estimated(PARAMETERS)
    assert (adam.parameters, adam.gradients, adam.optimizer) == (
        4 * numbers,
        4 * numbers,
        8 * numbers,
    )
    early = estimated(replace(PARAMETERS, optimizer={"early_step_in_backward": True}))
    assert (early.held, early.total) == (adam.held - adam.gradients, adam.total)
    muon = estimated(replace(PARAMETERS, optimizer={"name": "Muon"}))
    assert muon.optimizer == 8 * numbers - 4 * matrices
    split = estimated(replace(PARAMETERS, degrees=FSDP2 | TP2))
    assert split.parameters == 4 * -(-numbers // 4)
    assert (
        estimated(replace(PARAMETERS, reference=True, training=BF16)).parameters
        == (4 + 2) * numbers
    )


def test_weights_frozen_by_lora_have_neither_gradient_nor_state():
    # q has 512 inputs and 512 outputs, k and v 256 outputs; o 512; gate and up 512 and 1536, down
    # the reverse.
    factors = 16 * ((512 + 512) + 2 * (512 + 256) + (512 + 512) + 2 * (512 + 1536) + (1536 + 512))
    plain = estimated(PARAMETERS)
    adapted = estimated(replace(PARAMETERS, converters=LORA))
    assert adapted.gradients == 4 * 8 * factors
    assert adapted.optimizer == 2 * adapted.gradients
    assert adapted.parameters == plain.parameters + adapted.gradients
    # A merged copy of each matrix of the blocks.
    assert adapted.copies == 4 * 8 * 512 * (2 * 512 + 512 + 3 * 1536)


def test_lora_fits_when_full_training_is_refused_with_both_sizes_and_advice():
    root = qwen3_8b()
    assert root.model is not None
    config, degrees = root.trainer, ParallelismConfig().resolve_degrees(1)
    config.activation_checkpoint.mode = "full"
    every = estimate_memory(config, spec=root.model, degrees=degrees, on_gpu=True)
    config.converters = LORA
    adapted = estimate_memory(config, spec=root.model, degrees=degrees, on_gpu=True)
    says = r"GB a rank at the peak \(parameters .* its device has 120 GB: raise"
    with pytest.raises(ValueError, match=says):
        check_device_memory(every, device_bytes=120 * 10**9, compiled=False)
    check_device_memory(adapted, device_bytes=120 * 10**9, compiled=False)


@pytest.mark.parametrize(
    ("degrees", "num_held", "num_gathered_experts"),
    [
        ({"dp_shard": 2}, 1 / 2, 4 / 2),
        # Of the experts, a rank gathers its own half.
        ({"dp_shard": 4, "ep": 2}, 1 / 4, 4 / 4),
        ({"tp": 2, "etp": 2}, 1 / 2, 0),
    ],
)
def test_rank_holds_and_gathers_its_share_of_experts(degrees, num_held, num_gathered_experts):
    with torch.device("meta"):
        model = moe_spec().model.build()
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    num_all = sum(sizes.values())
    num_experts = sum(size for name, size in sizes.items() if ".experts." in name)
    num_root = sum(size for name, size in sizes.items() if not name.startswith("layers."))
    layout = Degrees(**({"dp_replicate": 1, "dp_shard": 1, "tp": 1} | degrees))
    need = estimate_memory(TrainingEngine.Config(), spec=moe_spec(), degrees=layout, on_gpu=True)
    assert need.parameters == need.gradients == 4 * math.ceil(num_held * num_all)
    assert need.optimizer == 2 * need.parameters
    # The root and both blocks; gradients of the root, of a block, and a copy of the block's.
    of_others = 2 * num_root + 2 * (num_all - num_root - num_experts) if layout.fsdp > 1 else 0
    assert need.gathered == 4 * (of_others + num_gathered_experts * num_experts)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_allocator_settings_of_the_environment_stay(monkeypatch, name):
    monkeypatch.setattr("os.environ", {})
    use_growing_segments()
    assert os.environ["PYTORCH_ALLOC_CONF"].startswith("expandable_segments:True")
    monkeypatch.setattr("os.environ", {name: "max_split_size_mb:512"})
    use_growing_segments()
    assert os.environ == {name: "max_split_size_mb:512"}
