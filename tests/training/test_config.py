import dataclasses
import re

import numpy as np
import pytest
import torch

from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.distributed.compile import CompileConfig
from rl.distributed.mesh import ParallelismConfig
from rl.models.parallelize import check_decoder_layout
from rl.models.qwen3 import model_registry
from rl.training.checks import check_layout, check_selective_option
from rl.training.config import TrainingConfig
from tests.training.layouts import whole_gradients
from tests.training.parts import engine_config, make_engine, make_sample, make_samples, small_spec


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens_per_microbatch": 0}, "max_tokens_per_microbatch=0: must be at least 1"),
        ({"max_sequences_per_microbatch": 0}, "max_sequences_per_microbatch=0: must be at least 1"),
        ({"max_sequence_length": 1}, "max_sequence_length=1: must be at least 2"),
        ({"global_batch_size": 256}, r"global_batch_size=256: must be None.*loop\.groups_per_batch"),
        ({"gc_every_steps": -1}, "gc_every_steps=-1: must be at least 0"),
        ({"gc_debug": True}, "gc_debug=True has no effect with gc_every_steps=0"),
        ({"max_norm": 0.0}, r"max_norm=0\.0: must be above 0"),
        ({"logits_chunk_tokens": 0}, "logits_chunk_tokens=0: must be at least 1"),
    ],
)
def test_setting_out_of_range_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**settings)


@pytest.mark.parametrize(
    ("component", "field", "value", "says"),
    [
        ("activation_checkpoint", "mode", "selectve", "must be 'none' | 'selective' | 'full'"),
        ("optimizer", "implementation", "fussed", "must be 'fused' | 'foreach' | 'for-loop'"),
        ("optimizer", "name", "Lion", "must be 'AdamW' | 'Adam' | 'Muon'"),
        ("parallelism", "reshard_after_forward", "nevr", "must be 'default' | 'always' | 'never'"),
        ("training", "param_dtype", "float16", "must be 'float32' | 'bfloat16'"),
        ("training", "max_norm", -1.0, "must be above 0"),
        ("training", "logits_chunk_tokens", 0, "must be at least 1"),
        ("training", "global_batch_size", 4, "must be None"),
        ("comm", "train_timeout_s", -1.0, "must be"),
        ("lr_scheduler", "warmup_steps", -1, "must be at least 0"),
        ("lr_scheduler", "decay", "cosin", "must be 'constant' | 'linear' | 'cosine' | 'sqrt'"),
        ("loss", "kl_estimator", "k4", "must be 'k1' | 'k2' | 'k3'"),
        ("compile", "backend", "inductr", "must be 'inductor' | 'aot_eager' | 'eager'"),
    ],
)
def test_engine_refuses_edited_field_that_is_misspelt_or_out_of_range(component, field, value, says):
    config = engine_config()
    setattr(config, component, dataclasses.replace(getattr(config, component)))
    object.__setattr__(getattr(config, component), field, value)  # a loss is frozen
    with pytest.raises(ValueError, match=rf"^{component}: {field}={value!r}.*{re.escape(says)}"):
        config.check(small_spec(), world_size=1, device=torch.device("cpu"))


def test_bound_on_samples_in_a_micro_batch_changes_no_gradient():
    one, many = make_engine(None, max_sequences_per_microbatch=1), make_engine(None)
    samples = make_samples()
    assert len(one.policy.pack(samples)) == len(samples) > len(many.policy.pack(samples))
    for engine in (one, many):
        engine.forward_backward(samples)
    expected = whole_gradients(many)
    for name, gradient in whole_gradients(one).items():
        difference = np.linalg.norm(gradient - expected[name])
        assert difference <= 1e-5 * np.linalg.norm(expected[name])


def test_sample_beyond_the_limit_or_the_models_positions_is_refused():
    limited, unlimited = (
        make_engine(None, max_sequence_length=9),
        make_engine(None, max_tokens_per_microbatch=100),
    )
    limited.compute_logprobs([make_sample(length=9, seed=0)])
    with pytest.raises(ValueError, match="has 10 tokens, more than max_sequence_length=9"):
        limited.compute_logprobs([make_sample(length=10, seed=0)])
    unlimited.compute_logprobs([make_sample(length=64, seed=0)])
    with pytest.raises(ValueError, match="has 65 tokens, more than max_sequence_length=64"):
        unlimited.forward_backward([make_sample(length=65, seed=0)])


def test_limit_beyond_the_models_positions_is_refused():
    config = engine_config(max_sequence_length=65)
    with pytest.raises(ValueError, match="max_sequence_length=65: must be at most 64, the positions of"):
        config.build(model_spec=small_spec(), hf_assets_path=None, device="cpu")


def check(*, world_size=1, device_type="cpu", compile=None, **parallelism):
    return check_layout(
        parallelism=ParallelismConfig(**parallelism),
        activation_checkpoint=ActivationCheckpointConfig(),
        compile=compile or CompileConfig(),
        world_size=world_size,
        device_type=device_type,
    )


COMPILED = CompileConfig(enable=True)


@pytest.mark.parametrize(
    ("device_type", "degree", "compile", "says"),
    [
        ("cpu", 2, COMPILED, "on device 'cpu': must be False"),
        ("cuda", 1, COMPILED, "with tensor_parallel_degree=1: must be False"),
        ("cuda", 2, CompileConfig(), "needs compile.enable=True"),
        ("cuda", 2, CompileConfig(enable=True, components=("loss",), backend="aot_eager"), "'model' among"),
        ("cuda", 2, CompileConfig(enable=True, backend="aot_eager"), "compile.backend='inductor'"),
    ],
)
def test_async_tensor_parallelism_is_refused_without_effect(device_type, degree, compile, says):
    with pytest.raises(ValueError, match=rf"parallelism.async_tensor_parallel=True .*{says}"):
        check(
            async_tensor_parallel=True,
            world_size=degree,
            tensor_parallel_degree=degree,
            device_type=device_type,
            compile=compile,
        )


def test_degree_that_does_not_divide_the_model_sizes_is_refused():
    spec = model_registry("tiny")
    with pytest.raises(ValueError, match="tensor_parallel_degree=3 does not divide num_kv_heads=4"):
        check_decoder_layout(spec.model, ParallelismConfig(tensor_parallel_degree=3))


def test_checkpoint_interval_beyond_the_number_of_layers_is_refused():
    every_second = ActivationCheckpointConfig(mode="selective", selective_option="2")
    check_selective_option(every_second, num_layers=2)
    with pytest.raises(
        ValueError, match=r"selective_option='2': must be 'op', or .* up to '1', the layers of the model"
    ):
        check_selective_option(every_second, num_layers=1)
    config = engine_config()
    config.activation_checkpoint = ActivationCheckpointConfig(mode="selective", selective_option="99")
    with pytest.raises(ValueError, match=r"activation_checkpoint\.selective_option='99': .* up to '2'"):
        config.build(model_spec=small_spec(), hf_assets_path=None, device="cpu")
