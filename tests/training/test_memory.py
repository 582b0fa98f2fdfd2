"""The estimate of memory against what a step holds.

The other ranks of a layout are only pretended, except where rows travel to their experts: how many
arrive is what the other ranks say.
"""

import dataclasses
import functools
import math
import os
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.distributed.mesh import ParallelismConfig
from rl.distributed.process_group import World
from rl.models.qwen3.model import Attention, FeedForward, Qwen3, RoPE, TransformerBlock
from rl.models.qwen3.registry import model_registry
from rl.models.qwen3_moe.model import MoE
from rl.models.qwen3_moe.registry import model_registry as moe_registry
from rl.models.spec import ModelSpec
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.training.memory import check_device_memory
from rl.training.optimizer import Optimizer
from tests.support.distributed import run_ranks
from tests.support.tensor_bytes import TensorBytes
from tests.training.parts import make_sample

BOUND = 0.15
NUM_PROCESSES = 2
"""That measure at once, with one thread each."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a model, and of its micro-batches."""

    dim: int
    num_layers: int
    num_heads: int
    hidden_dim: int
    vocab_size: int
    num_tokens: int
    length: int
    """Of each sample."""
    num_experts: int = 0
    """Each as wide as `hidden_dim`; 0 is a dense model."""
    num_experts_per_token: int = 2

    def spec(self) -> ModelSpec:
        model = Qwen3.Config(
            vocab_size=self.vocab_size,
            dim=self.dim,
            num_layers=self.num_layers,
            block=TransformerBlock.Config(
                attention=Attention.Config(
                    num_heads=self.num_heads, num_kv_heads=self.num_heads // 2, head_dim=32
                ),
                feed_forward=FeedForward.Config(hidden_dim=self.hidden_dim),
            ),
            rope=RoPE.Config(theta=1e4, max_positions=512),
        )
        if not self.num_experts:
            return dataclasses.replace(model_registry("tiny"), model=model)
        model.block.feed_forward = MoE.Config(
            num_experts=self.num_experts,
            num_experts_per_token=self.num_experts_per_token,
            hidden_dim=self.hidden_dim,
        )
        return dataclasses.replace(moe_registry("tiny"), model=model)


