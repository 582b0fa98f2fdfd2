"""GRPO on sum-digits over the actors of a run, written out.

    python examples/controller_loop.py --steps 20

`open_run` starts trainer, generator and reward actors from a run config, and ends them with the
block. The loop is four calls: generate, forward_backward, optim_step, publish. `python -m rl.train`
adds checkpoints and evaluations.

Shape legend: P prompts of a step, G samples of each, C tokens of a completion.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from itertools import islice
from pathlib import Path

import numpy as np

# Run as a file, the example finds the packages of its own tree.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from actors.config import RunConfig
from actors.run import Run, open_run
from configs.sum_digits import tiny
from rl.rollouts.samples import policy_sample
from rl.types import Message, Problem, Prompt, Rollout, SamplingParams, Turn


async def generate(run: Run, problem: Problem, number: int) -> list[Rollout]:
    """Return G rollouts of a problem, each an episode of one turn; `number` makes their seed."""
    loop, question = run.config.loop, Message(role="user", content=problem.question)
    prompt = Prompt(problem=problem, token_ids=run.renderer.opening([question]))
    sampling = SamplingParams(
        max_tokens=loop.sampling.max_tokens,
        num_samples=loop.group_size,
        stop_token_ids=run.renderer.stop_token_ids,
        seed=run.config.seed * 1_000_003 + number,
    )
    (group,) = await run.generator.generate([prompt.token_ids], sampling=sampling)
    ids = prompt.token_ids
    rollouts = []
    for i, completion in enumerate(group):
        text = run.renderer.text(completion.token_ids, prompt_ids=ids)
        turn = Turn(messages=(question,), prompt_ids=ids, completion=completion, text=text)
        rollouts.append(Rollout(prompt=prompt, sample=i, turns=(turn,)))
    return rollouts


async def train(config: RunConfig) -> list[tuple[float, float]]:
    """Return the mean reward and the gradient norm of each step."""
    history = []
    async with open_run(config) as run:
        await run.publisher.pull(await run.publisher.push())
        problems = enumerate(run.task.train_problems(seed=config.seed))
        for step in range(1, config.loop.num_steps + 1):
            # All groups at the same time: the generator batches their requests.
            batch = islice(problems, config.loop.groups_per_batch)
            groups = [generate(run, problem, number) for number, problem in batch]
            rollouts_PG = await asyncio.gather(*groups)

            scores_PG = await run.rewarder.score(rollouts_PG)
            rewards_PG = np.array([[score.reward for score in group] for group in scores_PG])
            advantages_PG = rewards_PG - rewards_PG.mean(axis=1, keepdims=True)
            samples = []
            for rollouts_G, advantages_G in zip(rollouts_PG, advantages_PG, strict=True):
                for rollout, advantage in zip(rollouts_G, advantages_G, strict=True):
                    # Every token of a reply has the reply's advantage.
                    advantages_C = np.full(rollout.num_completion_tokens, advantage, np.float32)
                    samples.append(
                        policy_sample(rollout, advantages_C=advantages_C, temperature=1.0)
                    )

            await run.trainer.forward_backward(samples)
            update = await run.trainer.optim_step()
            await run.publisher.pull(await run.publisher.push())
            history.append((float(rewards_PG.mean()), update.grad_norm))
            print(
                f"step {step}: reward {rewards_PG.mean():.3f}, gradient norm {update.grad_norm:.3f}"
            )
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    run_config = tiny()
    run_config.loop.num_steps = parser.parse_args().steps
    asyncio.run(train(run_config))
