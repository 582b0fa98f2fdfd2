import dataclasses
import re

import numpy as np
import pytest
import torch

from rl.training.config import TrainingConfig
from tests.training.layouts import whole_gradients
from tests.training.parts import engine_config, make_engine, make_sample, make_samples, small_spec


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens_per_microbatch": 0}, "max_tokens_per_microbatch=0: must be at least 1"),
        ({"max_sequences_per_microbatch": 0}, "max_sequences_per_microbatch=0: must be at least 1"),
        ({"max_sequence_length": 1}, "max_sequence_length=1: must be at least 2"),
        ({"global_batch_size": 256}, r"global_batch_size=256: must be None.*loop\.num_prompts"),
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
def test_an_edited_field_that_is_misspelt_or_out_of_range_is_refused_by_the_engine(
    component, field, value, says
):
    config = engine_config()
    setattr(config, component, dataclasses.replace(getattr(config, component)))
    object.__setattr__(getattr(config, component), field, value)  # a loss is frozen
    with pytest.raises(ValueError, match=rf"^{component}: {field}={value!r}.*{re.escape(says)}"):
        config.check(small_spec(), world_size=1, device=torch.device("cpu"))


def test_number_of_samples_in_a_micro_batch_is_bounded_and_changes_no_gradient():
    one, many = make_engine(None, max_sequences_per_microbatch=1), make_engine(None)
    samples = make_samples()
    assert len(one.policy.pack(samples)) == len(samples) > len(many.policy.pack(samples))
    for engine in (one, many):
        engine.forward_backward(samples)
    expected = whole_gradients(many)
    for name, gradient in whole_gradients(one).items():
        difference = np.linalg.norm(gradient - expected[name])
        assert difference <= 1e-5 * np.linalg.norm(expected[name])


def test_sample_longer_than_the_limit_or_the_models_positions_is_refused():
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
