"""Whole steps with LoRA: adapters beside the base against merged weights.

    python -m benchmarks.adapter_steps [--quick]

Each measurement is a run of `smollm2 lora` with all actors, from the pretrained weights in
bfloat16, 16 x 8 completions of 16 tokens a step; with `--quick` 4 x 8. The sides alternate, so that
other load affects both. Both train the same parameters and differ in what generators get:

    apart     A and B, which they add beside the base in the forward
    merged    the sums of weights and products, rounded to bfloat16

`push_over_adapter` is the bytes of a push over those of A and B, counted from the layers' sizes.
`trainer_memory` is the bytes of all tensors that live after a step in an engine of its own, over
those of the base, A and B and Adam's two states. `merge_lost` is the share of the update that the
merge lost in the last step.

The last line is a JSON object of medians; `ratio` is apart over merged: of the time of a step, of a
push, of a pull, of the trainer's part, of the generated tokens a second, and of a push's bytes.
"""

from __future__ import annotations

import gc
import json
import statistics
from typing import Any

import numpy as np
import torch

from benchmarks.adapters import count_factors
from benchmarks.processes import (
    loop_steps,
    medians_of_sides,
    num_repeats,
    num_warmup_steps,
    step_options,
)
from rl.models.lora import LoRA
from rl.models.spec import model_spec

SIDES = {"apart": {"merge": False}, "merged": {"merge": True}}
NAMES = {
    "step_s": "time/step_s",
    "generate_s": "time/generate_s",
    "train_s": "time/train_s",
    "push_s": "time/push_s",
    "pull_s": "time/pull_s",
    "generator_tokens_s": "perf/generated_tokens_per_s",
    "pushed_mb": "sync/pushed_mb",
    "parity_diff": "parity/logprob_diff",
}
RATIOS = ("step_s", "train_s", "push_s", "pull_s", "generator_tokens_s", "pushed_mb")


def run_side(merge: bool, num_threads: int, groups: int, **how: Any) -> dict[str, float]:
    """Run one side and return the medians of its steps."""
    from configs.smollm2 import PACKAGE, lora

    config = lora()
    (adapters,) = config.trainer.converters
    assert isinstance(adapters, LoRA.Config)
    adapters.merge = merge
    config.loop.groups_per_batch = groups
    records = loop_steps(config, threads=[num_threads] * 2, assets=PACKAGE, tokens=16, **how)
    medians = {
        short: statistics.median(record[name] for record in records)
        for short, name in NAMES.items()
    }
    return medians | {"merge_lost": records[-1].get("sync/merge_lost", 0.0)}


def measure_trainer_memory() -> float:
    """Return the bytes of an engine's tensors after a step over those that it cannot do without."""
    from benchmarks.train_step_sides import to_sample
    from configs.smollm2 import lora
    from losses.cross_entropy import CrossEntropyLoss
    from rl.training.engine import TrainingEngine

    config = lora()
    assert config.model is not None
    engine = TrainingEngine(
        config=TrainingEngine.Config(
            converters=config.trainer.converters,
            loss=CrossEntropyLoss(),
            training=config.trainer.training,
        ),
        model_spec=config.model,
        hf_assets_path=None,
    )
    rng, vocab_size = np.random.default_rng(0), config.model.model.vocab_size
    samples = [to_sample(rng.integers(0, vocab_size, 64).astype(np.int32)) for _ in range(64)]
    engine.forward_backward(samples)
    engine.optim_step()
    gc.collect()
    live = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor):
            storage = item.untyped_storage()
            live[storage.data_ptr()] = storage.nbytes()
    model = engine.policy.model
    base = {p.data_ptr(): p.nbytes for p in model.parameters() if not p.requires_grad}
    factors = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return sum(live.values()) / (sum(base.values()) + 3 * factors)


def main(arguments: list[str] | None = None) -> None:
    parser = step_options(__doc__)
    args = parser.parse_args(arguments)
    medians = medians_of_sides(
        run_side,
        SIDES,
        repeats=num_repeats(args),
        threads=args.threads,
        steps=3 if args.quick else 5,
        num_warmup=num_warmup_steps(args),
        groups=4 if args.quick else 16,
    )
    apart, merged = medians["apart"], medians["merged"]
    adapter_mb = count_factors(model_spec("llama", "SmolLM2-135M"), rank=16) * 2 / 1e6
    figures = {
        "benchmark": "adapter_steps",
        "threads": args.threads,
        "repeats": num_repeats(args),
        **medians,
        "push_over_adapter": round(apart["pushed_mb"] / adapter_mb, 4),
        "trainer_memory": round(measure_trainer_memory(), 4),
        "compared": "adapters apart over merged: seconds, and tokens a second",
        "ratio": {name: round(apart[name] / merged[name], 4) for name in RATIOS},
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
