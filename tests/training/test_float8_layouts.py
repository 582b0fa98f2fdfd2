"""Float8 all-gathers of FSDP2 give the numbers of one device.

Scales by row, LoRA and other layouts are among the cases of test_layout_options.py.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from rl.distributed.sharding import unwrapped
from rl.models.float8 import Float8
from tests.support.distributed import run_ranks
from tests.training.layouts import float8_samples, parallelism, to_numpy, whole_gradients
from tests.training.parts import assert_near, even_spec, make_engine
from tests.training.test_layouts import assert_same_result

pytestmark = [pytest.mark.medium, pytest.mark.timeout(300)]


def measure(layout: str, folder: str) -> dict[str, Any]:
    """Take three steps, with a checkpoint written and loaded after the second."""
    gathers = layout != "one"
    float8 = Float8.Config(
        emulate=True,
        enable_fsdp_float8_all_gather=gathers,
        precompute_float8_dynamic_scale_for_fsdp=gathers,
    )
    engine = make_engine(
        None,
        spec=even_spec(),
        parallelism=parallelism(layout),
        max_tokens_per_microbatch=20,
        converters=(float8,),
    )
    samples = float8_samples()
    found: dict[str, Any] = {"whole": engine.forward_backward(samples)}
    found["gradients"] = whole_gradients(engine)
    found["norms"] = [engine.optim_step().grad_norm]
    engine.forward_backward(samples)
    found["norms"].append(engine.optim_step().grad_norm)
    engine.save_checkpoint(folder)
    engine.forward_backward(samples)
    engine.optim_step()
    found["scales"] = {"stepped": weight_scales(engine)}
    engine.load_checkpoint(folder)
    found["scales"]["loaded"] = weight_scales(engine)
    engine.forward_backward(samples)
    found["norms"].append(engine.optim_step().grad_norm)
    found["parameters"] = {name: to_numpy(tensor) for name, tensor in engine.model_state_dict().items()}
    found["losses"] = [engine.forward_backward(samples).loss_sum]
    for parameter in engine.policy.parameters.values():
        if (scale := scale_ahead(parameter)) is not None:
            scale.mul_(10.0)
    found["losses"].append(engine.forward_backward(samples).loss_sum)
    engine.close()
    return found


def scale_ahead(parameter):
    """Return the precomputed scale that FSDP's next float8 all-gather applies to this shard, or None."""
    shard = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return getattr(shard, "_precomputed_scale", None)


def weight_scales(engine):
    """Return each precomputed scale and the scale that belongs to the current weight."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    return [
        (float(scale), largest / float(np.abs(to_numpy(unwrapped(parameter.detach()))).max()))
        for parameter in engine.policy.parameters.values()
        if (scale := scale_ahead(parameter)) is not None
    ]


def test_gathered_float8_equals_one_device_with_the_scales_of_the_current_weights(tmp_path):
    expected = measure("one", str(tmp_path / "one"))
    for rank in run_ranks(measure, 2, "fsdp2", str(tmp_path / "fsdp2"), timeout_s=250):
        assert_same_result(rank["whole"], expected["whole"])
        assert_near(rank["gradients"], expected["gradients"])
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert_near(rank["parameters"], expected["parameters"])
        for scales in rank["scales"].values():
            assert len(scales) == 8
            assert [scale for scale, _ in scales] == pytest.approx([wanted for _, wanted in scales], rel=1e-6)
        assert rank["scales"]["stepped"] != rank["scales"]["loaded"]
        with_scales, with_other_scales = rank["losses"]
        assert abs(with_other_scales - with_scales) > 0.1
