"""Samples per second of whole GRPO steps: this system, synchronous and not, against TRL's GRPOTrainer.

    python -m benchmarks.grpo_vs_trl [--quick]

Both start from the same seeded weights, see the same prompts, draw 16 prompts x 8 samples a
step with the same token limit, and train on all of them in float32 on the same number of
threads; asynchronous, trainer and generator have half of them each. Each measurement is a process of
its own; the sides take turns. A step is everything: generation, reward, training and, here, the weights'
way to the generator. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.processes import in_process_of_its_own

NUM_PROMPTS, NUM_SAMPLES = 16, 8
NUM_WARMUP_STEPS = 3
"""Not measured: the first steps allocate and compile."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short repeat of each")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64], help="new tokens at most")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    steps, repeats = (4, 1) if args.quick else (12, 3)
    figures = compare(args.tokens, steps=steps, repeats=repeats, threads=args.threads)
    print(json.dumps(figures))


def compare(token_limits: list[int], *, steps: int, repeats: int, threads: int) -> dict[str, Any]:
    """Medians over repeats of each repeat's mean step, for each token limit."""
    with tempfile.TemporaryDirectory() as folder:
        assets = _make_assets(Path(folder) / "model")
        by_limit = {}
        for tokens in token_limits:
            samples_per_s: dict[str, list[float]] = {name: [] for name in SIDES}
            for repeat in range(repeats):
                for name, run in SIDES.items():
                    arguments = {
                        "assets": str(assets),
                        "tokens": tokens,
                        "steps": steps,
                        "num_threads": threads,
                    }
                    measured = in_process_of_its_own(run, threads=threads, **arguments)
                    samples_per_s[name].append(measured["samples_per_s"])
                    print(
                        f"{tokens} tokens, repeat {repeat + 1}: {name} {measured['samples_per_s']:.1f} "
                        f"samples/s, {measured['tokens_mean']:.1f} tokens a sample",
                        flush=True,
                    )
            medians = {name: statistics.median(values) for name, values in samples_per_s.items()}
            by_limit[str(tokens)] = medians
    return {
        "benchmark": "grpo_vs_trl",
        "prompts": NUM_PROMPTS,
        "samples": NUM_SAMPLES,
        "threads": threads,
        "repeats": repeats,
        "samples_per_s": by_limit,
        "ratio": {
            name: {tokens: m[name] / m["trl"] for tokens, m in by_limit.items()}
            for name in ("relay", "relay_async")
        },
    }


def _make_assets(folder: Path) -> Path:
    from rl.models.qwen3 import model_registry
    from rl.models.starting_point import write_random_model

    return write_random_model(folder, spec=model_registry("tiny"), seed=0)


def _summary(step_s: list[float], tokens_mean: float) -> dict[str, float]:
    # Not the median step: asynchronous steps wait in some and not in others.
    mean_s = statistics.mean(step_s[NUM_WARMUP_STEPS:])
    return {"samples_per_s": NUM_PROMPTS * NUM_SAMPLES / mean_s, "tokens_mean": tokens_mean}


def run_relay(assets: str, tokens: int, steps: int, num_threads: int) -> dict[str, float]:
    """The synchronous loop with all its actors."""
    from configs.sum_digits import tiny

    config = tiny()
    config.trainer.num_threads = config.generator.num_threads = num_threads
    return _run_relay(config, assets=assets, tokens=tokens, steps=steps)


def run_relay_async(assets: str, tokens: int, steps: int, num_threads: int) -> dict[str, float]:
    """Generation a step ahead of training."""
    from configs.sum_digits import tiny_async

    config = tiny_async()
    config.trainer.num_threads = config.generator.num_threads = max(1, num_threads // 2)
    return _run_relay(config, assets=assets, tokens=tokens, steps=steps)


def _run_relay(config: Any, *, assets: str, tokens: int, steps: int) -> dict[str, float]:
    from rl.config.registry import ResolvedRun
    from rl.observability.metrics import read_metrics

    config.hf_assets_path, config.warmup = assets, None
    config.loop.num_steps = steps + NUM_WARMUP_STEPS
    config.loop.num_prompts, config.loop.num_samples = NUM_PROMPTS, NUM_SAMPLES
    config.loop.sampling.max_tokens = tokens
    config.loop.max_empty_steps = config.loop.num_steps  # random weights are never right
    config.loop.eval_every = 0
    with tempfile.TemporaryDirectory() as folder:
        config.dump_folder = folder
        run = ResolvedRun(module="sum_digits", function="tiny", config=config)
        path = config.build(run=run).run()
        records = read_metrics(path / "metrics.jsonl")
    tokens_mean = statistics.mean(r["completion/tokens_mean"] for r in records)
    return _summary([r["time/step_s"] for r in records], tokens_mean)


def run_trl(assets: str, tokens: int, steps: int, num_threads: int) -> dict[str, float]:
    """TRL's trainer on the same prompts, reward and settings."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from rl.tasks.sum_digits import parse_answer

    torch.set_num_threads(num_threads)
    num_steps = steps + NUM_WARMUP_STEPS
    tokenizer = AutoTokenizer.from_pretrained(assets)
    lengths: list[int] = []
    step_s: list[float] = []

    def reward(
        completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return [float(parse_answer(c) == a) for c, a in zip(completions, answer, strict=True)]

    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=NUM_PROMPTS * NUM_SAMPLES,
            num_generations=NUM_SAMPLES,
            max_completion_length=tokens,
            max_steps=num_steps,
            learning_rate=1e-4,
            beta=0.0,
            temperature=1.0,
            shuffle_dataset=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(assets, dtype=torch.float32),
            processing_class=tokenizer,
            reward_funcs=reward,
            train_dataset=_trl_prompts(tokenizer, num_prompts=num_steps * NUM_PROMPTS),
            callbacks=[_trl_step_times(step_s)],
            args=settings,
        )
        trainer.train()
    return _summary(step_s, statistics.mean(lengths))


def _trl_prompts(tokenizer: Any, *, num_prompts: int) -> Any:
    from datasets import Dataset

    from rl.rollouts.environment import SingleTurn
    from rl.rollouts.renderer import RendererConfig, make_renderer
    from rl.tasks.sum_digits import SumDigits

    renderer = make_renderer(RendererConfig(), tokenizer=tokenizer, stop_token_ids=(tokenizer.eos_token_id,))
    problems = islice(SumDigits.Config(num_integers=2).build().train_problems(seed=0), num_prompts)
    return Dataset.from_list(
        [
            {
                "prompt": tokenizer.decode(renderer.opening(SingleTurn.of(p).opening()).tolist()),
                "answer": p.answer,
            }
            for p in problems
        ]
    )


def _trl_step_times(step_s: list[float]) -> Any:
    """A callback that appends the seconds of each step, from the end of the one before."""
    from transformers import TrainerCallback

    class StepTimes(TrainerCallback):
        last = 0.0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.last = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            now = time.perf_counter()
            step_s.append(now - self.last)
            self.last = now

    return StepTimes()


SIDES = {"relay": run_relay, "relay_async": run_relay_async, "trl": run_trl}

if __name__ == "__main__":
    main()
