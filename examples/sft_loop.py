"""A supervised loop on conversations: cross-entropy on the assistant's words, and on nothing else.

    python examples/sft_loop.py --data chats.jsonl --hf_assets_path Qwen/Qwen3-0.6B --steps 200
    python examples/sft_loop.py          # a tiny random model, on conversations written here
    python examples/sft_loop.py --steps 300 --resume outputs/sft_loop/step-200 \
        --output outputs/sft_loop_300

A line of the data is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...},
...]}, of any number of turns, the last of them the assistant's. Every tenth conversation is held
out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np

# Run as a file, the example finds the packages of its own tree.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from losses.cross_entropy import CrossEntropyLoss
from rl.local import LocalBackend
from rl.models.files.assets import resolve_assets
from rl.models.files.hf import HFFolder, write_random_model
from rl.models.files.tokenizer import open_tokenizer
from rl.models.qwen3 import model_registry
from rl.models.spec import ModelSpec, spec_from_hf
from rl.rollouts.renderer import Renderer, RendererConfig, make_renderer
from rl.rollouts.samples import TokenSpan, make_demonstrated_completion, make_supervised_sample
from rl.tasks.rows import read_filled_lines
from rl.trainer_types import OptimParams
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.types import Message, Role, TrainingSample


def read_conversations(path: Path) -> list[tuple[Message, ...]]:
    """Return the conversations of a file; ValueError names the line and its fault."""
    conversations = []
    for number, line in read_filled_lines(path):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
            has = sorted(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"{where} has no list `messages`; it has {has}")

        messages = tuple(read_message(message, where=where) for message in row["messages"])
        if len(messages) < 2 or messages[0].role == "assistant" or messages[-1].role != "assistant":
            raise ValueError(
                f"{where}: a conversation must begin with another role and end with the assistant"
            )
        conversations.append(messages)
    return conversations


def read_message(message: object, *, where: str) -> Message:
    """Return one message of a line; raise ValueError for anything else."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), str):
        raise ValueError(
            f"{where}: {message!r} is no message with a `role` and a text as `content`"
        )
    if message.get("role") not in get_args(Role):
        raise ValueError(f"{where}: role={message.get('role')!r}: must be one of {get_args(Role)}")
    return Message(role=message["role"], content=message["content"])


def make_conversation_sample(messages: Sequence[Message], renderer: Renderer) -> TrainingSample:
    """Return a conversation's tokens as in a rollout, of which the assistant's are trained on."""
    spans: list[TokenSpan] = []
    told: list[Message] = []
    reply: np.ndarray | None = None
    for message in messages:
        if message.role != "assistant":
            told.append(message)
            continue
        if reply is None:
            prompt = renderer.opening(told)
        else:
            # What follows a reply may depend on how that ended.
            prompt = renderer.continuation(told, after=make_demonstrated_completion(reply))
        reply = renderer.reply(message.content, prompt_ids=prompt)
        spans += [TokenSpan(prompt, is_reply=False), TokenSpan(reply, is_reply=True)]
        told = []
    return make_supervised_sample(spans)


def write_running_sums(path: Path, *, num: int, seed: int) -> None:
    """Write conversations in which somebody adds up: 4 -> 4, 7 -> 11, 3 -> 14."""
    generator = random.Random(seed)
    rows = []
    for _ in range(num):
        total, messages = 0, []
        for _ in range(3):
            number = generator.randint(1, 9)
            total += number
            messages += [
                {"role": "user", "content": str(number)},
                {"role": "assistant", "content": str(total)},
            ]
        rows.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def choose_batch(step: int, *, num_samples: int, batch_size: int, seed: int) -> list[int]:
    """Return the places of the samples of a step, counted from 0.

    Every epoch has an order of its own.
    """
    places = []
    orders: dict[int, np.ndarray] = {}
    for number in range(step * batch_size, (step + 1) * batch_size):
        epoch, place = divmod(number, num_samples)
        if epoch not in orders:
            # A function of seed and epoch, so that a resumed run needs no state of a generator.
            orders[epoch] = np.random.default_rng((seed, epoch)).permutation(num_samples)
        places.append(int(orders[epoch][place]))
    return places


def compute_lr(step: int, args: argparse.Namespace) -> float:
    """Return the learning rate: linear for `warmup_steps`, then a cosine to a tenth of the peak."""
    rise = min(1.0, (step + 1) / max(args.warmup_steps, 1))
    return args.lr * rise * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / args.steps)))


async def measure_loss(local: LocalBackend, samples: Sequence[TrainingSample]) -> float:
    """Return the mean loss of the assistant's tokens, in nats."""
    logprobs = await local.compute_logprobs(samples)
    values = []
    for logprobs_T, sample in zip(logprobs, samples, strict=True):
        values.append(logprobs_T[sample.mask])
    return -float(np.concatenate(values).mean())


