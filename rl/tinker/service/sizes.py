"""Bytes of the tensors that the service holds for somebody."""

from __future__ import annotations

from collections.abc import Sequence

from rl.tinker.messages import Datum, ForwardBackwardOutput, SampleOutput
from rl.tinker.service.responses import Failure, Response


def data_bytes(data: Sequence[Datum]) -> int:
    return sum(
        datum.tokens.nbytes + sum(values.nbytes for values in datum.loss_inputs.values()) for datum in data
    )


def result_bytes(result: Response | Failure) -> int:
    if isinstance(result, ForwardBackwardOutput):
        return sum(logprobs.nbytes for logprobs in result.logprobs)
    if isinstance(result, SampleOutput):
        arrays = [array for sequence in result.sequences for array in (sequence.tokens, sequence.logprobs)]
        if result.prompt_logprobs is not None:
            arrays.append(result.prompt_logprobs)
        if (top := result.topk_prompt_logprobs) is not None:
            arrays += (top.token_ids, top.logprobs)
        return sum(array.nbytes for array in arrays)
    return 0
