"""Contract of the server with the unmodified official client, over both backends. The tests of the actor
backend start slowly, so they share one server.
"""

import numpy as np
import pytest
import tinker
import torch
from tinker import RequestFailedError, types

from actors.processes import with_descendants
from rl.utils.processes import identify
from tests.support.runs import wait_until_gone
from tests.support.tinker_data import (
    TEXTS,
    floats,
    forward,
    ints,
    learn,
    logprobs_of,
    lora,
    sampled_datum,
    text_datum,
)
from tests.support.tinker_server import RESULT_TIMEOUT_S, server_process
from tests.tinker.conftest import CHUNK_DATA

pytestmark = [pytest.mark.medium, pytest.mark.timeout(240)]
DATA = [text_datum(text) for text in TEXTS]
STEP = types.AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="session")
def actor_server(tmp_path_factory):
    storage = tmp_path_factory.mktemp("tinker-actors") / "storage"
    # A busy machine takes longer to close a generator than the default allows.
    patient = ("--backend.timeouts.close_s", "20", "--limits.close_timeout_s", "25")
    with server_process(storage, "--config", "tiny_actors", *patient) as server:
        controller = identify(server.process.pid)
        assert controller is not None
        processes = with_descendants([controller])
        assert len(processes) >= 3
        yield server
        server.close_clients()
        assert server.end() == 0
        assert wait_until_gone([process.pid for process in processes]) == []
        assert "Error" not in server.log, server.log


@pytest.fixture(params=["local", "actors"])
def either(request):
    """Official client of a server over each backend."""
    service = request.getfixturevalue("server" if request.param == "local" else "actor_server").client()
    yield service
    service.close("success").result(RESULT_TIMEOUT_S)


def test_loss_is_the_weighted_sum_of_the_logprobs_and_falls(either):
    weights = [[0.0] * 10 + [2.0] * (datum.model_input.length - 10) for datum in DATA]
    data = [
        types.Datum(
            model_input=datum.model_input, loss_fn_inputs=datum.loss_fn_inputs | {"weights": floats(row)}
        )
        for datum, row in zip(DATA, weights, strict=True)
    ]
    model = lora(either)
    output = model.forward(data, "cross_entropy").result(RESULT_TIMEOUT_S)
    logprobs = logprobs_of(output)
    by_hand = -sum(float(np.dot(p.astype(float), w)) for p, w in zip(logprobs, weights, strict=True))
    assert output.metrics["loss:sum"] == pytest.approx(by_hand, rel=1e-5)

    losses = learn(model, DATA, steps=8)
    num_tokens = sum(datum.model_input.length for datum in DATA)
    assert 4.0 < losses[0] / num_tokens < 8.0  # a fresh model of 259 tokens: about log 259 = 5.6
    assert losses[-1] < 0.6 * losses[0]


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


def test_custom_loss_equals_the_built_in_one(client):
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


def test_several_targets_of_a_token_are_weighted(client):
    tokens = list(b"a rose is")
    targets = torch.zeros(len(tokens) - 1, 12, dtype=torch.int64)
    weights = torch.zeros(len(tokens) - 1, 12)
    targets[:, 0], weights[:, 0] = torch.tensor(tokens[1:]), 0.5
    targets[2, 1], weights[2, 1] = ord("R"), 0.25
    prompt = types.ModelInput.from_ints(tokens[:-1])
    inputs = {
        "target_tokens": types.TensorData.from_torch_sparse(targets),
        "weights": types.TensorData.from_torch(weights),
    }
    assert inputs["target_tokens"].sparse_crow_indices is not None
    model = lora(client)
    datum = types.Datum(model_input=prompt, loss_fn_inputs=inputs)
    plain = types.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": ints(tokens[1:])})
    output = model.forward_backward([datum], "cross_entropy").result(RESULT_TIMEOUT_S)
    (logprobs,) = logprobs_of(output)
    (as_plain,) = forward(model, [plain])

    assert logprobs.shape == (8, 12)
    np.testing.assert_allclose(logprobs[:, 0], as_plain, atol=1e-5)
    by_hand = -0.5 * as_plain.sum() - 0.25 * logprobs[2, 1]
    assert output.metrics["loss:sum"] == pytest.approx(by_hand, rel=1e-5)


def test_saved_model_continues_training_and_sampling(either):
    model = lora(either, seed=5)
    learn(model, DATA, steps=3)
    saved = model.save_state("resume").result(RESULT_TIMEOUT_S)
    for_sampler = model.save_weights_for_sampler("sampler").result(RESULT_TIMEOUT_S)
    before = drawn(either.create_sampling_client(for_sampler.path).result(RESULT_TIMEOUT_S))
    went_on = learn(model, DATA, steps=2)

    resumed = either.create_training_client_from_state_with_optimizer(saved.path).result(RESULT_TIMEOUT_S)

    assert saved.path == f"tinker://{model.model_id}/weights/resume"
    assert drawn(snapshot(resumed)) == before
    assert learn(resumed, DATA, steps=2) == went_on
    with pytest.raises(RequestFailedError, match="resume"):
        model.save_state("resume").result(RESULT_TIMEOUT_S)


