"""Contract of the server with the unmodified official client, over both backends. The tests of the
actor backend start slowly, so they share one server.
"""

import numpy as np
import pytest
import tinker
import torch
from tinker import RequestFailedError, types

from actors.launch.cleanup import list_with_descendants
from rl.ledger.check import check_run
from rl.utils.processes import identify
from tests.support.runs import wait_until_gone
from tests.support.tinker_data import (
    TEXTS,
    done,
    floats,
    forward,
    ints,
    learn,
    logprobs_of,
    lora,
    sampled_datum,
    text_datum,
)
from tests.support.tinker_server import server_process
from tests.tinker.conftest import CHUNK_DATA

pytestmark = [pytest.mark.medium, pytest.mark.timeout(240)]
DATA = [text_datum(text) for text in TEXTS]
STEP = types.AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="session")
def actor_server(tmp_path_factory):
    storage = tmp_path_factory.mktemp("tinker-actors") / "storage"
    # A busy machine takes longer to close a generator than the default allows.
    options = ("--backend.timeouts.close_s", "15", "--ledger.enable", "True")
    with server_process(storage, "--config", "tiny_actors", *options) as server:
        controller = identify(server.process.pid)
        assert controller is not None
        processes = list_with_descendants([controller])
        assert len(processes) >= 3
        yield server
        server.close_clients()
        assert server.end() == 0
        assert wait_until_gone([process.pid for process in processes]) == []
        assert "Error" not in server.log, server.log


@pytest.fixture(params=["local", "actors"])
def either_server(request):
    """Server over each backend."""
    return request.getfixturevalue("server" if request.param == "local" else "actor_server")


@pytest.fixture
def either(either_server):
    """Official client of a server over each backend."""
    service = either_server.client()
    yield service
    done(service.close("success"))


# Training


def test_loss_is_the_weighted_sum_of_the_logprobs_and_falls(either):
    weights = [[0.0] * 10 + [2.0] * (datum.model_input.length - 10) for datum in DATA]
    data = [
        types.Datum(
            model_input=datum.model_input,
            loss_fn_inputs=datum.loss_fn_inputs | {"weights": floats(row)},
        )
        for datum, row in zip(DATA, weights, strict=True)
    ]
    model = lora(either)
    output = done(model.forward(data, "cross_entropy"))
    by_hand = -sum(
        np.dot(p.astype(float), w) for p, w in zip(logprobs_of(output), weights, strict=True)
    )
    assert output.metrics["loss:sum"] == pytest.approx(by_hand, rel=1e-5)

    losses = learn(model, DATA, steps=8)
    num_tokens = sum(datum.model_input.length for datum in DATA)
    assert 4.0 < losses[0] / num_tokens < 8.0  # a fresh model of 259 tokens: about log 259 = 5.6
    assert losses[-1] < 0.6 * losses[0]


