"""Float8 all-gathers of FSDP2 give the numbers of one device.

Scales by row, LoRA and other layouts are among the cases of test_layout_options.py.
"""

from typing import Any

import pytest

from rl.models.float8 import Float8
from tests.support.distributed import run_ranks
from tests.training.layouts import float8_samples, parallelism, to_numpy, whole_gradients
from tests.training.parts import assert_near, even_spec, make_engine
from tests.training.test_layouts import assert_same_result


def measure(layout: str, folder: str) -> dict[str, Any]:
    """Take three steps, with a checkpoint written after the second and loaded after a step that is undone."""
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
    for step in range(3):
        engine.forward_backward(samples)
        norm = engine.optim_step().grad_norm
        if step == 0:
            engine.save_checkpoint(folder)
        if step == 1:  # The scales that were computed after this step would be wrong for the checkpoint.
            engine.load_checkpoint(folder)
        found["norms"].append(norm)
    found["parameters"] = {name: to_numpy(tensor) for name, tensor in engine.model_state_dict().items()}
    engine.close()
    return found


@pytest.mark.medium
@pytest.mark.timeout(300)
def test_gathered_float8_equals_one_device_after_steps_and_a_loaded_checkpoint(tmp_path):
    expected = measure("one", str(tmp_path / "one"))
    assert expected["norms"][2] == expected["norms"][3]
    for rank in run_ranks(measure, 2, "fsdp2", str(tmp_path / "fsdp2"), timeout_s=250):
        assert_same_result(rank["whole"], expected["whole"])
        assert_near(rank["gradients"], expected["gradients"])
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert_near(rank["parameters"], expected["parameters"])
