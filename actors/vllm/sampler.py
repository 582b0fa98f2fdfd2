"""Sampling inside vLLM, from random numbers that belong to each request.

vLLM's own sampler keeps a random generator per request. On a CPU it fails when a prompt is
prefilled in parts, and a request's tokens depend on how often it was preempted. It also ranks the
drawn token in the vocabulary, for which it compiles a kernel in the first request (up to 15 s);
relay uses no ranks.

Shape legend: B running requests, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from actors.vllm.requests import Request
from rl.models.sampling import draw, draw_uniforms
from rl.utils.tensor_memory import to_device

NUMBERS_AT_ONCE = 2**19
"""Logits that are sampled at once on a CPU, so that their copies stay in its cache."""


class PolicySampler(Sampler):
    """Replacement of a model runner's sampler, for temperature, top-k and top-p.

    Logprobs are of the distribution that was sampled from. Greedy rows report logprobs at
    temperature 1.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(logprobs_mode="processed_logprobs")
        self.runner = runner
        # Lists, as torch takes ten times as long to read numpy's scalars as Python's.
        self._uniforms: dict[str, list[float]] = {}
        self._scored: dict[str, int] = {}
        self._drawn: deque[tuple[list[str], Tensor]] = deque()
        """Requests and logprobs [B] of the steps whose tokens are not delivered yet, in order."""

    def add(self, request: Request) -> None:
        """Draw a request's random numbers; call it before the engine gets the request."""
        request_id, num_begun = str(request.id), request.num_begun
        # A continued completion goes on with the numbers that follow those of its tokens, so that
        # it becomes what it would have been without the abort.
        numbers = draw_uniforms(request.seed, num_begun + request.max_tokens)
        self._uniforms[request_id] = numbers[num_begun:].tolist()
        if request.scored is not None:
            self._scored[request_id] = request.scored

    def remove(self, request_id: str) -> None:
        self._uniforms.pop(request_id, None)
        self._scored.pop(request_id, None)

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        """Return the logprobs of a prompt's tokens, without ranks: from [T, V] and ids [T]."""
        assert num_logprobs == 0, "only the tokens' own logprobs are gathered"
        token_ids_T1 = token_ids.unsqueeze(-1)
        return LogprobsTensors(
            token_ids_T1.to(torch.int32),
            logprobs.gather(-1, token_ids_T1),
            torch.zeros_like(token_ids),
        )

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        """Sample from `logits` [B, V], in the order of the runner's batch.

        The logits may be overwritten.
        """
        settings, batch = sampling_metadata, self.runner.input_batch
        temperature_B = settings.temperature
        # On the CPU, because a look at the GPU's copy would wait for the step.
        if temperature_B is not None and (batch.temperature_cpu[: len(logits)] == 1).all():
            temperature_B = None
        uniforms_B = None if settings.all_greedy else self._get_uniforms(logits)
        forced_B = self._get_forced_tokens(logits)

        num_rows = len(logits) if logits.is_cuda else max(1, NUMBERS_AT_ONCE // logits.size(1))
        tokens: list[Tensor] = []
        logprobs: list[Tensor] = []
        for start in range(0, len(logits), num_rows):
            rows = slice(start, start + num_rows)
            part_tokens, part_logprobs = _sample(
                logits[rows],
                _take_rows(temperature_B, rows),
                _take_rows(settings.top_k, rows),
                _take_rows(settings.top_p, rows),
                _take_rows(uniforms_B, rows),
                _take_rows(forced_B, rows),
            )
            tokens.append(part_tokens)
            logprobs.append(part_logprobs)
        tokens_B, logprobs_B = torch.cat(tokens), torch.cat(logprobs)

        # On a GPU they are on their way when the tokens, which vLLM sends after them and waits for,
        # have arrived.
        logprobs_B = logprobs_B.to("cpu", non_blocking=True)
        # A copy, because the runner changes the list before the step's tokens are taken.
        self._drawn.append((batch.req_ids.copy(), logprobs_B))
        return SamplerOutput(
            sampled_token_ids=tokens_B.to(torch.int32).unsqueeze(-1), logprobs_tensors=None
        )

    def take_logprobs(self, *, num_ahead: int) -> dict[str, float]:
        """Return each request's logprob in nats in the step that has just ended, if one has.

        Meaningless for a request still at its prompt. `num_ahead` steps have begun and not ended.
        """
        drawn: dict[str, float] = {}
        while len(self._drawn) > num_ahead:
            request_ids, logprobs_B = self._drawn.popleft()
            drawn = dict(zip(request_ids, logprobs_B.tolist(), strict=True))
        return drawn

    def _get_uniforms(self, logits: Tensor) -> Tensor:
        """Return [B] float64, the random number for each request's next token."""
        # By the place of the token, not by a count of draws: a request that is preempted, or whose
        # prompt is read in parts, draws more often than it gets tokens.
        batch = self.runner.input_batch
        num_rows = logits.size(0)
        places = batch.num_tokens_no_spec[:num_rows] - batch.num_prompt_tokens[:num_rows]
        rows = zip(batch.req_ids, places.tolist(), strict=True)
        numbers = [self._uniforms[request_id][place] for request_id, place in rows]
        return to_device(torch.tensor(numbers, dtype=torch.float64), logits.device)

    def _get_forced_tokens(self, logits: Tensor) -> Tensor | None:
        """Return [B] int64, the next token of scored requests, -1 for others; None without any."""
        if not self._scored:
            return None
        request_ids = self.runner.input_batch.req_ids
        tokens = [self._scored.get(request_id, -1) for request_id in request_ids]
        return to_device(torch.tensor(tokens), logits.device)


def _take_rows(values: Tensor | None, rows: slice) -> Tensor | None:
    return None if values is None else values[rows]


def _sample(
    logits_BV: Tensor,
    temperature_B: Tensor | None,
    top_k_B: Tensor | None,
    top_p_B: Tensor | None,
    uniforms_B: Tensor | None,
    forced_B: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the next tokens and their logprobs, [B] each.

    Args:
        temperature_B: 0 for greedy rows; None if all are 1, or all greedy.
        uniforms_B: None if all rows are greedy.
    """
    logits_BV = logits_BV.float()
    if temperature_B is not None:
        logits_BV = logits_BV / torch.where(temperature_B == 0, 1.0, temperature_B).unsqueeze(1)

    logprobs_BV = apply_top_k_top_p(logits_BV, top_k_B, top_p_B).log_softmax(-1)
    if uniforms_B is None:
        tokens_B = logprobs_BV.argmax(-1)
    else:
        tokens_B = draw(logprobs_BV, uniforms_B)
        if temperature_B is not None:
            tokens_B = torch.where(temperature_B == 0, logprobs_BV.argmax(-1), tokens_B)
    if forced_B is not None:
        tokens_B = torch.where(forced_B < 0, tokens_B, forced_B)
    return tokens_B, logprobs_BV.gather(-1, tokens_B.unsqueeze(-1)).squeeze(-1)
