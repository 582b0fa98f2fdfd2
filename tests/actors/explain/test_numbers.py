"""Numbers of an explanation compared with what the run's own parts compute."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from actors.checks import Machine
from actors.explain.numbers import bytes_on_rank, memory, staleness, step_arithmetic, tensor_bytes
from configs.sum_digits import qwen3_32b, tiny
from rl.config.tree import rebuild
from rl.distributed.sharding import local_tensor
from rl.loop.config import LoopConfig
from rl.models import qwen3, qwen3_moe
from rl.models.decoder import persistent_buffers
from rl.models.parallelize_generator import parallelize_decoder_generator
from rl.rollouts.packing import pack
from rl.rollouts.samples import demonstration_sample
from rl.training.engine import TrainingEngine
from rl.weights.boxes import num_bytes, outgoing_parts
from tests.support.loops import run, some_right
from tests.support.simulated import SimulatedPolicy


def step(*, single_turn: bool = False, **edits: object) -> dict[str, Any]:
    """Explain a step of an edited config; `__` in a keyword stands for a dot."""
    config = rebuild(tiny(), {path.replace("__", "."): value for path, value in edits.items()})
    return step_arithmetic(config, spec=config.model, single_turn=single_turn)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_micro_batches_equal_the_packing(num_ranks, num_minibatches):
    found = step(
        trainer__num_procs=num_ranks,
        trainer__training__max_tokens_per_microbatch=128,
        loop__groups_per_batch=14,
        loop__group_size=5,
        loop__num_minibatches=num_minibatches,
    )
    for length, end in ((2, "fewest"), (128, "most")):
        prompts = [np.full(length - 1, number, dtype=np.int32) for number in range(14 // num_minibatches)]
        samples = [demonstration_sample(p, np.arange(1, dtype=np.int32)) for p in prompts for _ in range(5)]
        packed = pack(samples, max_tokens=128, share_prompts=True, num_ranks=num_ranks)
        assert found[f"micro_batches_of_rank_{end}"] == len(packed) * num_minibatches
    assert found["trained_tokens_most"] == 14 * 5 * 127


def test_multi_turn_replies_are_bounded_by_turns_and_context():
    found = step(loop__max_sample_tokens=100)
    # Longer rollouts are generated too: up to generator.max_model_len=128, minus one token of the first prompt.
    assert (found["sample_tokens_most"], found["reply_tokens_most"]) == (100, 256 * 127)
    found = step(loop__episode__max_turns=2, loop__sampling__max_tokens=20)
    assert found["reply_tokens_most"] == 256 * 2 * 20
    assert step(single_turn=True)["reply_tokens_most"] == 256 * 32


def test_generator_without_room_for_its_longest_request_does_not_fit():
    config = qwen3_32b()
    config.generator.gpu_memory_utilization = 1.0

    def generator(gpu_gb: float) -> dict[str, Any]:
        machine = Machine(num_gpus=20, gpu_bytes=int(gpu_gb * 1e9), num_cores=64, memory_bytes=10**12)
        found: dict[str, Any] = memory(config, spec=config.model, machine=machine, on_gpu=True)["generator"]
        return found

    # 16.4 GB of weights on each of 4 ranks, and 65,536 bytes of cache a token.
    small, large = generator(16.42), generator(16.6)
    assert 0 < small["cache_tokens"] < 1024 <= large["cache_tokens"]
    assert not small["fits"]
    assert large["fits"]


@pytest.mark.parametrize(("max_off_policy_steps", "num_minibatches"), [(0, 2), (2, 2)])
def test_staleness_bound_is_kept_and_reached(max_off_policy_steps, num_minibatches):
    settings = {"max_off_policy_steps": max_off_policy_steps, "num_minibatches": num_minibatches}
    bound = staleness(LoopConfig(**settings))
    policy = SimulatedPolicy(reply=some_right, generate_s=lambda prompt: 0.5, train_s=2.0)
    records, _ = run(policy, num_steps=8, groups_per_batch=2, **settings)
    assert max(policy.age_of_tokens) == bound["policy_versions_most"]
    assert max(record["age/max"] for record in records) == bound["steps_most"]


@pytest.mark.parametrize(("family", "dtype"), [(qwen3, "float32"), (qwen3_moe, "bfloat16")])
def test_bytes_of_a_publish_equal_the_sent_weights(family, dtype):
    spec = family.model_registry("tiny")
    engine = TrainingEngine(
        config=TrainingEngine.Config(), model_spec=spec, hf_assets_path=None, device="cpu"
    )

    sent = outgoing_parts(
        engine.model_state_dict(), dtype=getattr(torch, dtype), buffer_names=engine.buffer_names()
    )
    sizes = tensor_bytes(spec, dtype=dtype)
    assert sum(sizes.values()) == sum(num_bytes(part) for part in sent)
    assert len(sizes) == len(sent)
    assert bytes_on_rank(sizes, tensor_parallel_degree=1) == sum(sizes.values())


@pytest.mark.parametrize("family", [qwen3, qwen3_moe])
def test_bytes_of_a_generator_rank_equal_its_shards(family):
    spec = family.model_registry("tiny")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with torch.device("meta"):
            model = spec.model.build()
        buffers = sum(b.nbytes for b in persistent_buffers(model).values())
        parallelize_decoder_generator(model, init_device_mesh("cpu", (2,)))
        held = sum(local_tensor(parameter).nbytes for parameter in model.parameters())
    finally:
        dist.destroy_process_group()
    sizes = tensor_bytes(spec, dtype="float32")
    assert bytes_on_rank(sizes, tensor_parallel_degree=2) == held + buffers