def assert_steps_are_equal(*models):
    norms = [done(model.optim_step(STEP)).metrics["grad_norm:mean"] for model in models]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    for one, other in zip(*(forward(model, DATA) for model in models), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_gradients_of_calls_and_of_chunks_add_up(client):
    assert len(DATA) > CHUNK_DATA
    chunked, by_hand = lora(client), lora(client)
    done(chunked.forward_backward(DATA, "cross_entropy"))
    for datum in DATA:
        done(by_hand.forward_backward([datum], "cross_entropy"))
    assert_steps_are_equal(chunked, by_hand)


def test_custom_loss_equals_the_built_in_one(client):
    custom, built_in = lora(client), lora(client)

    def cross_entropy(data, logprobs):
        weights = [torch.tensor(datum.loss_fn_inputs["weights"].data) for datum in data]
        loss = -torch.stack([(p * w).sum() for p, w in zip(logprobs, weights, strict=True)]).sum()
        return loss, {"mine": loss.item()}

    one = done(custom.forward_backward_custom(DATA, cross_entropy))
    other = done(built_in.forward_backward(DATA, "cross_entropy"))
    assert one.metrics["mine"] == pytest.approx(other.metrics["loss:sum"], rel=1e-5)
    assert_steps_are_equal(custom, built_in)


def test_several_targets_of_a_token_are_weighted(client):
    plain = text_datum("a rose is")
    next_tokens = torch.tensor(plain.loss_fn_inputs["target_tokens"].data)
    targets, weights = torch.zeros(8, 12, dtype=torch.int64), torch.zeros(8, 12)
    targets[:, 0], weights[:, 0] = next_tokens, 0.5
    targets[2, 1], weights[2, 1] = ord("R"), 0.25
    sparse = types.TensorData.from_torch_sparse(targets)
    assert sparse.sparse_crow_indices is not None
    inputs = {"target_tokens": sparse, "weights": types.TensorData.from_torch(weights)}
    datum = types.Datum(model_input=plain.model_input, loss_fn_inputs=inputs)
    model = lora(client)
    output = done(model.forward_backward([datum], "cross_entropy"))
    (logprobs,) = logprobs_of(output)
    (as_plain,) = forward(model, [plain])

    assert logprobs.shape == (8, 12)
    np.testing.assert_allclose(logprobs[:, 0], as_plain, atol=1e-5)
    by_hand = -0.5 * as_plain.sum() - 0.25 * logprobs[2, 1]
    assert output.metrics["loss:sum"] == pytest.approx(by_hand, rel=1e-5)


def test_saved_model_continues_training_and_sampling(either):
    model = lora(either, seed=5)
    learn(model, DATA, steps=3)
    saved = done(model.save_state("resume"))
    for_sampler = done(model.save_weights_for_sampler("sampler"))
    before = drawn(done(either.create_sampling_client(for_sampler.path)))
    went_on = learn(model, DATA, steps=2)

    resumed = done(either.create_training_client_from_state_with_optimizer(saved.path))

    assert saved.path == f"tinker://{model.model_id}/weights/resume"
    assert drawn(snapshot(resumed)) == before
    assert learn(resumed, DATA, steps=2) == went_on
    with pytest.raises(RequestFailedError, match="resume"):
        done(model.save_state("resume"))


def drawn(sampler):
    params = {"num_samples": 3, "max_tokens": 12, "seed": 11, "temperature": 0.8}
    sequences = sample(sampler, prompt=list(b"a rose"), **params)
    return [(sequence.tokens, sequence.logprobs) for sequence in sequences]


# Sampling

PROMPT = list(b"say a: ")
WANTED = ord("a")


def sample(sampler, *, num_samples=1, prompt=PROMPT, **params):
    how = types.SamplingParams(**{"max_tokens": 4} | params)
    given = types.ModelInput.from_ints(prompt)
    return done(sampler.sample(given, num_samples=num_samples, sampling_params=how)).sequences


def snapshot(model):
    return done(model.save_weights_and_get_sampling_client())


def test_reward_of_an_rl_loop_rises(client):
    model = lora(client, seed=3)
    # A random model would draw it once in 259 tokens; make it likely enough to be found.
    learn(model, [text_datum("say a: abcd"), text_datum("say a: bcda")], steps=3, lr=3e-3)
    means = []
    for step in range(10):
        sequences = sample(snapshot(model), num_samples=32, seed=step)
        rewards = [one.tokens.count(WANTED) / len(one.tokens) for one in sequences]
        means.append(float(np.mean(rewards)))
        advantages = [reward - means[-1] for reward in rewards]
        data = [
            sampled_datum(PROMPT, one.tokens, one.logprobs, advantage)
            for one, advantage in zip(sequences, advantages, strict=True)
        ]
        gradient = model.forward_backward(data, "ppo")
        done(model.optim_step(types.AdamParams(learning_rate=5e-3)))
        # The sampler computes the same as the trainer, so each ratio is 1 and the loss is minus the
        # advantages.
        by_hand = -sum(len(one.tokens) * a for one, a in zip(sequences, advantages, strict=True))
        assert done(gradient).metrics["loss:sum"] == pytest.approx(by_hand, abs=1e-3)

    assert np.mean(means[-3:]) > np.mean(means[:3]) + 0.2, means


def test_logprobs_of_samples_and_prompts_equal_those_of_the_trainer(either):
    model = lora(either)
    learn(model, [text_datum("a rose is a rose")], steps=2)
    sampler = snapshot(model)
    (sequence,) = sample(sampler, seed=1, max_tokens=6)
    whole = PROMPT + list(sequence.tokens)
    of_prompt = done(sampler.compute_logprobs(types.ModelInput.from_ints(whole)))
    learned = types.Datum(
        model_input=types.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={"target_tokens": ints(whole[1:])},
    )
    (by_trainer,) = forward(model, [learned])

    assert of_prompt[0] is None
    np.testing.assert_allclose(of_prompt[len(PROMPT) :], sequence.logprobs, atol=1e-5)
    np.testing.assert_allclose(of_prompt[1:], by_trainer, atol=1e-5)


def test_ledger_of_samples_that_are_trained_on_closes(either_server, either):
    model = lora(either)
    learn(model, [text_datum("a rose is a rose")], steps=1)
    data = []
    for number, sequence in enumerate(sample(snapshot(model), num_samples=4, seed=2)):
        data.append(sampled_datum(PROMPT, sequence.tokens, sequence.logprobs, 1.0 - number))
    num_sampled = sum(len(one.model_input.to_ints()) + 1 - len(PROMPT) for one in data)
    gradient = model.forward_backward(data, "importance_sampling")
    done(model.optim_step(STEP))
    done(gradient)

    checked = check_run(either_server.storage / model.model_id.replace(":", "."))
    assert (checked.violation, checked.num_steps) == (None, 2)
    # One of the four has an advantage of 0.
    of_one = len(data[1].model_input.to_ints()) + 1 - len(PROMPT)
    assert checked.counts["sampled"] == num_sampled - of_one
    assert (checked.counts["given"], checked.counts["edited"]) == (15, 0)


def test_rest_client_manages_runs_and_checkpoints(server, client):
    model = lora(client, rank=4)
    path = done(model.save_state("managed", ttl_seconds=3600)).path
    rest = tinker.RestClient(base_url=server.url, api_key="tml-test")
    run = done(rest.get_training_run_by_tinker_path(path))
    (listed,) = done(rest.list_checkpoints(model.model_id)).checkpoints
    done(rest.set_checkpoint_ttl_from_tinker_path(path, None))
    (kept,) = done(rest.list_checkpoints(model.model_id)).checkpoints
    done(rest.delete_checkpoint_from_tinker_path(path))

    assert (run.training_run_id, run.base_model, run.lora_rank) == (model.model_id, "tiny", 4)
    assert (listed.checkpoint_id, listed.checkpoint_type) == ("weights/managed", "training")
    assert listed.size_bytes > 1000
    assert (listed.expires_at is None, kept.expires_at) == (False, None)
    assert done(rest.list_checkpoints(model.model_id)).checkpoints == []
