"""Problems to tokens, through the tokenizer's own chat template."""

from __future__ import annotations

from typing import Any

import numpy as np

from rl.types import Completion, Problem, Prompt, Rollout


class ChatRenderer:
    """Renders a problem as one user turn. What the model produced is never re-tokenized.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template and an end-of-turn token.
        max_prompt_tokens: longer prompts are refused.
        stop_token_ids: tokens that end a reply; None: the tokenizer's end of turn alone.
    """

    def __init__(
        self, *, tokenizer: Any, max_prompt_tokens: int, stop_token_ids: tuple[int, ...] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.max_prompt_tokens = max_prompt_tokens
        self.stop_token_ids = (tokenizer.eos_token_id,) if stop_token_ids is None else stop_token_ids

    def opening(self, messages) -> np.ndarray:
        told = [{"role": m.role, "content": m.content} for m in messages]
        text = self.tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
        return self.encode(text)

    def continuation(self, messages, *, after: Completion) -> np.ndarray:
        text = "\n" + "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in messages)
        return self.encode(text + "<|im_start|>assistant\n")

    def reply(self, text: str) -> np.ndarray:
        return np.append(self.encode(text), np.int32(self.tokenizer.eos_token_id))

    def text(self, token_ids: np.ndarray) -> str:
        return self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)

    def prompt(self, problem: Problem) -> Prompt:
        """Raises ValueError for a prompt that leaves no room in the context."""
        messages = [{"role": "user", "content": problem.question}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        token_ids = self.encode(text)
        if len(token_ids) > self.max_prompt_tokens:
            raise ValueError(
                f"the prompt of problem {problem.id!r} has {len(token_ids)} tokens; the context leaves room "
                f"for {self.max_prompt_tokens} (generator.max_model_len less sampling.max_tokens)"
            )
        return Prompt(problem=problem, token_ids=token_ids)

    def demonstration(self, problem: Problem) -> np.ndarray:
        """[C] int32 tokens of the problem's demonstration, ended as the model should end it."""
        if not problem.demonstration:
            raise ValueError(f"problem {problem.id!r} has no demonstration to warm up on")
        return np.append(self.encode(problem.demonstration), np.int32(self.tokenizer.eos_token_id))

    def rollout(self, prompt: Prompt, completion: Completion, *, sample: int) -> Rollout:
        """The completion with its text.

        `sample` is its number among the prompt's completions: it tells equal replies apart, for instance
        to a reward of noise.
        """
        text = self.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)
        from rl.types import Turn

        turn = Turn(messages=(), prompt_ids=prompt.token_ids, completion=completion, text=text)
        return Rollout(prompt=prompt, sample=sample, turns=(turn,))

    def encode(self, text: str) -> np.ndarray:
        """[T] int32 tokens of a piece of text, without any around it."""
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