# Each is dominated by another part; computing them takes a second or two.
PARAMETERS = Shape(
    dim=512, num_layers=8, num_heads=16, hidden_dim=1536, vocab_size=2048, num_tokens=128, length=64
)
ACTIVATIONS = Shape(
    dim=128, num_layers=8, num_heads=8, hidden_dim=384, vocab_size=320, num_tokens=2048, length=128
)
LOGITS = Shape(
    dim=64, num_layers=2, num_heads=4, hidden_dim=192, vocab_size=16_384, num_tokens=1024, length=128
)
MIXED = Shape(
    dim=256, num_layers=6, num_heads=8, hidden_dim=1024, vocab_size=4096, num_tokens=1024, length=256
)
EXPERTS = Shape(
    dim=256, num_layers=6, num_heads=8, hidden_dim=256, vocab_size=2048, num_tokens=256, length=64,
    num_experts=16,
)  # fmt: skip
ROUTED = Shape(
    dim=128, num_layers=8, num_heads=8, hidden_dim=128, vocab_size=320, num_tokens=2048, length=128,
    num_experts=8,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: Shape
    degrees: dict[str, int] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    reshard: Literal["default", "always", "never"] = "default"
    reference: bool = False

    @property
    def world_size(self) -> int:
        """Experts are split over ranks that are there already."""
        return math.prod(size for name, size in self.degrees.items() if not name.startswith("expert"))

    @property
    def has_real_ranks(self) -> bool:
        return "expert_parallel" in self.degrees

    def config(self) -> TrainingEngine.Config:
        degrees: dict[str, Any] = {f"{name}_degree": degree for name, degree in self.degrees.items()}
        config = TrainingEngine.Config(
            optimizer=Optimizer.Config(**self.optimizer),
            parallelism=ParallelismConfig(reshard_after_forward=self.reshard, **degrees),
            training=TrainingConfig(max_tokens_per_microbatch=self.shape.num_tokens, **self.training),
            activation_checkpoint=ActivationCheckpointConfig(**self.checkpoint),
        )
        config.reference.enable = self.reference
        # As many rows for each expert: what the estimate is of.
        config.experts.force_load_balance = bool(self.shape.num_experts)
        return config


FSDP2, FSDP4 = {"data_parallel_shard": 2}, {"data_parallel_shard": 4}
DDP2 = {"data_parallel_replicate": 2, "data_parallel_shard": 1}
TP2 = {"tensor_parallel": 2}
EP2, ETP2 = {"expert_parallel": 2}, {"expert_tensor_parallel": 2}
BF16 = {"param_dtype": "bfloat16"}
FULL, BY_OP = {"mode": "full"}, {"mode": "selective"}
EVERY_SECOND = {"mode": "selective", "selective_option": "2"}

CASES = {
    "parameters": Case(shape=PARAMETERS),
    "activations": Case(shape=ACTIVATIONS),
    "logits": Case(shape=LOGITS),
    "mixed": Case(shape=MIXED),
    "parameters bf16": Case(shape=PARAMETERS, training=BF16),
    "activations bf16": Case(shape=ACTIVATIONS, training=BF16),
    "logits bf16": Case(shape=LOGITS, training=BF16),
    "mixed, chunked logits": Case(shape=MIXED, training={"logits_chunk_tokens": 128}),
    "activations, full": Case(shape=dataclasses.replace(ACTIVATIONS, num_tokens=8192), checkpoint=FULL),
    "activations, by op": Case(shape=dataclasses.replace(ACTIVATIONS, num_tokens=4096), checkpoint=BY_OP),
    "activations, every second": Case(
        shape=dataclasses.replace(ACTIVATIONS, num_tokens=4096), checkpoint=EVERY_SECOND
    ),
    "mixed, full": Case(shape=dataclasses.replace(MIXED, num_tokens=2048), checkpoint=FULL),
    "parameters, Muon": Case(shape=PARAMETERS, optimizer={"name": "Muon"}),
    "parameters, foreach": Case(shape=PARAMETERS, optimizer={"implementation": "foreach"}),
    "parameters, Adam foreach": Case(
        shape=PARAMETERS, optimizer={"name": "Adam", "implementation": "foreach", "weight_decay": 0.1}
    ),
    "parameters, reference": Case(shape=PARAMETERS, reference=True),
    "parameters bf16, reference": Case(shape=PARAMETERS, training=BF16, reference=True),
    "parameters, FSDP2": Case(shape=PARAMETERS, degrees=FSDP2),
    "parameters, FSDP2 never": Case(shape=PARAMETERS, degrees=FSDP2, reshard="never"),
    "parameters, FSDP2 bf16": Case(shape=PARAMETERS, degrees=FSDP2, training=BF16),
    "parameters, FSDP4 Muon": Case(
        shape=dataclasses.replace(PARAMETERS, num_tokens=256), degrees=FSDP4, optimizer={"name": "Muon"}
    ),
    "parameters, DDP2": Case(shape=PARAMETERS, degrees=DDP2),
    "parameters, TP2": Case(shape=PARAMETERS, degrees=TP2),
    "activations, TP2": Case(shape=dataclasses.replace(ACTIVATIONS, num_tokens=4096), degrees=TP2),
    "activations, TP2 by op": Case(
        shape=dataclasses.replace(ACTIVATIONS, num_tokens=8192), degrees=TP2, checkpoint=BY_OP
    ),
    "logits, TP2": Case(shape=dataclasses.replace(LOGITS, num_tokens=2048), degrees=TP2),
    "mixed, FSDP2 x TP2": Case(shape=dataclasses.replace(MIXED, num_tokens=2048), degrees=FSDP2 | TP2),
    "experts": Case(shape=EXPERTS),
    "experts bf16": Case(shape=EXPERTS, training=BF16),
    "experts, FSDP2": Case(shape=EXPERTS, degrees=FSDP2),
    "experts, FSDP2 x EP2": Case(shape=EXPERTS, degrees=FSDP2 | EP2),
    "experts, FSDP4 x EP2": Case(shape=dataclasses.replace(EXPERTS, num_experts=32), degrees=FSDP4 | EP2),
    "experts, TP2": Case(shape=EXPERTS, degrees=TP2),
    "experts, TP2 split": Case(shape=dataclasses.replace(EXPERTS, num_experts=24), degrees=TP2 | ETP2),
    "routed": Case(shape=ROUTED),
    "routed bf16": Case(shape=ROUTED, training=BF16),
    "routed to 4": Case(shape=dataclasses.replace(ROUTED, num_experts_per_token=4)),
    "routed, full": Case(shape=dataclasses.replace(ROUTED, num_tokens=8192), checkpoint=FULL),
    "routed, by op": Case(shape=dataclasses.replace(ROUTED, num_tokens=4096), checkpoint=BY_OP),
    "routed, FSDP2 x EP2": Case(shape=ROUTED, degrees=FSDP2 | EP2),
    "routed, TP2": Case(shape=dataclasses.replace(ROUTED, num_tokens=4096), degrees=TP2),
    "routed, TP2 split": Case(shape=dataclasses.replace(ROUTED, num_tokens=4096), degrees=TP2 | ETP2),
}


def measure(case):
    """Peak of a whole step, in bytes, of this rank, after a small one that made the optimizer's state."""
    spec, config = case.shape.spec(), case.config()
    with TensorBytes() as tracked:
        world = World(rank=dist.get_rank() if dist.is_initialized() else 0, size=case.world_size)
        engine = TrainingEngine(
            config=config, model_spec=spec, hf_assets_path=None, device="cpu", world=world
        )
        num_samples = 2 * case.shape.num_tokens // case.shape.length * engine.policy.data_rank.count
        samples = [make_sample(length=case.shape.length + 1, seed=i) for i in range(num_samples)]
        assert len(engine.policy.pack(samples)) == 2
        for step in (samples[: engine.policy.data_rank.count], samples):
            tracked.peak = 0
            engine.forward_backward(step)
            engine.optim_step()
        return tracked.peak


def measure_pretended():
    """Peaks, by name, of every second case whose other ranks need not be there: this process's share."""
    names = [name for name, case in CASES.items() if not case.has_real_ranks]
    peaks = {}
    for name in names[int(os.environ["RANK"]) :: NUM_PROCESSES]:
        case = CASES[name]
        if case.world_size > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.world_size)
        peaks[name] = measure(case)
        if case.world_size > 1:
            dist.destroy_process_group()
    return peaks


