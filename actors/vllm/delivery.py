"""The tokens of a step on their way to the completions that they are of."""

from __future__ import annotations

from actors.vllm.errors import DivergedError
from actors.vllm.lockstep import Drawn
from actors.vllm.requests import Sample, Scored

Samples = dict[int, Sample | Scored]
"""That have not ended, by their requests' ids."""


def deliver(drawn: Drawn, samples: Samples, *, policy_version: int) -> set[int]:
    """Take out of `samples` what the engine has finished.

    Returns:
        Of `samples`, those that the engine goes on with and nobody wants any more: they are at their own
        end, or their call has failed.
    """
    unwanted = _fail_diverged(drawn, samples)
    for request_id, token_id, logprob in zip(drawn.request_ids, drawn.token_ids, drawn.logprobs, strict=True):
        if (sample := samples.get(request_id)) is not None:
            sample.add(token_id, logprob, policy_version)
            if isinstance(sample, Sample) and sample.has_ended:
                sample.finish("stop")
                unwanted.add(request_id)
    for request_id, logprobs in drawn.prompt_logprobs.items():
        if isinstance(scored := samples.get(request_id), Scored):
            scored.prompt_logprobs = logprobs
    for request_id, reason in drawn.finished.items():
        sample = samples.pop(request_id, None)
        if sample is not None and request_id not in unwanted:
            sample.finish(reason)
    return unwanted & samples.keys()


def _fail_diverged(drawn: Drawn, samples: Samples) -> set[int]:
    """The calls of requests with logprobs that are no numbers; returns all requests of these calls."""
    calls = {id(samples[i].call): samples[i].call for i in drawn.diverged if i in samples}
    for call in calls.values():
        call.fail(DivergedError("the model's logprobs are NaN: weights or activations are not finite"))
    return {i for i, sample in samples.items() if id(sample.call) in calls} if calls else set()
