"""Official types become messages, and results come back as official types."""

import numpy as np
import pytest
import torch
from tinker import types

from rl.tinker.client.convert import (
    adam_settings,
    data_of,
    forward_backward_output,
    loss_call,
    sample_request,
    sample_response,
    tokens_of,
)
from rl.tinker.messages import (
    ForwardBackwardOutput,
    LossCall,
    SampledSequence,
    SampleOutput,
    Sampling,
    TopLogprobs,
)


def datum(tokens, **inputs):
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def test_chunks_of_tokens_are_one_sequence():
    text = [types.EncodedTextChunk(tokens=tokens) for tokens in ([3, 1], [], [4])]
    tokens = tokens_of(types.ModelInput(chunks=text), where="prompt")
    assert tokens.tolist() == [3, 1, 4]
    assert tokens.dtype == np.int32


@pytest.mark.parametrize(
    ("chunks", "says"),
    [
        (
            [types.ImageChunk(data=b"x", format="png", expected_tokens=2)],
            r"prompt.chunks\[0\] is a ImageChunk",
        ),
        ([types.EncodedTextChunk(tokens=[1, -2])], "prompt has the token -2: token ids are 0 to"),
        ([types.EncodedTextChunk(tokens=[2**31])], "prompt has the token 2147483648"),
    ],
)
def test_what_is_no_token_is_named(chunks, says):
    with pytest.raises(ValueError, match=says):
        tokens_of(types.ModelInput(chunks=chunks), where="prompt")


def test_inputs_keep_their_types_and_sparse_ones_get_zeros_in_between():
    targets = torch.tensor([[5, 0, 0, 0], [0, 0, 7, 0], [0, 0, 0, 0]])
    weights = torch.where(targets > 0, 0.5, 0.0)
    sparse = datum([1, 2, 3], target_tokens=targets, weights=weights)
    assert sparse.loss_fn_inputs["target_tokens"].sparse_crow_indices == [0, 1, 2, 2]
    (message,) = data_of([sparse])
    assert message.loss_inputs["target_tokens"].tolist() == targets.tolist()
    assert message.loss_inputs["target_tokens"].dtype == np.int64
    assert message.loss_inputs["weights"].tolist() == weights.tolist()
    assert message.loss_inputs["weights"].dtype == np.float32


def test_the_callers_array_may_change_afterwards():
    weights = np.ones(2, dtype=np.float32)
    (message,) = data_of([datum([1, 2], target_tokens=[2, 3], weights=weights)])
    weights[:] = 9
    assert message.loss_inputs["weights"].tolist() == [1, 1]


def test_a_sparse_tensor_that_is_none_is_named():
    broken = types.TensorData(
        data=[1.0], dtype="float32", shape=[2, 2], sparse_crow_indices=[0, 1, 1], sparse_col_indices=[5]
    )
    with pytest.raises(ValueError, match=r"data\[1\].loss_fn_inputs\['weights'\] is no tensor"):
        data_of([datum([1], target_tokens=[2]), datum([1, 2], weights=broken)])


@pytest.mark.parametrize(
    ("data", "says"), [([], "data is empty"), (datum([1]), "one Datum: must be a list of them")]
)
def test_data_are_a_list_of_some(data, says):
    with pytest.raises(ValueError, match=says):
        data_of(data)


def test_settings_of_losses_are_numbers():
    call = loss_call("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 2})
    assert call == LossCall(name="ppo", settings={"clip_low_threshold": 0.8, "clip_high_threshold": 2.0})
    with pytest.raises(ValueError, match=r"loss_fn_config\['beta'\]='0.1': must be a number"):
        loss_call("dro", {"beta": "0.1"})


def test_adam_has_the_wires_defaults_and_is_the_only_optimizer():
    adam = adam_settings(types.AdamParams(learning_rate=3e-4))
    assert (adam.learning_rate, adam.beta1, adam.beta2, adam.eps) == (3e-4, 0.9, 0.95, 1e-12)
    assert (adam.weight_decay, adam.grad_clip_norm) == (0.0, 0.0)
    with pytest.raises(ValueError, match="optim_params is DimuonParams"):
        adam_settings(types.DimuonParams(learning_rate=1e-3))
    with pytest.raises(TypeError, match="optim_params=None: must be AdamParams"):
        adam_settings(None)


@pytest.mark.parametrize(
    ("given", "stop"), [(None, None), ("\n", ("\n",)), (["a", "b"], ("a", "b")), ([7, 8], (7, 8)), ([], ())]
)
def test_stops_are_texts_or_tokens_or_the_tokenizers_own(given, stop):
    params = types.SamplingParams(max_tokens=5, seed=1, stop=given, temperature=0.5, top_k=3, top_p=0.9)
    request = sample_request(
        types.ModelInput.from_ints([1, 2]), 4, params, prompt_logprobs=True, topk_prompt_logprobs=2
    )
    assert request.sampling == Sampling(max_tokens=5, seed=1, stop=stop, temperature=0.5, top_k=3, top_p=0.9)
    assert request.prompt.tolist() == [1, 2]
    assert (request.num_samples, request.prompt_logprobs, request.topk_prompt_logprobs) == (4, True, 2)


def test_logprobs_of_a_gradient_have_the_targets_shapes():
    one, two = np.array([-1.0, -2.0], dtype=np.float32), np.full((3, 2), -0.5, dtype=np.float32)
    output = forward_backward_output(ForwardBackwardOutput(logprobs=(one, two), metrics={"loss:sum": 3.0}))
    assert [o["logprobs"].shape for o in output.loss_fn_outputs] == [[2], [3, 2]]
    assert output.loss_fn_outputs[0]["logprobs"].data == [-1.0, -2.0]
    assert output.metrics == {"loss:sum": 3.0}
    assert output.loss_fn_output_type == "ArrayRecord"


def sampled(*, prompt_logprobs=None, top=None):
    sequence = SampledSequence(
        tokens=np.array([4, 5], dtype=np.int32),
        logprobs=np.array([-0.25, -0.5], dtype=np.float32),
        stop_reason="stop",
    )
    return SampleOutput(sequences=(sequence,), prompt_logprobs=prompt_logprobs, topk_prompt_logprobs=top)


def test_samples_have_lists_and_arrays_and_ids():
    (sequence,) = sample_response(sampled(), sequence_ids=["s:0"]).sequences
    assert (sequence.tokens, sequence.logprobs, sequence.stop_reason) == ([4, 5], [-0.25, -0.5], "stop")
    assert sequence.sequence_id == "s:0"
    assert sequence.tokens_np.dtype == np.int32
    assert sample_response(sampled(), sequence_ids=["s:0"]).prompt_logprobs is None


def test_what_is_unknown_of_a_prompt_is_none():
    logprobs = np.array([np.nan, -1.0, -2.0], dtype=np.float32)
    top = TopLogprobs(
        token_ids=np.array([[-1, -1], [3, 4], [0, 1]], dtype=np.int32),
        logprobs=np.array([[np.nan, np.nan], [-1.0, -3.0], [-0.5, -2.0]], dtype=np.float32),
    )
    output = sampled(prompt_logprobs=logprobs, top=top)
    whole = sample_response(output, sequence_ids=["s"])
    assert whole.prompt_logprobs == [None, -1.0, -2.0]
    assert whole.topk_prompt_logprobs == [None, [(3, -1.0), (4, -3.0)], [(0, -0.5), (1, -2.0)]]
    last = sample_response(output, sequence_ids=["s"], last_n=1)
    assert last.prompt_logprobs == [None, None, -2.0]
    assert last.topk_prompt_logprobs == [None, None, [(0, -0.5), (1, -2.0)]]
