"""The codec against the official client's own conversion, and against hostile input."""

import numpy as np
import pytest
import tinker
import torch
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_sample_response
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from rl.models.generate import PromptLogprobs
from rl.tinker.types import InvalidRequestError, SampleOutput, SampleRequest
from rl.tinker.wire.codec import (
    MAX_PARTS,
    decode_data,
    encode_sample,
    merge_loss_settings,
)
from rl.types import Completion, SamplingParams
from tests.support.tinker_data import floats, ints


def datum(tokens, **inputs):
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def request(*data, loss_fn="cross_entropy", config=None):
    given = ForwardBackwardInput(data=list(data), loss_fn=loss_fn, loss_fn_config=config)
    return forward_backward_request_to_proto(
        ForwardBackwardRequest(model_id="s:train:0", seq_id=3, forward_backward_input=given)
    )


def decode(message):
    merge_loss_settings(message)
    return decode_data(message, max_values=1000)


def with_tensor(dtype=pb.DTYPE_FLOAT32, **fields):
    """Return a request with one datum whose weights are this tensor."""
    message = request(datum([1, 2], target_tokens=ints([2, 3])))
    message.data[0].loss_fn_inputs["weights"].CopyFrom(pb.Tensor(dtype=dtype, **fields))
    return message


def with_image():
    message = request(datum([1], target_tokens=ints([1])))
    message.data[0].model_input.add().image.data = b"png"
    return message


NO_CSR = "['weights'].sparse_csr: is no CSR matrix of shape ["


def csr(values, crow, col, *, shape):
    return with_tensor(
        shape=shape,
        sparse_csr=pb.SparseCsr(
            values=np.array(values, "<f4").tobytes(),
            crow_indices=np.array(crow, "<i8").tobytes(),
            col_indices=np.array(col, "<i8").tobytes(),
        ),
    )


def test_chunks_are_joined_sparse_tensors_are_dense_and_without_a_shape_they_are_rows():
    two = tinker.ModelInput(
        chunks=[tinker.EncodedTextChunk(tokens=[1]), tinker.EncodedTextChunk(tokens=[2, 3, 4])]
    )
    dense = torch.zeros(4, 50, dtype=torch.int64)
    dense[0, 3], dense[0, 40], dense[3, 0] = 7, 8, 9
    sparse = tinker.TensorData.from_torch_sparse(dense)
    assert sparse.sparse_crow_indices is not None
    message = request(tinker.Datum(model_input=two, loss_fn_inputs={"target_tokens": sparse}))
    row = pb.Tensor(dtype=pb.DTYPE_FLOAT32, dense=np.ones(2, "<f4").tobytes())
    message.data[0].loss_fn_inputs["weights"].CopyFrom(row)

    (found,) = decode(message)
    assert found.tokens.tolist() == [1, 2, 3, 4]
    assert found.loss_inputs["target_tokens"].tolist() == dense.tolist()
    assert found.loss_inputs["weights"].shape == (2,)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (with_tensor(pb.DTYPE_BFLOAT16, dense=b""), "data[0].loss_fn_inputs['weights'].dtype: "
                                                    "DTYPE_BFLOAT16"),
        (with_tensor(dense=b"123"), "3 bytes are no whole number of float32"),
        (with_tensor(dense=b"1234", shape=[2]), "[2] has 2 values, but there"),
        (with_tensor(dense=b"1234", shape=[1, 1, 1]), "shape: [1, 1, 1], must be [N] or [N, K]"),
        (with_tensor(dense=b"", shape=[0, 2**62]), "each from 0 to 1000"),
        (with_tensor(shape=[0]), "neither dense nor sparse_csr"),
        (with_image(), "data[0].model_input[1]: is a chunk of type image"),
        (csr([1], [0, 1], [0], shape=[1]), "shape: [1], must be [N, K]"),
        (csr([1], [0, 1, 1], [0], shape=[1, 3]), NO_CSR),
        (csr([1], [0, -(2**63), 1], [0], shape=[2, 3]), NO_CSR),
        (csr([1], [0, 1], [3], shape=[1, 3]), NO_CSR),
        (csr([], [0] * 41, [], shape=[40, 30]), "more than the allowed 1000"),
        (request(loss_fn="ppo", config={"beta": "high"}), "loss_fn_config['beta']: 'high', must be "
                                                          "a number"),
        (
            request(*(datum([1], weights=floats([1.0] * 400)) for _ in range(3))),
            "data[2].loss_fn_inputs['weights']: with it the request's tensors have 1200 values",
        ),
    ],
)  # fmt: skip
def test_inconsistent_parts_are_refused_by_name(message, said):
    with pytest.raises(InvalidRequestError) as error:
        decode(message)
    assert said in str(error.value)


def asked(**how):
    return SampleRequest(
        prompt=np.array([1, 2], np.int32), sampling=SamplingParams(max_tokens=2), **how
    )


def test_client_reads_samples_with_prompt_logprobs():
    def completion(tokens, logprobs, reason):
        return Completion(
            token_ids=np.array(tokens, np.int32),
            logprobs=np.array(logprobs, np.float32),
            policy_versions=np.zeros(len(tokens), np.int32),
            finish_reason=reason,
        )

    of_prompt = PromptLogprobs(
        logprobs=np.array([np.nan, -1.5], np.float32),
        top_ids=np.array([[-1, -1], [7, 8]], np.int32),
        top_logprobs=np.array([[np.nan, np.nan], [-1.0, -2.0]], np.float32),
    )
    sampled = SampleOutput(
        completions=(completion([4, 5], [-0.5, -0.25], "length"), completion([6], [0.0], "stop")),
        of_prompt=of_prompt,
    )
    output, plain = (
        deserialize_sample_response(encode_sample(sampled, asked(**how)).SerializeToString())
        for how in ({"prompt_logprobs": True, "topk_prompt_logprobs": 2}, {})
    )
    assert [list(sequence.tokens) for sequence in output.sequences] == [[4, 5], [6]]
    assert [list(sequence.logprobs) for sequence in output.sequences] == [[-0.5, -0.25], [0.0]]
    assert [sequence.stop_reason for sequence in output.sequences] == ["length", "stop"]
    assert output.prompt_logprobs == [None, -1.5]
    assert output.topk_prompt_logprobs == [None, [(7, -1.0), (8, -2.0)]]
    assert (plain.prompt_logprobs, plain.topk_prompt_logprobs) == (None, None)


def test_millions_of_empty_chunks_are_refused_before_they_are_read():
    message = pb.ForwardBackwardRequest(model_id="m", loss_fn="cross_entropy")
    for _ in range(2):
        chunks = message.data.add().model_input
        for _ in range(MAX_PARTS // 2 + 1):
            chunks.add().encoded_text.SetInParent()
    with pytest.raises(InvalidRequestError, match=f"has {MAX_PARTS + 2} chunks and tensors, more"):
        decode_data(message, max_values=1)
