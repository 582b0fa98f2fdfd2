"""Settings of the trainer: refused values, and numbers that precision, determinism and limits
change.
"""

import dataclasses
import gc
import json
import math
import re
import weakref
from typing import Any

import pytest
import torch

from losses.policy import GRPOLoss
from losses.types import LossOutput
from rl.config.json import load_values, to_dict
from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.distributed.compile import CompileConfig
from rl.distributed.mesh import ParallelismConfig
from rl.models.lora import LoRA
from rl.trainer_types import OptimParams
from rl.training.checks import check_trainer, list_trainer_checks
from rl.training.config import TrainerConfig
from rl.training.engine import TrainingEngine
from tests.training.layouts import parallelism
from tests.training.parts import (
    assert_near,
    engine_config,
    gradients,
    make_engine,
    make_sample,
    make_samples,
    small_spec,
    weights,
)

SAMPLES = make_samples()


@pytest.mark.parametrize(
    ("component", "field", "value", "says"),
    [
        ("activation_checkpoint", "mode", "selectve", "must be 'none' | 'selective' | 'full'"),
        ("optimizer", "lr", float("inf"), "must be at least 0 and below inf"),
        ("training", "max_norm", 0.0, "must be above 0"),
        ("training", "max_tokens_per_microbatch", 0, "must be at least 1"),
        ("training", "max_sequence_length", 1, "must be at least 2"),
        ("training", "seed", -1, "must be at least 0 and below 9223372036854775808"),
        ("training", "global_batch_size", 4, "must be None: the loop decides"),
        ("comm", "train_timeout_s", -1.0, "must be"),
        ("comm", "init_timeout_s", 0.0, "must be"),
        ("comm", "trace_buffer_size", -1, "must be at least 0"),
        ("compile", "components", (), "must be 'model', 'loss' or both"),
        ("loss", "kl_estimator", "k4", "must be 'k1' | 'k2' | 'k3'"),
        ("experts", "load_balance_rate", float("nan"), "must be at least 0"),
    ],
)
def test_engine_refuses_edited_field_that_is_misspelt_or_out_of_range(
    component, field, value, says
):
    config = engine_config()
    setattr(config, component, dataclasses.replace(getattr(config, component)))
    object.__setattr__(getattr(config, component), field, value)  # a loss is frozen
    with pytest.raises(
        ValueError,
        match=rf"^{component}(: |\.){re.escape(f'{field}={value!r}')}.*{re.escape(says)}",
    ):
        check_trainer(config, spec=small_spec(), world_size=1, device=torch.device("cpu"))


def test_settings_build_the_engine():
    assert TrainingEngine.Config is TrainerConfig
    assert TrainerConfig.owner is TrainingEngine


def test_json_of_the_settings_names_no_class_of_the_trainer():
    """The classes of settings can move: a run's config.json from before is read as it is."""
    config = engine_config(converters=(LoRA.Config(),))
    values = json.loads(json.dumps(to_dict(config)))
    assert "rl.training" not in json.dumps(values)
    assert values["converters"][0]["class"] == "rl.models.lora.LoRA.Config"
    assert load_values(config, values) == config


def test_bound_on_samples_in_a_micro_batch_changes_no_gradient():
    one, many = make_engine(None, max_sequences_per_microbatch=1), make_engine(None)
    assert len(one.policy.pack(SAMPLES)) == len(SAMPLES) > len(many.policy.pack(SAMPLES))
    for engine in (one, many):
        engine.forward_backward(SAMPLES)
    assert_near(gradients(one), gradients(many))


def test_sample_beyond_the_limit_or_the_models_positions_is_refused():
    cases: list[tuple[dict[str, Any], int]] = [
        ({"max_sequence_length": 9}, 9), ({"max_tokens_per_microbatch": 100}, 64)
    ]  # fmt: skip
    for settings, limit in cases:
        engine = make_engine(None, **settings)
        engine.compute_logprobs([make_sample(length=limit, seed=0)])
        with pytest.raises(
            ValueError, match=f"has {limit + 1} tokens, more than max_sequence_length={limit}"
        ):
            engine.forward_backward([make_sample(length=limit + 1, seed=0)])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"loss": GRPOLoss()}, "trainer.loss.normalization='token_mean': must be 'none'"),
        ({"max_norm": 1.0}, "trainer.training.max_norm=1.0: must be inf"),
        ({"cpu_offload": True}, "trainer.training.cpu_offload=True: must be False"),
        (
            {"parallelism": parallelism("pp2")},
            "trainer.parallelism.pipeline_parallel_degree=2: must be 1",
        ),
    ],
)
def test_step_in_the_backward_is_refused_where_all_gradients_are_needed(settings, says):
    valid = {"loss": GRPOLoss(normalization="none"), "max_norm": math.inf}
    config = engine_config(**(valid | settings))
    config.optimizer.early_step_in_backward = True
    beside = "trainer.optimizer.early_step_in_backward=True"
    with pytest.raises(ValueError, match=f"{says} with {beside}"):
        [
            check()
            for check in list_trainer_checks(config, small_spec(), world_size=2, device_type="cpu")
        ]


