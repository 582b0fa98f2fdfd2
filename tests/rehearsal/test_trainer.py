"""The trainer on the null device: kernels that must be chosen, waits, memory and compiled
blocks.
"""

import pytest

from tests.support.rehearsal import Rehearsal

pytestmark = pytest.mark.rehearsal

DTYPES = ("bfloat16", "float32")


@pytest.fixture(scope="module")
def trained(null_gpu, tmp_path_factory):
    """Return what `trainer_steps` found, by case."""
    rehearsal = Rehearsal(gpu=null_gpu, folder=tmp_path_factory.mktemp("trainer"))
    return rehearsal.python(
        "-m", "tests.rehearsal.trainer_steps", "bfloat16", "float32", "lack"
    ).result


def test_attention_takes_kernels_for_segments_with_memory_linear_in_the_tokens(trained):
    """Once a layer and micro-batch, and flash attention with the two heads that the keys have."""
    of_kind = {
        dtype: {k: n for k, n in trained[dtype]["attention"].items() if n} for dtype in DTYPES
    }
    assert of_kind == {
        "bfloat16": {"flash_fwd": 1, "flash_bwd_dq_dk_dv": 1},
        "float32": {"fmha_cutlassF_f32": 1, "fmha_cutlassB_f32": 1},
    }
    assert trained["bfloat16"]["key_heads"] == [2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_step_takes_one_fused_optimizer_kernel_and_waits_twice(trained, dtype):
    """For the sums of the loss and for the norm of the gradient, whatever the number of
    micro-batches.
    """
    found = trained[dtype]
    assert found["num_batches"] > 1
    assert found["fused_adamw"] == 1
    assert found["waits"] == 2
    # The results; what goes to the device is page-locked.
    assert found["pageable_copies"] == {"copy device to host, pageable": 2}


@pytest.mark.parametrize("dtype", DTYPES)
def test_peak_is_reported_and_within_the_estimate(trained, dtype):
    found = trained[dtype]
    assert found["peak"] <= found["reserved"] < found["total"]
    assert 0 < found["peak"] < found["estimate"] * 1.3


def test_segments_grow_and_are_given_back_asleep(trained):
    for dtype in DTYPES:
        assert trained[dtype]["expandable"]
        assert trained[dtype]["given_back"] >= trained[dtype]["moved"] > 0


def test_lack_of_memory_is_explained(trained):
    message = trained["lack"]
    assert message.startswith(
        "forward_backward of policy version 0: a rank of the trainer ran out of GPU memory. "
    )
    assert "of the GPU's 85.9 GB at the peak" in message
    assert "set activation_checkpoint.mode='none' to 'full'" in message


def test_compiled_blocks_serve_batches_of_all_lengths_with_shared_prompts(null_gpu, tmp_path):
    """No graph is made after the third batch, attention is part of the graphs, and fewer kernels
    are launched.
    """
    rehearsal = Rehearsal(gpu=null_gpu, folder=tmp_path)
    found = rehearsal.python("-m", "tests.rehearsal.trainer_steps", "compiled", limit_s=600).result[
        "compiled"
    ]
    assert found["graphs"][2] == found["graphs"][-1]
    assert found["graph_breaks"] == 0
    assert found["flash"] == 1
    assert found["shared"]
    assert found["launches"][-1] < 0.85 * found["eager_launches"]
