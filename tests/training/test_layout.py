"""Combinations of options that cannot run are refused before a process starts."""

import pytest

from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.distributed.compile import CompileConfig
from rl.distributed.mesh import Degrees, ParallelismConfig
from rl.models.qwen3 import model_registry
from rl.training.layout import check_layout, check_selective_option
from tests.training.parts import engine_config, make_engine, small_spec


def check(*, world_size=1, device_type="cpu", compile=None, **parallelism):
    return check_layout(
        parallelism=ParallelismConfig(**parallelism),
        activation_checkpoint=ActivationCheckpointConfig(),
        compile=compile or CompileConfig(),
        world_size=world_size,
        device_type=device_type,
    )


COMPILED = CompileConfig(enable=True)


def test_degrees_are_those_of_the_world():
    assert check(world_size=8, context_parallel_degree=2, tensor_parallel_degree=2) == Degrees(
        dp_replicate=1, dp_shard=2, cp=2, tp=2
    )


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
def test_async_tensor_parallelism_is_refused_where_nothing_would_overlap(device_type, degree, compile, says):
    with pytest.raises(ValueError, match=rf"parallelism.async_tensor_parallel=True .*{says}"):
        check(
            async_tensor_parallel=True,
            world_size=degree,
            tensor_parallel_degree=degree,
            device_type=device_type,
            compile=compile,
        )


def test_compiled_autograd_is_refused_with_its_reason():
    with pytest.raises(ValueError, match="compiled_autograd=True: must be False: "):
        check(compiled_autograd=True)


@pytest.mark.parametrize("field", ["expert_parallel_degree", "expert_tensor_parallel_degree"])
def test_a_dense_model_has_no_experts_to_split(field):
    parallelism = ParallelismConfig()
    setattr(parallelism, field, 2)
    with pytest.raises(ValueError, match=f"{field}=2: must be 1: a dense model has no experts"):
        make_engine(None, parallelism=parallelism)
    setattr(parallelism, field, 0)
    with pytest.raises(ValueError, match=f"{field}=0: must be at least 1"):
        make_engine(None, parallelism=parallelism)


def test_a_degree_that_does_not_divide_the_model_is_refused():
    spec = model_registry("tiny")
    with pytest.raises(ValueError, match="tensor_parallel_degree=3 does not divide num_kv_heads=4"):
        spec.check_layout(spec.model, ParallelismConfig(tensor_parallel_degree=3))


def test_every_nth_layer_of_a_model_that_has_fewer_is_refused():
    every_second = ActivationCheckpointConfig(mode="selective", selective_option="2")
    check_selective_option(every_second, num_layers=2)
    with pytest.raises(
        ValueError, match=r"selective_option='2': must be 'op', or .* up to '1', which the model"
    ):
        check_selective_option(every_second, num_layers=1)
    config = engine_config()
    config.activation_checkpoint = ActivationCheckpointConfig(mode="selective", selective_option="99")
    with pytest.raises(ValueError, match=r"activation_checkpoint\.selective_option='99': .* up to '2'"):
        config.build(model_spec=small_spec(), hf_assets_path=None, device="cpu")
