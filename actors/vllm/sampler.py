"""Draws the next tokens inside vLLM, from randomness that belongs to each request.

vLLM's own sampler keeps a random generator per request. On a CPU that fails as soon as a
prompt is prefilled in parts, and in general a request's tokens then depend on how often it was
interrupted. It also ranks the drawn token in the vocabulary, for which it compiles a kernel
in the first request (up to 15 s), and nobody here asks for ranks.

Shape legend: B running requests, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from rl.models.sampling import draw, uniforms


class PolicySampler(Sampler):
    """Takes the place of a model runner's sampler; knows temperature, top-k and top-p.

    Logprobs are those of the distribution drawn from. Greedy rows report those of temperature 1.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(logprobs_mode="processed_logprobs")
        self.runner = runner
        self._uniforms: dict[str, np.ndarray] = {}

    def add(self, request_id: str, *, seed: int, max_tokens: int) -> None:
        """Before the request is given to the engine."""
        self._uniforms[request_id] = uniforms(seed, max_tokens).numpy()

    def remove(self, request_id: str) -> None:
        """After it has ended."""
        self._uniforms.pop(request_id, None)

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        """`logits` [B, V] in the order of the runner's batch; they may be overwritten."""
        settings = sampling_metadata
        logprobs_BV = _logprobs(logits.float(), settings)
        if settings.all_greedy:
            tokens_B = logprobs_BV.argmax(-1)
        else:
            tokens_B = draw(logprobs_BV, self._uniforms_now(logits))
            if not settings.all_random:
                tokens_B = torch.where(settings.temperature == 0, logprobs_BV.argmax(-1), tokens_B)
        drawn_B1 = logprobs_BV.gather(-1, tokens_B.unsqueeze(-1))
        tokens_B1 = tokens_B.to(torch.int32).unsqueeze(-1)
        return SamplerOutput(
            sampled_token_ids=tokens_B1,
            logprobs_tensors=LogprobsTensors(tokens_B1, drawn_B1, torch.zeros_like(tokens_B)),
        )

    def _uniforms_now(self, logits: Tensor) -> Tensor:
        """[B] float64: each request's number for the token it is about to get."""
        batch = self.runner.input_batch
        num_rows = logits.size(0)
        places = batch.num_tokens_no_spec[:num_rows] - batch.num_prompt_tokens[:num_rows]
        rows = zip(batch.req_ids, places.tolist(), strict=True)
        numbers = [self._uniforms[request_id][place] for request_id, place in rows]
        return torch.tensor(numbers, dtype=torch.float64).to(logits.device, non_blocking=True)


def _logprobs(logits_BV: Tensor, settings: SamplingMetadata) -> Tensor:
    if not settings.all_greedy:
        temperature_B = settings.temperature
        assert temperature_B is not None
        if not settings.all_random:
            temperature_B = torch.where(temperature_B == 0, 1.0, temperature_B)
        logits_BV = logits_BV.div_(temperature_B.unsqueeze(1))
        logits_BV = apply_top_k_top_p(logits_BV, settings.top_k, settings.top_p)
    return logits_BV.log_softmax(-1)
