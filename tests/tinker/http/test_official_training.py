"""The official client, unmodified, trains models in a real server process."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tinker import RequestFailedError, types

from tests.support.tinker_data import TEXTS, floats, forward, ints, learn, logprobs_of, lora, text_datum
from tests.support.tinker_server import RESULT_TIMEOUT_S
from tests.tinker.http.conftest import CHUNK_DATA

pytestmark = pytest.mark.medium
DATA = [text_datum(text) for text in TEXTS]
STEP = types.AdamParams(learning_rate=1e-2)


def test_the_loss_of_a_supervised_loop_falls(client):
    losses = learn(lora(client), DATA, steps=8)

    num_tokens = sum(datum.model_input.length for datum in DATA)
    assert 4.0 < losses[0] / num_tokens < 8.0  # a fresh model of 259 tokens: around log 259 = 5.6
    assert losses[-1] < 0.6 * losses[0]


def test_the_loss_is_the_sum_of_the_logprobs_by_their_weights(client):
    weights = [[0.0] * 10 + [2.0] * (datum.model_input.length - 10) for datum in DATA]
    data = [
        types.Datum(
            model_input=datum.model_input, loss_fn_inputs=datum.loss_fn_inputs | {"weights": floats(row)}
        )
        for datum, row in zip(DATA, weights, strict=True)
    ]
    output = lora(client).forward_backward(data, "cross_entropy").result(RESULT_TIMEOUT_S)

    logprobs = logprobs_of(output)
    by_hand = -sum(float(np.dot(p.astype(float), w)) for p, w in zip(logprobs, weights, strict=True))
    assert output.metrics["loss:sum"] == pytest.approx(by_hand, rel=1e-5)
    assert [len(p) for p in logprobs] == [datum.model_input.length for datum in DATA]


def test_gradients_of_calls_and_of_chunks_add_up(client):
    assert len(DATA) > CHUNK_DATA
    chunked, by_hand = lora(client), lora(client)

    chunked.forward_backward(DATA, "cross_entropy").result(RESULT_TIMEOUT_S)
    for datum in DATA:
        by_hand.forward_backward([datum], "cross_entropy").result(RESULT_TIMEOUT_S)
    norms = [
        m.optim_step(STEP).result(RESULT_TIMEOUT_S).metrics["grad_norm:mean"] for m in (chunked, by_hand)
    ]

    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    for one, other in zip(forward(chunked, DATA), forward(by_hand, DATA), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_a_custom_loss_is_the_built_in_one(client):
    custom, built_in = lora(client), lora(client)

    def cross_entropy(data, logprobs):
        weighted = [
            (p * torch.tensor(d.loss_fn_inputs["weights"].data)).sum()
            for d, p in zip(data, logprobs, strict=True)
        ]
        loss = -torch.stack(weighted).sum()
        return loss, {"mine": loss.item()}

    one = custom.forward_backward_custom(DATA, cross_entropy).result(RESULT_TIMEOUT_S)
    other = built_in.forward_backward(DATA, "cross_entropy").result(RESULT_TIMEOUT_S)
    norms = [
        m.optim_step(STEP).result(RESULT_TIMEOUT_S).metrics["grad_norm:mean"] for m in (custom, built_in)
    ]

    assert one.metrics["mine"] == pytest.approx(other.metrics["loss:sum"], rel=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    for p, q in zip(forward(custom, DATA), forward(built_in, DATA), strict=True):
        np.testing.assert_allclose(p, q, atol=1e-5)


def test_sparse_targets_are_the_dense_ones(client):
    tokens = list(b"a rose is")
    targets = torch.zeros(len(tokens) - 1, 12, dtype=torch.int64)
    weights = torch.zeros(len(tokens) - 1, 12)
    targets[:, 0], weights[:, 0] = torch.tensor(tokens[1:]), 0.5
    targets[2, 1], weights[2, 1] = ord("R"), 0.25
    prompt = types.ModelInput.from_ints(tokens[:-1])
    inputs = {"target_tokens": targets, "weights": weights}
    dense = types.Datum(
        model_input=prompt,
        loss_fn_inputs={name: types.TensorData.from_torch(tensor) for name, tensor in inputs.items()},
    )
    sparse = types.Datum(
        model_input=prompt,
        loss_fn_inputs={name: types.TensorData.from_torch_sparse(tensor) for name, tensor in inputs.items()},
    )
    assert sparse.loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
    assert dense.loss_fn_inputs["target_tokens"].sparse_crow_indices is None

    model = lora(client)
    plain = types.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": ints(tokens[1:])})
    one = model.forward_backward([dense], "cross_entropy").result(RESULT_TIMEOUT_S)
    other = model.forward_backward([sparse], "cross_entropy").result(RESULT_TIMEOUT_S)
    (logprobs,) = logprobs_of(one)
    (as_plain,) = forward(model, [plain])

    assert logprobs.shape == (8, 12)
    assert one.metrics["loss:sum"] == other.metrics["loss:sum"]
    np.testing.assert_array_equal(logprobs, logprobs_of(other)[0])
    np.testing.assert_allclose(logprobs[:, 0], as_plain, atol=1e-5)
    by_hand = -0.5 * as_plain.sum() - 0.25 * logprobs[2, 1]
    assert one.metrics["loss:sum"] == pytest.approx(by_hand, rel=1e-5)


def test_rank_0_trains_all_parameters(client):
    model = lora(client, rank=0)
    info = model.get_info()
    losses = learn(model, DATA, steps=4, lr=3e-3)

    assert (info.is_lora, info.lora_rank) == (False, None)
    assert losses[-1] < 0.6 * losses[0]


def test_two_clients_that_train_at_once_get_the_numbers_of_one_alone(server):
    def train(seed):
        client = server.client(f"tml-of-{seed}")
        model = lora(client, seed=seed)
        losses = learn(model, DATA, steps=4)
        logprobs = forward(model, DATA)
        client.close("success").result(RESULT_TIMEOUT_S)
        return losses, logprobs

    alone = [train(seed) for seed in (1, 2)]
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(train, (1, 2)))

    assert alone[0][0] != alone[1][0]
    for (losses, logprobs), (losses_2, logprobs_2) in zip(alone, together, strict=True):
        assert losses == losses_2
        for one, other in zip(logprobs, logprobs_2, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_mistake_in_the_data_is_named_and_harms_nothing_after_it(client):
    model = lora(client)
    bad = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2]),
        loss_fn_inputs={"target_tokens": ints([1, 2]), "weights": floats([1.0])},
    )
    with pytest.raises(Exception, match=r"data\[0\].*weights"):
        model.forward_backward([bad], "cross_entropy").result(RESULT_TIMEOUT_S)


def test_what_was_saved_goes_on_and_samples_as_before(client):
    model = lora(client, seed=5)
    learn(model, DATA, steps=3)
    saved = model.save_state("resume").result(RESULT_TIMEOUT_S)
    for_sampler = model.save_weights_for_sampler("sampler").result(RESULT_TIMEOUT_S)
    before = sample(client.create_sampling_client(for_sampler.path).result(RESULT_TIMEOUT_S))
    went_on = learn(model, DATA, steps=2)

    resumed = client.create_training_client_from_state_with_optimizer(saved.path).result(RESULT_TIMEOUT_S)
    snapshot = resumed.save_weights_and_get_sampling_client().result(RESULT_TIMEOUT_S)

    assert saved.path == f"tinker://{model.model_id}/weights/resume"
    assert sample(snapshot) == before
    assert learn(resumed, DATA, steps=2) == went_on
    with pytest.raises(RequestFailedError, match="resume"):
        model.save_state("resume").result(RESULT_TIMEOUT_S)


def sample(sampler):
    response = sampler.sample(
        types.ModelInput.from_ints(list(b"a rose")),
        num_samples=3,
        sampling_params=types.SamplingParams(max_tokens=12, seed=11, temperature=0.8),
    ).result(RESULT_TIMEOUT_S)
    return [(sequence.tokens, sequence.logprobs) for sequence in response.sequences]