@pytest.mark.parametrize(
    ("device_type", "degree", "compile"),
    [
        ("cpu", 2, {"enable": True}),
        ("cuda", 1, {"enable": True}),
        ("cuda", 2, {}),
        ("cuda", 2, {"enable": True, "components": ("loss",), "backend": "aot_eager"}),
        ("cuda", 2, {"enable": True, "backend": "aot_eager"}),
    ],
)
def test_async_tensor_parallelism_is_refused_without_effect(device_type, degree, compile):
    settings = ParallelismConfig(async_tensor_parallel=True, tensor_parallel_degree=degree)
    config = engine_config(parallelism=settings, compile=CompileConfig(**compile))
    checks = list_trainer_checks(config, small_spec(), world_size=degree, device_type=device_type)
    says = (
        rf"async_tensor_parallel=True on device '{device_type}' with "
        rf"tensor_parallel_degree={degree}, .* False"
    )
    with pytest.raises(ValueError, match=says):
        [check() for check in checks]


def test_layout_or_interval_that_does_not_fit_the_model_is_refused():
    spec = small_spec()
    odd = dataclasses.replace(spec, model=dataclasses.replace(spec.model, vocab_size=63))
    third = ActivationCheckpointConfig(mode="selective", selective_option="3")
    for settings, model, world_size, says in (
        ({"parallelism": parallelism("tp2")}, odd, 2, r"^parallelism\.tensor_parallel_degree=2 "
                                                      r"does not"),
        (
            {"parallelism": parallelism("pp2"), "reduce_dtype": "bfloat16"}, spec, 2,
            "trainer.training.reduce_dtype='bfloat16': must be 'float32' with "
            "trainer.parallelism.pipeline_parallel_degree=2",
        ),
        ({"parallelism": parallelism("cp3_alltoall")}, spec, 3, "degree=3 .* must divide the 4 "
                                                                "query heads"),
        ({"parallelism": parallelism("cp4_tp2_alltoall")}, spec, 8, "the 2 query heads of a "
                                                                    "tensor-parallel rank"),
        ({"activation_checkpoint": third}, spec, 1, r"selective_option='3': .* up to '2', the la"),
        (
            {"parallelism": parallelism("pp2_zbv"), "activation_checkpoint": third}, spec, 2,
            r"activation_checkpoint.mode='selective': must be 'none' with .*_schedule='ZBVZ",
        ),
        (
            {"parallelism": parallelism("pp2_csv"), "compile": CompileConfig(enable=True)}, spec, 2,
            r"compile.enable=True: must be False with "
            r"parallelism.pipeline_parallel_schedule_csv='/.*backwards",
        ),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            check_trainer(
                engine_config(**settings),
                spec=model,
                world_size=world_size,
                device=torch.device("cpu"),
            )


def put(inputs):
    """Return a loss by an operation that has no deterministic kernel."""
    logprobs_T = torch.where(inputs.mask, inputs.logprobs, 0.0)
    put_T = torch.zeros_like(logprobs_T).put(torch.arange(len(logprobs_T)), logprobs_T)
    return LossOutput(loss_sum=put_T.sum(), denominator=None, num_tokens=inputs.mask.sum().float())


def test_deterministic_refuses_an_operation_without_a_deterministic_kernel(assets):
    make_engine(assets).forward_backward(SAMPLES, loss=put)
    try:
        engine = make_engine(assets, deterministic=True)
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            engine.forward_backward(SAMPLES, loss=put)
    finally:
        torch.use_deterministic_algorithms(False)


def test_parameters_gradients_and_moments_have_the_dtype_and_steps_round_to_it(assets):
    kept = {}
    for dtype in ("float32", "bfloat16"):
        engine = make_engine(assets, dtype=dtype, param_dtype="bfloat16")
        engine.forward_backward(SAMPLES)
        gradients = {p.grad.dtype for p in engine.policy.parameters.values() if p.grad is not None}
        before = weights(engine)
        engine.optim_step(OptimParams(lr=1e-6, weight_decay=0.0))
        after = weights(engine)
        states = engine.optimizer.state_tensors()
        moments = {states[p]["exp_avg"].dtype for p in engine.policy.parameters.values()}
        parameters = {p.dtype for p in engine.policy.parameters.values()}
        assert parameters == gradients == moments == {getattr(torch, dtype)}
        name = "norm.weight"  # about 1, so that 1e-6 is far below the spacing of bfloat16, 2**-8
        kept[dtype] = torch.equal(before[name], after[name])
    assert kept == {"float32": False, "bfloat16": True}


class Knot:
    """Object in a cycle, which only a collection frees."""

    def __init__(self):
        self.itself = self


def test_collection_runs_only_after_every_second_step():
    engine = make_engine(None, gc_every_steps=2)
    try:
        assert not gc.isenabled()
        knot = weakref.ref(Knot())
        engine.optim_step(allow_empty=True)
        assert knot() is not None
        engine.optim_step(allow_empty=True)
        assert knot() is None
    finally:
        engine.close()
    assert gc.isenabled()
