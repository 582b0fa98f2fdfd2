"""GRPO in one file, on four calls: generate, forward_backward, optim_step, push and pull.

    python examples/rl_loop.py --steps 50 --seed 0 --output outputs/rl_loop

In one process, without actors: a random Qwen3 of 0.8M parameters is warmed up on demonstrations of
sum-digits (`47 82` -> `4+7=11 11+8=19 19+2=21 [ANSWER] 21`), most of which leave out a last digit
of 4 or more; then rewards alone teach it to add that one too. What is printed is greedy accuracy on
problems that are held out. The same four calls drive actors on many machines (rl/protocols.py), and
`rl/loop/loop.py` is this loop with all that a long run needs.

Shape legend: P prompts of a step, G samples of each, C tokens of a completion.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

# Run as a file, the example finds the packages of its own tree.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from losses.cross_entropy import CrossEntropyLoss
from losses.policy import GRPOLoss
from rl.local import LocalBackend
from rl.models.files.hf import write_random_model
from rl.models.files.tokenizer import open_tokenizer
from rl.models.qwen3 import model_registry
from rl.rollouts.renderer import Renderer, RendererConfig, make_renderer
from rl.rollouts.samples import make_demonstration_sample, policy_sample
from rl.tasks.sum_digits import SumDigits, format_reward, is_correct
from rl.trainer_types import OptimParams
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.training.optimizer import Optimizer
from rl.types import Completion, Message, Problem, Prompt, Rollout, SamplingParams, Turn

MAX_TOKENS = 32
"""Most tokens of a completion."""


def make_prompt(problem: Problem, renderer: Renderer) -> Prompt:
    """Return the prompt of a problem as tokens."""
    question = Message(role="user", content=problem.question)
    return Prompt(problem=problem, token_ids=renderer.opening([question]))


def make_rollout(
    prompt: Prompt, completion: Completion, sample: int, renderer: Renderer
) -> Rollout:
    """Return an episode of one turn: the prompt and the completion, token for token."""
    turn = Turn(
        messages=(Message(role="user", content=prompt.problem.question),),
        prompt_ids=prompt.token_ids,
        completion=completion,
        text=renderer.text(completion.token_ids, prompt_ids=prompt.token_ids),
    )
    return Rollout(prompt=prompt, sample=sample, turns=(turn,))


def reward(rollout: Rollout) -> float:
    """Return 1 for the right answer, 0.1 for a wrong one of the right form, 0 for none."""
    return 0.9 * is_correct(rollout) + 0.1 * format_reward(rollout)


async def draw_rollouts(
    local: LocalBackend, renderer: Renderer, problems: Iterable[Problem], sampling: SamplingParams
) -> list[list[Rollout]]:
    """Return [P][G] rollouts, drawn with the weights that are served."""
    prompts = [make_prompt(problem, renderer) for problem in problems]
    groups_PG = await local.generate([prompt.token_ids for prompt in prompts], sampling=sampling)

    rollouts_PG = []
    for prompt, completions_G in zip(prompts, groups_PG, strict=True):
        rollouts_G = []
        for sample, completion in enumerate(completions_G):
            rollouts_G.append(make_rollout(prompt, completion, sample, renderer))
        rollouts_PG.append(rollouts_G)
    return rollouts_PG


async def measure_accuracy(
    local: LocalBackend, renderer: Renderer, problems: list[Problem]
) -> float:
    """Return the share of right greedy replies."""
    sampling = SamplingParams(
        max_tokens=MAX_TOKENS, temperature=0, stop_token_ids=renderer.stop_token_ids
    )
    rollouts_P1 = await draw_rollouts(local, renderer, problems, sampling)
    return float(np.mean([is_correct(rollout) for (rollout,) in rollouts_P1]))


async def warm_up(
    local: LocalBackend, renderer: Renderer, problems: Iterator[Problem], args: argparse.Namespace
) -> None:
    """Train on demonstrations by cross-entropy, 64 a step."""
    for step in range(args.warmup_steps):
        samples = []
        for problem in islice(problems, 64):
            prompt_ids = make_prompt(problem, renderer).token_ids
            for reply in problem.demonstrations:
                reply_ids = renderer.reply(reply, prompt_ids=prompt_ids)
                samples.append(make_demonstration_sample(prompt_ids, reply_ids))
        gradient = await local.forward_backward(samples, loss=CrossEntropyLoss())

        # The learning rate rises for 20 steps, then decays.
        cosine = 0.5 * (1 + math.cos(math.pi * step / args.warmup_steps))
        lr = args.warmup_lr * min(1.0, (step + 1) / 20) * (0.1 + 0.9 * cosine)
        await local.optim_step(OptimParams(lr=lr, weight_decay=0.01))
        if step % 50 == 0 or step == args.warmup_steps - 1:
            print(
                f"warm-up step {step + 1:3}  loss {gradient.loss_mean:.3f} nats a token", flush=True
            )


async def take_grpo_step(
    local: LocalBackend,
    renderer: Renderer,
    problems: Iterator[Problem],
    step: int,
    args: argparse.Namespace,
) -> tuple[float, float]:
    """Take one step of GRPO; return the mean reward and the mean ratio of the probabilities."""
    # Generate G completions of each of P prompts, from the weights that are served.
    sampling = SamplingParams(
        max_tokens=MAX_TOKENS,
        num_samples=args.group_size,
        stop_token_ids=renderer.stop_token_ids,
        seed=args.seed * 1_000_003 + step,
    )
    batch = islice(problems, args.groups_per_batch)
    rollouts_PG = await draw_rollouts(local, renderer, batch, sampling)

    # Reward each; all tokens of a reply share its advantage over the mean of its group.
    samples, rewards_PG = [], []
    for rollouts_G in rollouts_PG:
        rewards_G = np.array([reward(rollout) for rollout in rollouts_G])
        rewards_PG.append(rewards_G)
        for rollout, advantage in zip(rollouts_G, rewards_G - rewards_G.mean(), strict=True):
            advantages_C = np.full(rollout.num_completion_tokens, advantage, dtype=np.float32)
            samples.append(policy_sample(rollout, advantages_C=advantages_C, temperature=1.0))

    # The gradient, in as many calls as one likes; one step of the optimizer.
    gradient = await local.forward_backward(samples, loss=GRPOLoss())
    await local.optim_step(OptimParams(lr=args.lr * min(1.0, step / 10)))

    # The next step samples from the new weights.
    await local.pull(await local.push())
    return float(np.mean(rewards_PG)), gradient.ratio_mean


async def main(args: argparse.Namespace) -> list[tuple[int, float]]:
    """Return (step, greedy accuracy) pairs; the first is of the warmed-up model."""
    started = time.perf_counter()
    output = Path(args.output)
    if output.exists():
        raise SystemExit(f"--output {output} is there already: name another folder, or remove it")
    task: SumDigits = SumDigits.Config(num_integers=2, haste=0.85, num_eval=args.num_eval).build()
    held_out = task.eval_sets()["held_out"]

    # A random model with a tokenizer of bytes, as a Hugging Face folder; any other Qwen3 folder
    # would do.
    spec = model_registry("tiny")
    folder = write_random_model(output / "random", spec=spec, seed=args.seed)
    tokenizer, ends = open_tokenizer(folder)
    renderer = make_renderer(RendererConfig(), tokenizer=tokenizer, stop_token_ids=ends)
    config = TrainingEngine.Config(
        optimizer=Optimizer.Config(betas=(0.9, 0.95), weight_decay=0.0),
        training=TrainingConfig(max_tokens_per_microbatch=2048, max_norm=1.0),
    )

    async with LocalBackend(config, spec=spec, hf_assets_path=str(folder)) as local:
        await warm_up(local, renderer, task.warmup_problems(seed=args.seed), args)
        await local.export_hf(str(output / "warm"), dtype="float32")
        # The same weights, a new optimizer, step 0.
        await local.load_checkpoint(str(output / "warm"))
        await local.pull(await local.push())
        curve = [(0, await measure_accuracy(local, renderer, held_out))]
        print(
            f"GRPO step   0  greedy accuracy {curve[0][1]:.3f}  "
            f"{time.perf_counter() - started:.0f} s"
        )

        problems = task.train_problems(seed=args.seed)
        for step in range(1, args.steps + 1):
            reward_mean, ratio_mean = await take_grpo_step(local, renderer, problems, step, args)
            if step % args.eval_every == 0 or step == args.steps:
                curve.append((step, await measure_accuracy(local, renderer, held_out)))
                print(
                    f"GRPO step {step:3}  greedy accuracy {curve[-1][1]:.3f}  "
                    f"reward {reward_mean:.3f}  ratio {ratio_mean:.6f}  "
                    f"{time.perf_counter() - started:.0f} s",
                    flush=True,
                )
        await local.export_hf(str(output / "hf"))

    print(f"\ngreedy accuracy on {len(held_out)} held-out problems, by step of GRPO")
    for step, value in curve:
        print(f"{step:4} {value:.3f} |{'#' * round(50 * value)}")
    print(f"\nHugging Face folder: {output / 'hf'}")
    return curve


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="GRPO on sum-digits in one process, on a CPU or a GPU."
    )
    parser.add_argument("--steps", type=int, default=50, help="of GRPO")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the model, the problems and the sampling"
    )
    parser.add_argument("--lr", type=float, default=4e-5, help="peak learning rate of GRPO")
    parser.add_argument("--output", default="outputs/rl_loop", help="a new folder")
    parser.add_argument(
        "--warmup_steps", type=int, default=300, help="supervised, of 64 demonstrations"
    )
    parser.add_argument(
        "--warmup_lr", type=float, default=5e-3, help="peak learning rate of the warm-up"
    )
    parser.add_argument("--groups_per_batch", type=int, default=32, help="P, of a step")
    parser.add_argument("--group_size", type=int, default=8, help="G, of each prompt")
    parser.add_argument("--eval_every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--num_eval", type=int, default=256, help="held-out problems")
    args = parser.parse_args(argv)
    for name in ("steps", "warmup_steps", "groups_per_batch", "group_size", "eval_every"):
        least = 2 if name == "group_size" else 1
        if getattr(args, name) < least:
            parser.error(f"--{name}={getattr(args, name)}: must be at least {least}")
    return args


if __name__ == "__main__":
    asyncio.run(main(parse_args()))
