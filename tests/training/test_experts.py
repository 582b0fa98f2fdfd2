"""What is refused of a mixture's experts before anything starts. Their numbers: test_moe_layouts.py."""

import re

import pytest
import torch

from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.distributed.compile import CompileConfig
from rl.distributed.mesh import Degrees, ParallelismConfig
from rl.models.converters.lora import LoRA
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.training.experts import ExpertBalance
from tests.training.moe_layouts import moe_spec
from tests.training.parts import small_spec

DEVICE = torch.device("cpu")
FULL = ActivationCheckpointConfig(mode="full")


@pytest.mark.parametrize(("field", "value"), [("load_balance_rate", 0.001), ("force_load_balance", True)])
def test_settings_of_experts_are_refused_for_a_model_without(field, value):
    config = TrainingEngine.Config(experts=ExpertBalance.Config(**{field: value}))
    with pytest.raises(ValueError, match=rf"experts\.{field}={value}: must be .* for a model without"):
        config.check(small_spec(), world_size=1, device=DEVICE)


@pytest.mark.parametrize("field", ["expert_parallel_degree", "expert_tensor_parallel_degree"])
def test_degrees_of_experts_are_refused_for_a_model_without(field):
    parallelism = ParallelismConfig(
        **{"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2, field: 2}
    )
    config = TrainingEngine.Config(parallelism=parallelism)
    with pytest.raises(ValueError, match=f"{field}=2: must be 1: a dense model has no experts"):
        config.check(small_spec(), world_size=4, device=DEVICE)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"activation_checkpoint": ActivationCheckpointConfig(mode="full")},
            "activation_checkpoint.mode='full'",
        ),
        ({"compile": CompileConfig(enable=True, backend="eager")}, "compile.enable=True"),
        ({"training": TrainingConfig(cpu_offload=True)}, "training.cpu_offload=True"),
        ({"converters": (LoRA.Config(target_modules=("q_proj",)),)}, "converters=('LoRA.Config',)"),
    ],
)
def test_what_the_gradients_of_experts_are_not_tested_with_is_refused_by_name(fields, says):
    config = TrainingEngine.Config(**fields)
    with pytest.raises(ValueError, match=re.escape(f"{says}: must be ")):
        config.check(moe_spec(), world_size=1, device=DEVICE)


def test_degrees_fit_the_experts():
    config = TrainingEngine.Config(parallelism=ParallelismConfig(expert_parallel_degree=2))
    assert config.check(moe_spec(), world_size=2, device=DEVICE) == Degrees(
        dp_replicate=1, dp_shard=2, tp=1, ep=2
    )
    config.parallelism.expert_parallel_degree = 4
    with pytest.raises(ValueError, match="expert_parallel_degree=4 does not divide num_experts=6"):
        config.check(moe_spec(), world_size=4, device=DEVICE)
    with pytest.raises(ValueError, match="expert_parallel_degree=4 does not divide the 2 ranks"):
        config.check(moe_spec(), world_size=2, device=DEVICE)
    config.parallelism = ParallelismConfig(context_parallel_degree=2)
    with pytest.raises(ValueError, match="context_parallel_degree=2: must be 1 for a model with experts"):
        config.check(moe_spec(), world_size=2, device=DEVICE)
