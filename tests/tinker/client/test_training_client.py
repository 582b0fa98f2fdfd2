"""A model is trained through the official calls; what it becomes is computed by hand."""

import asyncio

import numpy as np
import pytest
import torch
from tinker import types

import rl.tinker as tinker
from rl.tinker.service.limits import Limits
from tests.support.bigram_backend import NAME, VOCABULARY, log_softmax

TIMEOUT_S = 10
ADAM = types.AdamParams(learning_rate=0.1)


def datum(tokens, *, weights=None):
    inputs = {"target_tokens": tokens[1:], "weights": weights or [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


DATA = [datum([1, 2, 3, 1]), datum([2, 3])]


def table(backend, training):
    return backend.models[training.model_id].table


def step(training, data=DATA):
    gradient = training.forward_backward(data, "cross_entropy")
    training.optim_step(ADAM).result(TIMEOUT_S)
    return gradient.result(TIMEOUT_S).metrics["loss:sum"]


def test_the_loss_falls_from_that_of_chance(training):
    losses = [step(training) for _ in range(10)]
    assert losses[0] == pytest.approx(4 * np.log(VOCABULARY))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.6 * losses[0]


def test_logprobs_are_of_the_targets_in_their_shape(backend, training):
    step(training)
    logprobs = log_softmax(table(backend, training))
    output = training.forward([*DATA, datum([3, 3])], "cross_entropy").result(TIMEOUT_S)
    shapes = [record["logprobs"].shape for record in output.loss_fn_outputs]
    assert shapes == [[3], [1], [1]]
    expected = [logprobs[1, 2], logprobs[2, 3], logprobs[3, 1]]
    assert output.loss_fn_outputs[0]["logprobs"].tolist() == pytest.approx(expected)


def test_forward_leaves_the_gradient_alone(backend, training):
    training.forward(DATA, "cross_entropy").result(TIMEOUT_S)
    assert not backend.models[training.model_id].gradient.any()


def test_calls_are_done_in_the_order_in_which_they_were_made(backend, training):
    futures = []
    for _ in range(20):
        futures += [training.forward_backward(DATA, "cross_entropy"), training.optim_step(ADAM)]
    for future in futures:
        future.result(TIMEOUT_S)
    assert backend.calls == ["forward_backward", "optim_step"] * 20


def test_a_custom_loss_has_the_gradient_of_the_built_in_one(backend, service, training):
    def cross_entropy(data, logprobs):
        weights = [d.loss_fn_inputs["weights"].to_torch() for d in data]
        loss = -sum((w * p).sum() for w, p in zip(weights, logprobs, strict=True))
        return loss, {"seen": float(len(data))}

    other = service.create_lora_training_client(NAME, rank=4).result(TIMEOUT_S)
    data = [datum([1, 2, 3, 1], weights=[0.5, -1.0, 2.0]), datum([2, 3])]
    for _ in range(3):
        built_in = training.forward_backward(data, "cross_entropy").result(TIMEOUT_S)
        custom = other.forward_backward_custom(data, cross_entropy).result(TIMEOUT_S)
        one, two = (backend.models[client.model_id].gradient for client in (training, other))
        np.testing.assert_allclose(one, two, atol=1e-6)
        assert custom.metrics["loss:sum"] == pytest.approx(built_in.metrics["loss:sum"], rel=1e-6)
        assert custom.metrics["seen"] == 2.0
        for client in (training, other):
            client.optim_step(ADAM).result(TIMEOUT_S)
    np.testing.assert_allclose(table(backend, training), table(backend, other), atol=1e-5)


def test_a_nonlinear_custom_loss_is_differentiated(backend, training):
    step(training)
    before = log_softmax(table(backend, training))
    output = training.forward_backward_custom(
        [datum([1, 2])], lambda _, logprobs: ((logprobs[0] ** 2).sum(), {})
    ).result(TIMEOUT_S)
    p = before[1, 2]
    assert output.metrics["loss:sum"] == pytest.approx(p**2, rel=1e-5)
    assert output.metrics["surrogate_loss:sum"] == pytest.approx(2 * p * p, rel=1e-5)
    # d(p^2)/d logits = 2 p (onehot - softmax)
    expected = 2 * p * (np.eye(VOCABULARY)[2] - np.exp(before[1]))
    np.testing.assert_allclose(backend.models[training.model_id].gradient[1], expected, atol=1e-5)


def test_a_traced_custom_loss_is_summed_over_data(backend, service, training):
    def weighted(logprobs, weights):
        loss = -(logprobs * weights).sum()
        return loss, {"custom/weight:mean": weights.sum()}

    handle = service.create_custom_loss(weighted, {"logprobs": 1, "weights": 1}).result(TIMEOUT_S)
    output = training.forward_backward_custom(DATA, handle).result(TIMEOUT_S)
    assert output.metrics["loss:sum"] == pytest.approx(4 * np.log(VOCABULARY), rel=1e-6)
    assert output.metrics["custom/weight:mean"] == 2.0


def test_what_was_made_before_a_custom_loss_failed_is_refused_and_later_calls_are_not(backend, training):
    backend.go_on.clear()

    def bad(data, logprobs):
        raise ArithmeticError("no such loss")

    gradient = training.forward_backward_custom(DATA, bad)
    queued = training.optim_step(ADAM)
    training._session.host.post(backend.go_on.set)
    with pytest.raises(ArithmeticError, match="no such loss"):
        gradient.result(TIMEOUT_S)
    with pytest.raises(RuntimeError, match=r"not done: an earlier request .*ArithmeticError: no such loss"):
        queued.result(TIMEOUT_S)
    assert backend.calls == ["forward"]
    assert step(training) == pytest.approx(4 * np.log(VOCABULARY))


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda data, logprobs: (1.0, {}), "the custom loss is 1.0: must be a scalar tensor"),
        (lambda data, logprobs: (logprobs[0], {}), r"a tensor of shape \(3,\): must be a scalar tensor"),
        (lambda data, logprobs: (torch.zeros(()), {}), "must be a scalar tensor computed of the logprobs"),
        (lambda data, logprobs: (logprobs[0].sum(), {}), r"does not depend on the logprobs of data\[1\]"),
    ],
)
def test_what_is_no_custom_loss_is_said(training, loss, says):
    with pytest.raises(ValueError, match=says):
        training.forward_backward_custom(DATA, loss).result(TIMEOUT_S)


