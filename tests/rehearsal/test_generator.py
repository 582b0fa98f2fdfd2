"""What the generator launches in a layer and waits for in a step, on the null device.

The counts are those of golden.json. Kernels are counted when they are captured, or in a forward
without graphs.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.rehearsal

MOST_LAUNCHES = 14


@pytest.mark.parametrize(
    ("family", "ranks", "graphs"),
    [
        ("qwen3", 1, False),
        ("qwen3", 2, True),
        ("llama", 1, True),
        ("qwen3_moe", 1, False),
        ("gemma3_text", 1, False),
    ],
)
def test_layers_launch_few_kernels_and_steps_wait_once_for_tokens(
    rehearsal, golden, family, ranks, graphs
):
    options = (family, "--ranks", str(ranks), *(["--graphs"] if graphs else []))
    ended = rehearsal.python(
        "-m", "tests.rehearsal.generator_steps", *options, settings={"DEVICES": ranks}
    )
    result = ended.result
    calls, kernels = result["calls"], result["captured"] if graphs else result["eager"]
    assert (result["tokens"], result["violations"], ended.violations) == (4, 0, [])
    most = golden["generator_layer"][f"{family}-tp{ranks}"]
    assert sum(kernels.values()) == most, kernels
    if graphs:
        assert calls["cudaGraphLaunch"] == 1
    # Tokens and logprobs go to pinned memory and are waited for once; the other wait is for the
    # last step's inputs.
    waits = {
        name: count
        for name, count in calls.items()
        if "Synchronize" in name or name == "cudaMemcpy"
    }
    assert waits == {"cudaEventSynchronize": 2}
    copies = {
        name: n for name, n in calls.items() if "device to host" in name or "pageable" in name
    }
    assert copies == {"copy device to host, pinned": 2}


def test_golden_layers_launch_at_most_fourteen_kernels(golden):
    """Except those with experts, or with norms and gates for which vLLM has no kernel."""
    fused = {
        name: n
        for name, n in golden["generator_layer"].items()
        if name.startswith(("qwen3-", "llama-"))
    }
    assert 0 < max(fused.values()) <= MOST_LAUNCHES
