"""Samples per second of whole GRPO steps: relay, synchronous and asynchronous, against TRL's GRPOTrainer.

    python -m benchmarks.grpo_vs_trl [--quick]

All sides start from the same seeded weights, see the same prompts, sample 16 prompts x 8 completions a step with
the same token limit, and train on all of them in float32 on the same number of threads (asynchronous: half of them
for each of trainer and generator). Each measurement is a separate process, alternating between sides. A step
includes generation, reward, training and, in relay, publishing the weights. The last line is a JSON object.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

from benchmarks.processes import NUM_WARMUP_STEPS, measure_steps, num_repeats, step_options, tiny_steps

NUM_PROMPTS, NUM_SAMPLES = 16, 8


def main() -> None:
    parser = step_options(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64], help="new tokens at most")
    args = parser.parse_args()
    sides = {name: {"side": name} for name in SIDES}
    speeds = {}
    for tokens in args.tokens:
        medians = measure_steps(run, sides, args=args, tokens=tokens)
        speeds[str(tokens)] = {side: figures["samples_per_s"] for side, figures in medians.items()}
    figures = {
        "benchmark": "grpo_vs_trl",
        "prompts": NUM_PROMPTS,
        "samples": NUM_SAMPLES,
        "threads": args.threads,
        "repeats": num_repeats(args),
        "samples_per_s": speeds,
        "ratio": {
            name: {tokens: of[name] / of["trl"] for tokens, of in speeds.items()}
            for name in ("relay", "relay_async")
        },
    }
    print(json.dumps(figures))


def run(side: str, **arguments: Any) -> dict[str, float]:
    """Measure one side."""
    return SIDES[side](**arguments)


def _summary(step_s: list[float], tokens_mean: float) -> dict[str, float]:
    # Not the median step: asynchronous steps wait in some and not in others.
    mean_s = statistics.mean(step_s)
    return {"samples_per_s": NUM_PROMPTS * NUM_SAMPLES / mean_s, "tokens_mean": tokens_mean}


def run_relay(**how: Any) -> dict[str, float]:
    """Measure the synchronous loop with all its actors."""
    from configs.sum_digits import tiny

    return _run_relay(tiny(), **how)


def run_relay_async(num_threads: int, **how: Any) -> dict[str, float]:
    """Measure generation one step ahead of training."""
    from configs.sum_digits import tiny_async

    return _run_relay(tiny_async(), num_threads=max(1, num_threads // 2), **how)


def _run_relay(config: Any, **how: Any) -> dict[str, float]:
    config.loop.groups_per_batch, config.loop.group_size = NUM_PROMPTS, NUM_SAMPLES
    records = tiny_steps(config, **how)
    tokens_mean = statistics.mean(r["completion/tokens_mean"] for r in records)
    return _summary([r["time/step_s"] for r in records], tokens_mean)


def run_trl(assets: str, tokens: int, steps: int, num_threads: int) -> dict[str, float]:
    """Measure TRL's trainer on the same prompts, reward and settings."""
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
            train_dataset=_trl_prompts(tokenizer, groups_per_batch=num_steps * NUM_PROMPTS),
            callbacks=[_trl_step_times(step_s)],
            args=settings,
        )
        trainer.train()
    return _summary(step_s[NUM_WARMUP_STEPS:], statistics.mean(lengths))


def _trl_prompts(tokenizer: Any, *, groups_per_batch: int) -> Any:
    from datasets import Dataset

    from rl.rollouts.environment import SingleTurn
    from rl.rollouts.renderer import RendererConfig, make_renderer
    from rl.tasks.sum_digits import SumDigits

    renderer = make_renderer(RendererConfig(), tokenizer=tokenizer, stop_token_ids=(tokenizer.eos_token_id,))
    problems = islice(SumDigits.Config(num_integers=2).build().train_problems(seed=0), groups_per_batch)
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
    """Return a callback that appends the seconds between the ends of consecutive steps."""
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


SIDES: dict[str, Callable[..., dict[str, float]]] = {
    "relay": run_relay,
    "relay_async": run_relay_async,
    "trl": run_trl,
}

if __name__ == "__main__":
    main()