def test_custom_losses_need_targets(training):
    with pytest.raises(ValueError, match=r"data\[0\].loss_fn_inputs has no 'target_tokens'"):
        training.forward_backward_custom(
            [types.Datum(model_input=types.ModelInput.from_ints([1]))], lambda d, p: (p[0].sum(), {})
        )


def test_a_refused_call_is_a_bad_request_and_no_step_is_made_without_it(training):
    refused = training.forward_backward([datum([1, 2]), datum([9, 1])], "cross_entropy")
    unknown = training.forward_backward(DATA, "no_such_loss")
    with pytest.raises(tinker.BadRequestError, match=r"^data\[1\]: token 9 is above 7$") as error:
        refused.result(TIMEOUT_S)
    assert error.value.status_code == 400
    with pytest.raises(tinker.BadRequestError, match="loss_fn='no_such_loss': must be one of"):
        unknown.result(TIMEOUT_S)
    with pytest.raises(tinker.RequestFailedError, match="the gradient would be of part of a batch"):
        training.optim_step(ADAM).result(TIMEOUT_S)
    assert step(training) == pytest.approx(4 * np.log(VOCABULARY))


def test_a_batch_may_be_larger_than_one_request_to_a_server(training):
    data = [datum([1, 2])] * (Limits().data_per_request + 1)
    assert len(training.forward(data, "cross_entropy").result(TIMEOUT_S).loss_fn_outputs) == len(data)


def test_optim_step_takes_one_set_of_parameters(training):
    with pytest.raises(ValueError, match="optim_params and adam_params are both given"):
        training.optim_step(ADAM, adam_params=ADAM)
    assert training.optim_step(adam_params=ADAM).result(TIMEOUT_S).metrics == {"grad_norm:mean": 0.0}


def test_a_model_goes_on_from_its_state_as_if_it_had_never_stopped(backend, service, training):
    step(training)
    path = training.save_state("one").result(TIMEOUT_S).path
    assert path == f"tinker://{training.model_id}/weights/one"
    resumed = service.create_training_client_from_state_with_optimizer(path).result(TIMEOUT_S)
    anew = service.create_training_client_from_state(path).result(TIMEOUT_S)
    for client in (training, resumed, anew):
        step(client)
    np.testing.assert_array_equal(table(backend, training), table(backend, resumed))
    assert not np.allclose(table(backend, training), table(backend, anew))
    assert resumed.get_info().lora_rank == 4


def test_state_is_loaded_into_a_model_that_is_there(backend, training):
    before = table(backend, training).copy()
    path = training.save_state("start").result(TIMEOUT_S).path
    step(training)
    with pytest.warns(FutureWarning, match="load_state"):
        loaded = training.load_state(path).result(TIMEOUT_S)
    assert loaded.path == path
    np.testing.assert_array_equal(table(backend, training), before)


def test_a_taken_name_is_replaced_only_when_asked_for(training):
    training.save_state("name").result(TIMEOUT_S)
    with pytest.raises(tinker.RequestFailedError) as failure:
        training.save_state("name").result(TIMEOUT_S)
    assert failure.value.category == types.RequestErrorCategory.User
    assert "name" in str(failure.value)
    training.save_state("name", overwrite=True).result(TIMEOUT_S)


def test_a_model_says_what_it_is(training):
    info = training.get_info()
    assert (info.model_name, info.is_lora, info.lora_rank) == (NAME, True, 4)
    assert info.model_data.arch == "bigram"
    assert training.get_telemetry() is None


def test_rank_0_trains_all_parameters(service):
    client = service.create_lora_training_client(NAME, rank=0).result(TIMEOUT_S)
    assert (client.get_info().is_lora, client.get_info().lora_rank) == (False, None)


def test_deprecated_coroutines_return_futures_and_warn(training):
    async def use():
        with pytest.warns(FutureWarning, match=r"forward_backward_async\(\) is deprecated"):
            gradient = await training.forward_backward_async(DATA, "cross_entropy")
        with pytest.warns(FutureWarning, match="get_info_async"):
            info = await training.get_info_async()
        return (await gradient).metrics["loss:sum"], info.model_id

    loss, model_id = asyncio.run(use())
    assert loss == pytest.approx(4 * np.log(VOCABULARY))
    assert model_id == training.model_id


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda t: t.forward_backward([], "cross_entropy"), "data is empty"),
        (lambda t: t.forward_backward_custom(DATA, "mean"), "loss_fn='mean': must be a function"),
        (lambda t: t.save_weights_and_get_sampling_client(kind="inflight"), "kind='inflight' is not"),
        (lambda t: t.create_sampling_client("tinker://x", record_stability_info=True), "not supported here"),
        (lambda t: t.optim_step(types.DimuonParams(learning_rate=0.1)), "trained with Adam"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(training, call, says):
    with pytest.raises(ValueError, match=says):
        call(training)
