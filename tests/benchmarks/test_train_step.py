"""The benchmark compares like with like: the same tokens, loss, gradient and optimizer on all sides."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.train_step import NAMES, Worker, compare, parser, workload_of
from benchmarks.train_step_figures import (
    FLAVORS,
    LossesDifferError,
    Turn,
    Workload,
    listed_peak,
    padded_micro_batches,
    step_flops,
)
from benchmarks.train_step_sides import SIDES, Runner, describe, model_spec

ROOT = Path(__file__).parents[2]
HIDE = """
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec
hidden = {"tyro", "monarch", "vllm", "torchstore", "torchao", "trl", "peft", "datasets"}

def find_what_is_not_hidden(name, path=None, target=None):
    return None if name.partition(".")[0] in hidden else find_spec(name, path, target)

PathFinder.find_spec = staticmethod(find_what_is_not_hidden)
"""
"""A `sitecustomize` under which these packages seem not to be installed."""
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


def given(*arguments):
    return workload_of(parser().parse_args(["--device", "cpu", *arguments]))


def taking(seconds, *, losses=(2.0,)):
    """A side whose turns take that long, and whose steps all have the same loss."""
    left = iter(seconds)
    return lambda steps: Turn(step_s=next(left), losses=[*losses] * steps, peak_memory_bytes=2**30)


def test_all_sides_compute_the_same_losses_step_after_step():
    losses = {}
    for name in NAMES:
        side = SIDES[name](TINY)
        losses[name] = [side.step() for _ in range(4)]
    torch.testing.assert_close(losses["transformers"], losses["relay"], rtol=1e-5, atol=0)
    torch.testing.assert_close(losses["transformers_sorted"], losses["relay"], rtol=1e-5, atol=0)
    # The optimizers step alike: what they change is far more than that.
    assert losses["relay"][0] - losses["relay"][3] > 1e-3 * losses["relay"][0]


def test_micro_batches_hold_what_their_padded_grid_holds():
    lengths = [5, 3, 8, 2, 2]
    assert padded_micro_batches(lengths, max_tokens=16) == [[0, 1], [2, 3], [4]]
    assert padded_micro_batches(lengths, max_tokens=16, by_length=True) == [[2, 0], [1, 3, 4]]


def test_figures_are_medians_and_ratios_of_the_turns():
    # The first turn is the warm-up.
    sides = {
        "relay": taking([9, 1, 2, 6]),
        "transformers": taking([9, 4, 4, 4]),
        "transformers_sorted": taking([9, 3, 3, 3]),
    }
    result = compare(TINY, facts=describe(TINY), sides=sides, repeats=3, steps=1, threads=1)
    num_tokens = sum(TINY.lengths())
    assert 60 <= num_tokens < 60 + 24
    assert result["tokens_per_s"] == {
        "relay": num_tokens / 2,
        "transformers": num_tokens / 4,
        "transformers_sorted": num_tokens / 3,
    }
    assert (result["ratio"], result["ratio_sorted"]) == (2.0, 1.5)
    assert result["peak_memory_gib"] == dict.fromkeys(NAMES, 1.0)
    assert result["loss_difference"] == {"first": 0.0, "last": 0.0}
    assert "mfu" not in result


@pytest.mark.parametrize("wrong", [2.0001, math.nan])
def test_different_losses_are_no_comparison(wrong):
    losses = {"relay": 2.0, "transformers": 2.0, "transformers_sorted": wrong}
    sides = {name: taking([1.0], losses=[loss]) for name, loss in losses.items()}
    with pytest.raises(LossesDifferError, match=f"'transformers_sorted': {wrong}"):
        compare(TINY, facts=describe(TINY), sides=sides, repeats=1, steps=1, threads=1)


def test_flops_are_six_a_parameter_and_twelve_a_pair_of_tokens():
    sizes = {"parameters": 10, "layers": 2, "heads": 3, "head_dim": 4}
    # 6 x 10 x 4 tokens; 12 x 2 x 3 x 4 = 288 times 1 x 1 + 3 x 3 pairs.
    assert step_flops([1, 3], **sizes, causal=False) == 240 + 2880
    assert step_flops([1, 3], **sizes, causal=True) == 240 + 1440


def test_facts_of_the_tiny_flavor():
    facts = describe(TINY)
    # Embedding 320 x 128; in each of 3 blocks qkv 128 x 512, output 256 x 128, feed-forward 3 x 128 x 384
    # and norms 2 x 128 + 2 x 32; the last norm.
    assert facts.parameters == 320 * 128 + 3 * (65_536 + 32_768 + 147_456 + 320) + 128
    lengths = TINY.lengths()
    pairs = sum(length**2 for length in lengths)
    assert facts.step_flops == 6 * facts.parameters * sum(lengths) + 12 * 3 * 8 * 32 * pairs
    assert facts.peak_flops is None


def test_peaks_are_listed_for_bfloat16_by_the_devices_name():
    assert listed_peak("NVIDIA H200", "bfloat16") == 989e12
    assert listed_peak("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert listed_peak("NVIDIA H100 80GB HBM3", "bfloat16") == 989e12
    assert listed_peak("NVIDIA A100-SXM4-80GB", "bfloat16") == 312e12
    assert listed_peak("NVIDIA H200", "float32") is None
    assert listed_peak("NVIDIA GeForce RTX 4090", "bfloat16") is None


def test_the_longest_sequence_of_a_flavor_is_its_models():
    models: dict[str, Any] = {name: model_spec(name).model for name in FLAVORS}
    assert {name: model.rope.max_positions for name, model in models.items()} == FLAVORS


def test_options_say_what_is_measured():
    workload = given("--sequence-length", "128", "--tokens", "1000", "--flavor", "tiny", "--compile")
    assert workload.lengths() == [128] * 8
    assert (workload.flavor, workload.dtype, workload.compile) == ("tiny", "float32", True)
    assert set(given("--lengths", "3", "6").lengths()) == {3, 4, 5, 6}
    drawn = given("--tokens", "20000").lengths()
    assert abs(sum(drawn) / len(drawn) - (16 + 256) / 2) < 15


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--lengths 9 3", "lengths=9 3: must be at least 1, the smaller one first"),
        (
            "--flavor tiny --sequence-length 1025 --microbatch-tokens 2000",
            "at most 1024, the positions of tiny",
        ),
        ("--microbatch-tokens 200", "microbatch_tokens=200: must hold the longest sequence, 256 tokens"),
        ("--tokens 0", "tokens=0: must be at least 1"),
        ("--repeats 0", "repeats=0: must be at least 1"),
    ],
)
def test_a_size_out_of_range_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        given(*arguments.split())


def test_a_runner_times_its_steps_and_returns_their_losses():
    runner = Runner("relay", TINY)
    expected = SIDES["relay"](TINY)
    turn = runner.turn(3)
    assert turn.losses == [expected.step() for _ in range(3)]
    assert 0 < turn.step_s < 60


def test_a_worker_that_ends_says_why():
    ended = r"(?s)nobody ended with 2.*invalid choice: 'nobody'"
    with Worker("nobody", TINY, threads=1) as worker, pytest.raises(RuntimeError, match=ended):
        worker.turn(1)


@pytest.mark.medium
def test_the_benchmark_runs_where_nothing_but_torch_and_transformers_is_installed(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    arguments = ["--quick", "--device", "cpu", "--flavor", "tiny", "--tokens", "300", "--threads", "1"]
    command = [sys.executable, "-m", "benchmarks.train_step", *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["ratio"] == result["tokens_per_s"]["relay"] / result["tokens_per_s"]["transformers"]
    assert result["loss_difference"]["last"] < 1e-5
    # At least weights, gradients and two moments, each of 4 bytes.
    assert all(memory > 16 * result["parameters"] / 2**30 for memory in result["peak_memory_gib"].values())
