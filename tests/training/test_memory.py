"""The estimate of memory against what a step holds.

The other ranks of a layout are only pretended, except where rows travel to their experts: how many
arrive is what the other ranks say.
"""

import dataclasses
import functools
import math
import os
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from configs.sum_digits import qwen3_8b
from losses.grpo import GRPOLoss
from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.distributed.mesh import ParallelismConfig
from rl.distributed.process_group import World
from rl.models.converters.converter import ModelConverter
from rl.models.converters.float8 import Float8
from rl.models.converters.lora import LoRA
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
    tied: bool = True
    """The output head shares the embedding's weight."""

    def spec(self) -> ModelSpec:
        model = Qwen3.Config(
            vocab_size=self.vocab_size,
            dim=self.dim,
            num_layers=self.num_layers,
            tie_embeddings=self.tied,
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
FOUR_LAYERS = dataclasses.replace(ACTIVATIONS, num_layers=4, num_tokens=4096)
UNTIED = dataclasses.replace(PARAMETERS, num_layers=4, vocab_size=16_384, tied=False)
HEAD = dataclasses.replace(LOGITS, dim=512, num_tokens=512, tied=False)
FROZEN = dataclasses.replace(PARAMETERS, num_tokens=512)


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: Shape
    degrees: dict[str, int] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    reshard: Literal["default", "always", "never"] = "default"
    reference: bool = False
    entropy: bool = False
    """The loss has a bonus for it."""
    converters: tuple[ModelConverter.Config, ...] = ()
    slow: bool = False

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
            converters=self.converters,
            loss=GRPOLoss(entropy_coef=0.1 if self.entropy else 0.0),
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
EVERY_FOURTH = {"mode": "selective", "selective_option": "4"}
CHUNKED = {"logits_chunk_tokens": 64}
LORA = (LoRA.Config(rank=16),)
LORA_QV = (LoRA.Config(rank=16, target_modules=("q_proj", "v_proj")),)
LORA_QKVO = (LoRA.Config(rank=16, target_modules=("qkv_proj", "o_proj")),)
LORA_AND_HEAD = (LoRA.Config(rank=16, unembedding=True),)
FLOAT8 = (Float8.Config(emulate=True),)
FLOAT8_GATHERED = (Float8.Config(emulate=True, enable_fsdp_float8_all_gather=True),)

CASES = {
    "parameters": Case(shape=PARAMETERS),
    "activations": Case(shape=ACTIVATIONS),
    "logits": Case(shape=LOGITS),
    "logits bf16, entropy": Case(shape=LOGITS, training=BF16, entropy=True),
    "logits TP2, entropy": Case(
        shape=dataclasses.replace(LOGITS, num_tokens=2048), degrees=TP2, entropy=True, slow=True
    ),
    "mixed": Case(shape=MIXED),
    "parameters bf16": Case(shape=PARAMETERS, training=BF16),
    "activations bf16": Case(shape=ACTIVATIONS, training=BF16),
    "logits bf16": Case(shape=LOGITS, training=BF16, slow=True),
    "mixed, chunked logits": Case(shape=MIXED, training={"logits_chunk_tokens": 128}),
    "activations, full": Case(
        shape=dataclasses.replace(ACTIVATIONS, num_tokens=8192), checkpoint=FULL, slow=True
    ),
    "activations bf16, full": Case(
        shape=dataclasses.replace(ACTIVATIONS, num_tokens=16_384), training=BF16, checkpoint=FULL, slow=True
    ),
    "activations, by op": Case(shape=dataclasses.replace(ACTIVATIONS, num_tokens=4096), checkpoint=BY_OP),
    "activations, every second": Case(
        shape=dataclasses.replace(ACTIVATIONS, num_tokens=4096), checkpoint=EVERY_SECOND, slow=True
    ),
    "mixed, full": Case(shape=dataclasses.replace(MIXED, num_tokens=2048), checkpoint=FULL, slow=True),
    "parameters, Muon": Case(shape=PARAMETERS, optimizer={"name": "Muon"}),
    "parameters, foreach": Case(shape=PARAMETERS, optimizer={"implementation": "foreach"}),
    "parameters, Adam foreach": Case(
        shape=PARAMETERS,
        optimizer={"name": "Adam", "implementation": "foreach", "weight_decay": 0.1},
        slow=True,
    ),
    "parameters, reference": Case(shape=PARAMETERS, reference=True),
    "parameters bf16, reference": Case(shape=PARAMETERS, training=BF16, reference=True, slow=True),
    "parameters, FSDP2": Case(shape=PARAMETERS, degrees=FSDP2),
    "parameters, FSDP2 never": Case(shape=PARAMETERS, degrees=FSDP2, reshard="never"),
    "parameters, FSDP2 bf16": Case(shape=PARAMETERS, degrees=FSDP2, training=BF16, slow=True),
    "parameters, FSDP4 Muon": Case(
        shape=dataclasses.replace(PARAMETERS, num_tokens=256), degrees=FSDP4, optimizer={"name": "Muon"}
    ),
    "parameters, DDP2": Case(shape=PARAMETERS, degrees=DDP2),
    "parameters, TP2": Case(shape=PARAMETERS, degrees=TP2),
    "activations, TP2": Case(shape=dataclasses.replace(ACTIVATIONS, num_tokens=4096), degrees=TP2),
    "activations, TP2 by op": Case(
        shape=dataclasses.replace(ACTIVATIONS, num_tokens=8192), degrees=TP2, checkpoint=BY_OP, slow=True
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
    "routed, full": Case(shape=dataclasses.replace(ROUTED, num_tokens=8192), checkpoint=FULL, slow=True),
    "routed, by op": Case(shape=dataclasses.replace(ROUTED, num_tokens=4096), checkpoint=BY_OP, slow=True),
    "routed, FSDP2 x EP2": Case(shape=ROUTED, degrees=FSDP2 | EP2),
    "routed, FSDP2 x EP2 by op": Case(
        shape=dataclasses.replace(ROUTED, num_tokens=4096), degrees=FSDP2 | EP2, checkpoint=BY_OP
    ),
    "routed, TP2": Case(shape=dataclasses.replace(ROUTED, num_tokens=4096), degrees=TP2),
    "routed, TP2 split": Case(shape=dataclasses.replace(ROUTED, num_tokens=4096), degrees=TP2 | ETP2),
    "4 layers, every second": Case(shape=FOUR_LAYERS, checkpoint=EVERY_SECOND),
    "8 layers, every fourth": Case(
        shape=dataclasses.replace(ACTIVATIONS, num_tokens=4096), checkpoint=EVERY_FOURTH, slow=True
    ),
    "8 layers, TP2 every second": Case(
        shape=dataclasses.replace(ACTIVATIONS, num_tokens=8192),
        degrees=TP2,
        checkpoint=EVERY_SECOND,
        slow=True,
    ),
    "untied": Case(shape=UNTIED),
    "untied, FSDP2": Case(shape=dataclasses.replace(UNTIED, vocab_size=32_768), degrees=FSDP2),
    "untied, chunked logits": Case(shape=HEAD, training=CHUNKED),
    "untied, FSDP2 chunked logits": Case(shape=HEAD, degrees=FSDP2, training=CHUNKED, slow=True),
    "untied, TP2": Case(shape=dataclasses.replace(HEAD, num_tokens=1024), degrees=TP2),
    "LoRA": Case(shape=FROZEN, converters=LORA, slow=True),
    "LoRA, pushed": Case(shape=PARAMETERS, converters=LORA),
    "LoRA bf16": Case(shape=FROZEN, converters=LORA, training=BF16, slow=True),
    "LoRA, FSDP2": Case(shape=FROZEN, converters=LORA, degrees=FSDP2),
    "LoRA, FSDP2 never": Case(shape=FROZEN, converters=LORA, degrees=FSDP2, reshard="never", slow=True),
    "LoRA, DDP2": Case(shape=FROZEN, converters=LORA, degrees=DDP2, slow=True),
    "LoRA, reference": Case(shape=FROZEN, converters=LORA, reference=True, slow=True),
    "LoRA, Muon": Case(shape=FROZEN, converters=LORA, optimizer={"name": "Muon"}, slow=True),
    "LoRA, activations": Case(shape=FOUR_LAYERS, converters=LORA, slow=True),
    "LoRA, activations of q and v": Case(shape=FOUR_LAYERS, converters=LORA_QV),
    "LoRA, activations by op": Case(shape=FOUR_LAYERS, converters=LORA, checkpoint=BY_OP),
    "LoRA, activations full": Case(
        shape=dataclasses.replace(ACTIVATIONS, num_tokens=8192), converters=LORA, checkpoint=FULL, slow=True
    ),
    "LoRA, activations TP2": Case(
        shape=dataclasses.replace(FOUR_LAYERS, num_tokens=6144), converters=LORA, degrees=TP2, slow=True
    ),
    "LoRA, mixed, FSDP2 x TP2": Case(
        shape=dataclasses.replace(MIXED, num_tokens=2048),
        converters=LORA,
        degrees=FSDP2 | TP2,
        slow=True,
    ),
    "LoRA, head": Case(shape=HEAD, converters=LORA_AND_HEAD),
    "LoRA, head FSDP2": Case(shape=HEAD, converters=LORA_AND_HEAD, degrees=FSDP2, slow=True),
    "LoRA, head TP2": Case(
        shape=dataclasses.replace(HEAD, num_tokens=1024), converters=LORA_AND_HEAD, degrees=TP2, slow=True
    ),
    "LoRA, head chunked": Case(shape=HEAD, converters=LORA_AND_HEAD, training=CHUNKED, slow=True),
    "LoRA, routed": Case(shape=ROUTED, converters=LORA_QKVO),
    "LoRA, routed by op": Case(
        shape=dataclasses.replace(ROUTED, num_tokens=4096),
        converters=LORA_QKVO,
        checkpoint=BY_OP,
        slow=True,
    ),
    "LoRA, routed FSDP2 x EP2": Case(shape=ROUTED, converters=LORA_QKVO, degrees=FSDP2 | EP2, slow=True),
    "LoRA, experts FSDP2": Case(
        shape=dataclasses.replace(EXPERTS, num_tokens=512, num_experts=32),
        converters=LORA_QKVO,
        degrees=FSDP2,
        slow=True,
    ),
    "Float8": Case(shape=PARAMETERS, converters=FLOAT8, slow=True),
    "Float8, activations bf16": Case(shape=ACTIVATIONS, converters=FLOAT8, training=BF16, slow=True),
    "Float8, activations by op": Case(
        shape=dataclasses.replace(ACTIVATIONS, num_tokens=4096),
        converters=FLOAT8,
        checkpoint=BY_OP,
        slow=True,
    ),
    "Float8, FSDP2 never": Case(
        shape=PARAMETERS, converters=FLOAT8_GATHERED, degrees=FSDP2, reshard="never", slow=True
    ),
    "Float8 and LoRA": Case(shape=FOUR_LAYERS, converters=FLOAT8 + LORA, slow=True),
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
            engine.model_state_dict()
        return tracked.peak


class EmptyIsZero(TorchDispatchMode):
    """What a rank that is only pretended would have sent stays as it was made: a number, whatever was in that
    memory before."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if type(made) is torch.Tensor and "empty" in func._schema.name:
            made.zero_()
        return made


def measure_pretended(slow):
    """Peaks, by name, of every second case whose other ranks need not be there: this process's share."""
    names = [name for name, case in CASES.items() if case.slow == slow and not case.has_real_ranks]
    peaks = {}
    for name in names[int(os.environ["RANK"]) :: NUM_PROCESSES]:
        case = CASES[name]
        if case.world_size > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.world_size)
        with EmptyIsZero() if case.world_size > 1 else nullcontext():
            peaks[name] = measure(case)
        if case.world_size > 1:
            dist.destroy_process_group()
    return peaks


def measure_real(num_ranks, slow):
    """Of every case with this many real ranks."""
    dist.init_process_group("gloo")
    cases = {name: case for name, case in CASES.items() if case.slow == slow and case.has_real_ranks}
    peaks = {name: measure(case) for name, case in cases.items() if case.world_size == num_ranks}
    dist.destroy_process_group()
    return peaks


def estimated(case):
    config = case.config()
    degrees = config.parallelism.degrees(case.world_size)
    return config.estimate_memory(case.shape.spec(), degrees=degrees, on_gpu=False)


def once(measuring):
    """Like `functools.cache`, but an error is kept too: who asks again is told, nothing is tried again."""
    results: dict[Any, Any] = {}
    errors: dict[Any, BaseException] = {}

    @functools.wraps(measuring)
    def kept(*args):
        if args in errors:
            pytest.fail(f"not measured: {type(errors[args]).__name__}: {errors[args]}", pytrace=False)
        if args not in results:
            try:
                results[args] = measuring(*args)
            except (Exception, pytest.fail.Exception) as error:
                errors[args] = error
                raise
        return results[args]

    return kept


@pytest.fixture(scope="module")
def measured():
    """The peak of a case; all whose ranks are pretended are measured at once, slow ones apart."""

    @once
    def pretended(slow):
        shares = run_ranks(measure_pretended, NUM_PROCESSES, slow, timeout_s=280)
        return {name: peak for share in shares for name, peak in share.items()}

    real = once(lambda size, slow: run_ranks(measure_real, size, size, slow, timeout_s=100)[0])

    def peak(name):
        case = CASES[name]
        peaks = real(case.world_size, case.slow) if case.has_real_ranks else pretended(case.slow)
        return peaks[name]

    return peak


def marked(name):
    return pytest.param(name, marks=pytest.mark.slow if CASES[name].slow else pytest.mark.medium)


@pytest.mark.timeout(320)
@pytest.mark.parametrize("name", [marked(name) for name in CASES])
def test_estimate_is_within_15_percent_of_the_peak(measured, name):
    estimate, peak = estimated(CASES[name]), measured(name)
    assert peak > 200e6
    assert estimate.total == pytest.approx(peak, rel=BOUND), estimate.describe()


def test_a_measuring_that_fails_is_not_tried_again_and_its_error_told_to_all():
    tried = []

    @once
    def measuring(size):
        tried.append(size)
        if size > 1:
            raise OSError("no memory")
        return {"a": size}

    with pytest.raises(OSError, match="no memory"):
        measuring(2)
    with pytest.raises(pytest.fail.Exception, match="not measured: OSError: no memory"):
        measuring(2)
    assert measuring(1) == measuring(1) == {"a": 1}
    assert tried == [2, 1]


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


def test_gradient_of_the_entropy_is_counted_where_it_takes_more():
    numbers = LOGITS.num_tokens * LOGITS.vocab_size
    assert estimated(CASES["logits bf16"]).logits == numbers * (2 + 3 * 4)
    assert estimated(CASES["logits bf16, entropy"]).logits == numbers * 4 * 4
    # Twice as many tokens, each with half of the vocabulary.
    assert estimated(CASES["logits TP2, entropy"]).logits == numbers * 4 * 4


def test_what_lora_freezes_has_neither_gradient_nor_state():
    # q: 512 in and 512 out, k and v 256 out; o 512; gate and up 512 in and 1536 out, down the other way.
    factors = 16 * ((512 + 512) + 2 * (512 + 256) + (512 + 512) + 2 * (512 + 1536) + (1536 + 512))
    plain = estimated(Case(shape=PARAMETERS))
    adapted = estimated(Case(shape=PARAMETERS, converters=LORA))
    assert adapted.gradients == 4 * 8 * factors
    assert adapted.optimizer == 2 * adapted.gradients
    assert adapted.parameters == plain.parameters + adapted.gradients
    # A merged copy of each matrix of the blocks, and the last, largest one's product twice in float32.
    matrices = 512 * (2 * 512 + 512 + 3 * 1536)
    assert adapted.merged == 4 * (8 * matrices + 2 * 2 * 512 * 1536)


def test_lora_fits_where_training_all_weights_does_not():
    config = qwen3_8b().trainer
    config.parallelism.data_parallel_shard_degree = 1
    config.activation_checkpoint.mode = "full"
    degrees = config.parallelism.degrees(1)
    every = config.estimate_memory(qwen3_8b().model, degrees=degrees, on_gpu=True)
    config.converters = LORA
    adapted = config.estimate_memory(qwen3_8b().model, degrees=degrees, on_gpu=True)
    with pytest.raises(ValueError, match="the trainer needs"):
        check_device_memory(every, device_bytes=140 * 10**9, compiled=False)
    check_device_memory(adapted, device_bytes=140 * 10**9, compiled=False)
    # 8.19 billion weights in float32 and in bfloat16, or a merged copy of all but the embeddings instead.
    assert adapted.held == pytest.approx(33e9, rel=0.03)
    assert adapted.gathered == pytest.approx(16.4e9, rel=0.02)
    assert adapted.merged == pytest.approx(28e9, rel=0.05)


def test_more_than_the_device_has_is_refused_with_both_sizes_and_a_way_out():
    need = estimated(CASES["parameters"])
    check_device_memory(need, device_bytes=need.total, compiled=False)
    with pytest.raises(
        ValueError, match=r"GB a rank at the peak \(parameters .* its device has .* GB: raise"
    ):
        check_device_memory(need, device_bytes=need.total - 1, compiled=False)


def test_more_than_the_device_has_is_a_warning_where_the_estimate_is_an_upper_bound(caplog):
    need = estimated(CASES["parameters"])
    check_device_memory(need, device_bytes=need.total, compiled=True)
    assert not caplog.records
    check_device_memory(need, device_bytes=need.total - 1, compiled=True)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"the trainer needs {need.describe()}, its device has" in record.getMessage()