def measure_real(num_ranks):
    """Of every case with this many real ranks."""
    dist.init_process_group("gloo")
    cases = {name: case for name, case in CASES.items() if case.has_real_ranks}
    peaks = {name: measure(case) for name, case in cases.items() if case.world_size == num_ranks}
    dist.destroy_process_group()
    return peaks


def estimated(case):
    config = case.config()
    degrees = config.parallelism.degrees(case.world_size)
    return config.estimate_memory(case.shape.spec(), degrees=degrees, on_gpu=False)


@pytest.fixture(scope="module")
def measured():
    """The peak of a case; all whose ranks are pretended are measured at once."""

    @functools.cache
    def pretended():
        shares = run_ranks(measure_pretended, NUM_PROCESSES, timeout_s=200)
        return {name: peak for share in shares for name, peak in share.items()}

    real = functools.cache(lambda size: run_ranks(measure_real, size, size, timeout_s=100)[0])

    def peak(name):
        case = CASES[name]
        return (real(case.world_size) if case.has_real_ranks else pretended())[name]

    return peak


@pytest.mark.medium
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", CASES)
def test_estimate_is_within_15_percent_of_the_peak(measured, name):
    estimate, peak = estimated(CASES[name]), measured(name)
    assert peak > 200e6
    assert estimate.total == pytest.approx(peak, rel=BOUND), estimate.describe()


def test_parameters_gradients_and_state_are_counted_exactly():
    # 8 blocks of 512 x (1024 + 512 + 3072 + 1536) + 1024 + 64 numbers, embedding and a norm.
    shape = dataclasses.replace(PARAMETERS, num_heads=16)
    block = 512 * (2 * 512 + 512 + 2 * 1536 + 1536) + 2 * 512 + 2 * 32
    numbers = 8 * block + 2048 * 512 + 512
    matrices = 8 * 512 * (2 * 512 + 512 + 2 * 1536 + 1536)
    adam = estimated(Case(shape=shape))
    assert (adam.parameters, adam.gradients, adam.optimizer) == (4 * numbers, 4 * numbers, 8 * numbers)
    muon = estimated(Case(shape=shape, optimizer={"name": "Muon"}))
    assert muon.optimizer == 8 * numbers - 4 * matrices
    split = estimated(Case(shape=shape, degrees=FSDP2 | TP2))
    assert split.parameters == 4 * -(-numbers // 4)
    assert estimated(Case(shape=shape, reference=True, training=BF16)).reference == 2 * numbers


def test_more_than_the_device_has_is_refused_with_both_sizes_and_a_way_out():
    need = estimated(CASES["parameters"])
    check_device_memory(need, device_bytes=need.total)
    with pytest.raises(
        ValueError, match=r"GB a rank at the peak \(parameters .* its device has .* GB: raise"
    ):
        check_device_memory(need, device_bytes=need.total - 1)
