"""The same calls with an actual model: the tiny one, on a CPU."""

import numpy as np
import pytest
from tinker import types

import rl.tinker as tinker

TIMEOUT_S = 60
ADAM = types.AdamParams(learning_rate=3e-3)

pytestmark = [pytest.mark.medium, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("storage")
    with tinker.ServiceClient(backend="tiny", storage_folder=folder) as client:
        yield client


@pytest.fixture
def training(service):
    return service.create_lora_training_client("tiny", rank=8, seed=0).result(TIMEOUT_S)


@pytest.fixture(scope="module")
def data(service):
    sampler = service.create_sampling_client(base_model="tiny").result(TIMEOUT_S)
    tokenizer = sampler.get_tokenizer()
    texts = ["one two three", "four five six seven"]
    return [datum(tokenizer.encode(text)) for text in texts]


def datum(tokens):
    weights = [0.0] + [1.0] * (len(tokens) - 2)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def step(training, data):
    gradient = training.forward_backward(data, "cross_entropy")
    training.optim_step(ADAM).result(TIMEOUT_S)
    return gradient.result(TIMEOUT_S).metrics["loss:sum"]


def samples(training, data):
    sampler = training.save_weights_and_get_sampling_client().result(TIMEOUT_S)
    params = types.SamplingParams(max_tokens=8, seed=1)
    return [s.tokens for s in sampler.sample(data[0].model_input, 4, params).result(TIMEOUT_S).sequences]


def test_the_loss_falls(training, data):
    losses = [step(training, data) for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0]


def test_a_custom_loss_steps_as_the_built_in_one(service, training, data):
    other = service.create_lora_training_client("tiny", rank=8, seed=0).result(TIMEOUT_S)

    def cross_entropy(data, logprobs):
        weights = [d.loss_fn_inputs["weights"].to_torch() for d in data]
        return -sum((w * p).sum() for w, p in zip(weights, logprobs, strict=True)), {}

    for _ in range(3):
        loss = step(training, data)
        custom = other.forward_backward_custom(data, cross_entropy)
        other.optim_step(ADAM).result(TIMEOUT_S)
        assert custom.result(TIMEOUT_S).metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)


def test_a_resumed_model_samples_and_steps_identically(service, training, data):
    step(training, data)
    path = training.save_state("here").result(TIMEOUT_S).path
    resumed = service.create_training_client_from_state_with_optimizer(path).result(TIMEOUT_S)
    assert samples(resumed, data) == samples(training, data)
    assert [step(resumed, data), step(resumed, data)] == [step(training, data), step(training, data)]


def test_samplers_logprobs_are_the_learners(training, data):
    step(training, data)
    sampler = training.save_weights_and_get_sampling_client().result(TIMEOUT_S)
    prompt = data[0].model_input
    (sequence,) = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=8)).result(TIMEOUT_S).sequences
    tokens = prompt.to_ints() + sequence.tokens
    output = training.forward([datum(tokens)], "cross_entropy").result(TIMEOUT_S)
    learners = output.loss_fn_outputs[0]["logprobs"].to_numpy()[prompt.length - 1 :]
    np.testing.assert_array_equal(learners, sequence.logprobs_np)
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result(TIMEOUT_S)
    assert scored[prompt.length :] == pytest.approx(sequence.logprobs, abs=1e-4)
