from collections.abc import Callable
from typing import Any

import pytest

from rl.distributed.mesh import ParallelismConfig
from rl.models.qwen3.model import Qwen3
from rl.models.qwen3_moe.parallelize import check_qwen3_moe_layout


@pytest.mark.parametrize(
    ("degrees", "named"),
    [
        ({"expert_parallel_degree": 4}, "expert_parallel_degree=4 does not divide num_experts=6"),
        ({"tensor_parallel_degree": 4}, "tensor_parallel_degree=4 does not divide num_kv_heads=2"),
    ],
)
def test_degrees_that_do_not_divide_the_mixture_are_refused_by_name(
    make_config: Callable[..., Qwen3.Config], degrees: dict[str, Any], named: str
) -> None:
    fitting: dict[str, Any] = {
        "expert_parallel_degree": 3,
        "tensor_parallel_degree": 2,
        "context_parallel_degree": 2,
    }
    check_qwen3_moe_layout(make_config(), ParallelismConfig(**fitting))
    with pytest.raises(ValueError, match=named):
        check_qwen3_moe_layout(make_config(), ParallelismConfig(**(fitting | degrees)))