def split_samples(
    samples: Sequence[TrainingSample], *, max_tokens: int
) -> tuple[list[TrainingSample], list[TrainingSample]]:
    """Return the samples to train on and those that are held out, without long ones."""
    short = [sample for sample in samples if len(sample.token_ids) <= max_tokens]
    num_long = len(samples) - len(short)
    print(f"{len(samples)} conversations; {num_long} longer than {max_tokens} tokens left out")
    # By place: the split is the same for every seed, and for a resumed run.
    held_out = short[::10]
    del short[::10]
    return short, held_out


def open_model(args: argparse.Namespace, output: Path) -> tuple[Path, ModelSpec]:
    """Return the folder of the model that is named, or of a random one, and its spec."""
    if args.hf_assets_path:
        folder = resolve_assets(args.hf_assets_path, cache=output)
        return folder, spec_from_hf(HFFolder(folder).config)
    spec = model_registry("tiny")
    return write_random_model(output / "random", spec=spec, seed=args.seed), spec


async def main(args: argparse.Namespace) -> list[tuple[int, float]]:
    """Return (step, held-out loss) pairs."""
    output = Path(args.output)
    if output.exists():
        raise SystemExit(f"--output {output} is there already: name another folder, or remove it")
    output.mkdir(parents=True)
    data = Path(args.data) if args.data else output / "running_sums.jsonl"
    if not args.data:
        write_running_sums(data, num=1000, seed=0)
    conversations = read_conversations(data)

    folder, spec = open_model(args, output)
    tokenizer, ends = open_tokenizer(folder)
    renderer = make_renderer(
        RendererConfig(keep_replies=True), tokenizer=tokenizer, stop_token_ids=ends
    )
    renderer.check_multi_turn()
    samples = [make_conversation_sample(messages, renderer) for messages in conversations]
    train, held_out = split_samples(samples, max_tokens=args.max_tokens)
    if not train:
        raise SystemExit(
            f"{data} has {len(held_out)} conversations that fit: at least 2 are needed"
        )

    config = TrainingEngine.Config(
        training=TrainingConfig(max_tokens_per_microbatch=max(4096, args.max_tokens), max_norm=1.0)
    )
    async with LocalBackend(config, spec=spec, hf_assets_path=str(folder)) as local:
        # A checkpoint holds weights, optimizer and version; the version counts the steps.
        first = await local.load_checkpoint(args.resume) if args.resume else 0
        if first >= args.steps:
            raise SystemExit(f"--steps {args.steps}: {args.resume} is of step {first} already")
        curve = [(first, await measure_loss(local, held_out))]
        print(f"step {first:4}  held-out loss {curve[-1][1]:.4f} nats a token", flush=True)
        for step in range(first, args.steps):
            places = choose_batch(
                step, num_samples=len(train), batch_size=args.batch_size, seed=args.seed
            )
            batch = [train[place] for place in places]
            gradient = await local.forward_backward(batch, loss=CrossEntropyLoss())
            update = await local.optim_step(
                OptimParams(lr=compute_lr(step, args), betas=(0.9, 0.95), weight_decay=0.01)
            )
            done = update.policy_version
            if done % args.eval_every == 0 or done == args.steps:
                curve.append((done, await measure_loss(local, held_out)))
                print(
                    f"step {done:4}  held-out loss {curve[-1][1]:.4f}  loss "
                    f"{gradient.loss_mean:.4f}  lr {update.lr:.2e}  gradient norm "
                    f"{update.grad_norm:.2f}",
                    flush=True,
                )
            if done % args.save_every == 0 or done == args.steps:
                await local.save_checkpoint(str(output / f"step-{done}"))
        await local.export_hf(str(output / "hf"))
    print(f"checkpoints and a Hugging Face folder: {output}")
    return curve


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Supervised training on conversations, in one process."
    )
    parser.add_argument(
        "--data", help="a JSONL of conversations; by default one of running sums is written"
    )
    parser.add_argument(
        "--hf_assets_path",
        help="a Hugging Face folder, GGUF file or owner/name; by default a tiny random model",
    )
    parser.add_argument(
        "--steps", type=int, default=200, help="of the optimizer, those of --resume included"
    )
    parser.add_argument("--batch_size", type=int, default=32, help="conversations a step")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--warmup_steps", type=int, default=20, help="in which it rises")
    parser.add_argument(
        "--max_tokens", type=int, default=1024, help="longer conversations are left out"
    )
    parser.add_argument("--eval_every", type=int, default=50, help="steps between evaluations")
    parser.add_argument("--save_every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--resume", help="a checkpoint folder of an earlier run")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the model and of the order of samples"
    )
    parser.add_argument("--output", default="outputs/sft_loop", help="a new folder")
    args = parser.parse_args(argv)
    for name in ("steps", "batch_size", "max_tokens", "eval_every", "save_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}={getattr(args, name)}: must be at least 1")
    return args


if __name__ == "__main__":
    asyncio.run(main(parse_args()))