def drawn(sampler):
    params = {"num_samples": 3, "max_tokens": 12, "seed": 11, "temperature": 0.8}
    response = sample(sampler, prompt=list(b"a rose"), **params)
    return [(sequence.tokens, sequence.logprobs) for sequence in response.sequences]


# Sampling

PROMPT = list(b"say a: ")
WANTED = ord("a")


def sample(sampler, *, num_samples=1, prompt=PROMPT, **params):
    return sampler.sample(
        types.ModelInput.from_ints(prompt),
        num_samples=num_samples,
        sampling_params=types.SamplingParams(**{"max_tokens": 4} | params),
    ).result(RESULT_TIMEOUT_S)


def snapshot(model):
    return model.save_weights_and_get_sampling_client().result(RESULT_TIMEOUT_S)


def group(sampler, seed):
    """Return tokens, logprobs and the share of the wanted token of each sample."""
    sequences = sample(sampler, num_samples=32, seed=seed).sequences
    return [(s.tokens, s.logprobs, s.tokens.count(WANTED) / len(s.tokens)) for s in sequences]


def test_reward_of_an_rl_loop_rises(client):
    model = lora(client, seed=3)
    # A random model would draw it once in 259 tokens; make it likely enough to be found.
    learn(model, [text_datum("say a: abcd"), text_datum("say a: bcda")], steps=3, lr=3e-3)
    rewards = []
    for step in range(10):
        samples = group(snapshot(model), seed=step)
        mean = float(np.mean([reward for *_, reward in samples]))
        rewards.append(mean)
        data = [
            sampled_datum(PROMPT, tokens, logprobs, reward - mean) for tokens, logprobs, reward in samples
        ]
        done = model.forward_backward(data, "ppo")
        model.optim_step(types.AdamParams(learning_rate=5e-3)).result(RESULT_TIMEOUT_S)
        metrics = done.result(RESULT_TIMEOUT_S).metrics
        # The sampler computes the same as the trainer, so each ratio is 1 and the loss is minus the
        # advantages.
        advantages = sum(len(tokens) * (reward - mean) for tokens, _, reward in samples)
        assert metrics["loss:sum"] == pytest.approx(-advantages, abs=1e-3)

    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2, rewards


def test_logprobs_of_samples_and_prompts_equal_those_of_the_trainer(either):
    model = lora(either)
    learn(model, [text_datum("a rose is a rose")], steps=2)
    sampler = snapshot(model)
    (sequence,) = sample(sampler, seed=1, max_tokens=6).sequences
    whole = PROMPT + list(sequence.tokens)
    of_prompt = sampler.compute_logprobs(types.ModelInput.from_ints(whole)).result(RESULT_TIMEOUT_S)
    learned = types.Datum(
        model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs={"target_tokens": ints(whole[1:])}
    )
    (by_trainer,) = forward(model, [learned])

    assert of_prompt[0] is None
    np.testing.assert_allclose(of_prompt[len(PROMPT) :], sequence.logprobs, atol=1e-5)
    np.testing.assert_allclose(of_prompt[1:], by_trainer, atol=1e-5)


def test_rest_client_manages_runs_and_checkpoints(server, client):
    model = lora(client, rank=4)
    path = model.save_state("managed", ttl_seconds=3600).result(RESULT_TIMEOUT_S).path
    rest = tinker.RestClient(base_url=server.url, api_key="tml-test")
    run = rest.get_training_run_by_tinker_path(path).result(RESULT_TIMEOUT_S)
    (listed,) = rest.list_checkpoints(model.model_id).result(RESULT_TIMEOUT_S).checkpoints
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result(RESULT_TIMEOUT_S)
    (kept,) = rest.list_checkpoints(model.model_id).result(RESULT_TIMEOUT_S).checkpoints
    rest.delete_checkpoint_from_tinker_path(path).result(RESULT_TIMEOUT_S)

    assert (run.training_run_id, run.base_model, run.lora_rank) == (model.model_id, "tiny", 4)
    assert (listed.checkpoint_id, listed.checkpoint_type) == ("weights/managed", "training")
    assert listed.size_bytes > 1000
    assert (listed.expires_at is None, kept.expires_at) == (False, None)
    assert rest.list_checkpoints(model.model_id).result(RESULT_TIMEOUT_S).checkpoints == []
