"""All sides of the benchmark have the same tokens, loss, gradient and optimizer."""

import math
from dataclasses import asdict
from typing import Any

import pytest
import torch

from benchmarks.train_step import (
    FLAVORS,
    NAMES,
    LossesDifferError,
    Workload,
    compare,
    parser,
    workload_of,
)
from benchmarks.train_step_sides import SIDES, Runner, describe, model_spec

TINY = Workload(
    flavor="tiny",
    device="cpu",
    dtype="float32",
    min_length=3,
    max_length=24,
    tokens=60,
    microbatch_tokens=40,
    logits_chunk_tokens=None,
    compile=False,
)


def taking(seconds, *, losses=(2.0,)):
    """Return a side whose turns take this long and whose steps all have the same loss."""
    left = iter(seconds)
    return lambda steps: {
        "step_s": next(left),
        "losses": [*losses] * steps,
        "peak_memory_bytes": 2**30,
    }


def test_all_sides_compute_the_same_losses_at_every_step():
    losses = {}
    for name in NAMES:
        side = SIDES[name](TINY)
        losses[name] = [side.step() for _ in range(4)]
    torch.testing.assert_close(losses["transformers"], losses["relay"], rtol=1e-5, atol=0)
    torch.testing.assert_close(losses["transformers_sorted"], losses["relay"], rtol=1e-5, atol=0)
    turn = Runner(name="relay", workload=asdict(TINY), num_threads=1).turn(3)
    assert turn["losses"] == losses["relay"][:3]
    assert 0 < turn["step_s"] < 60
    # The optimizers make equal steps: the parameters change far more than the tolerance.
    assert losses["relay"][0] - losses["relay"][3] > 1e-3 * losses["relay"][0]


def test_figures_are_medians_and_ratios_of_the_turns():
    def result_of(facts):
        # The first turn is the warm-up.
        seconds = ([9, 1, 2, 6], [9, 4, 4, 4], [9, 3, 3, 3])
        sides = {name: taking(of_side) for name, of_side in zip(NAMES, seconds, strict=True)}
        return compare(TINY, facts=facts, sides=sides, repeats=3, steps=1, threads=1)

    result = result_of(describe(TINY))
    num_tokens = sum(TINY.lengths())
    assert 60 <= num_tokens < 60 + 24
    assert result["tokens_per_s"] == {
        "relay": num_tokens / 2,
        "transformers": num_tokens / 4,
        "transformers_sorted": num_tokens / 3,
    }
    assert result["ratio"] == {"given": 2.0, "sorted": 1.5}
    assert result["peak_memory_gib"] == dict.fromkeys(NAMES, 1.0)
    assert result["loss_difference"] == {"first": 0.0, "last": 0.0}
    assert result["mfu"] is None
    gpu = result_of(describe(TINY) | {"peak_flops": 1e6})
    assert gpu["mfu"]["relay"] == result["step_flops"] / 2 / 1e6


@pytest.mark.parametrize("wrong", [2.0001, math.nan])
def test_different_losses_are_refused(wrong):
    losses = {"relay": 2.0, "transformers": 2.0, "transformers_sorted": wrong}
    sides = {name: taking([1.0], losses=[loss]) for name, loss in losses.items()}
    with pytest.raises(LossesDifferError, match=f"'transformers_sorted': {wrong}"):
        compare(TINY, facts=describe(TINY), sides=sides, repeats=1, steps=1, threads=1)


def test_tiny_flavor_has_the_counted_parameters():
    facts = describe(TINY)
    # The embedding; qkv, output, feed-forward and norms of each of 3 blocks; the last norm.
    assert facts["parameters"] == 320 * 128 + 3 * (65_536 + 32_768 + 147_456 + 320) + 128
    lengths = TINY.lengths()
    pairs = sum(length**2 for length in lengths)
    assert facts["step_flops"] == 6 * facts["parameters"] * sum(lengths) + 12 * 3 * 8 * 32 * pairs
    assert facts["peak_flops"] is None
    models: dict[str, Any] = {name: model_spec(name).model for name in FLAVORS}
    assert {name: model.rope.max_positions for name, model in models.items()} == FLAVORS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--lengths 9 3", "lengths=9 3: must be at least 1, the smaller one first"),
        (
            "--flavor tiny --sequence-length 1025 --microbatch-tokens 2000",
            "at most 1024, the positions of tiny",
        ),
        (
            "--microbatch-tokens 200",
            "microbatch_tokens=200: must hold the longest sequence, 256 tokens",
        ),
        ("--tokens 0", "tokens=0: must be at least 1"),
    ],
)
def test_size_out_of_range_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        workload_of(parser().parse_args(["--device", "cpu", *arguments.split()]))
