"""The official client samples, learns from what it sampled, and asks about what it has."""

import numpy as np
import pytest
import tinker
from tinker import types

from tests.support.tinker_data import forward, ints, learn, lora, sampled_datum, text_datum
from tests.support.tinker_server import RESULT_TIMEOUT_S

pytestmark = pytest.mark.medium
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


def rest_client(server, key):
    return tinker.RestClient(base_url=server.url, api_key=key)


def group(sampler, seed):
    """Tokens, their logprobs and the share of the wanted token in each sample."""
    sequences = sample(sampler, num_samples=32, seed=seed).sequences
    return [(s.tokens, s.logprobs, s.tokens.count(WANTED) / len(s.tokens)) for s in sequences]


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo"])
def test_the_reward_of_an_rl_loop_rises(client, loss):
    model = lora(client, seed=3)
    # Drawn at random it would be one token of 259: it is made likely enough to be found.
    learn(model, [text_datum("say a: abcd"), text_datum("say a: bcda")], steps=3, lr=3e-3)
    rewards = []
    for step in range(10):
        samples = group(snapshot(model), seed=step)
        mean = float(np.mean([reward for *_, reward in samples]))
        rewards.append(mean)
        data = [
            sampled_datum(PROMPT, tokens, logprobs, reward - mean) for tokens, logprobs, reward in samples
        ]
        done = model.forward_backward(data, loss)
        model.optim_step(types.AdamParams(learning_rate=5e-3)).result(RESULT_TIMEOUT_S)
        metrics = done.result(RESULT_TIMEOUT_S).metrics
        # The sampler computes what the learner does, so each ratio is 1 and the loss minus the advantages.
        advantages = sum(len(tokens) * (reward - mean) for tokens, _, reward in samples)
        assert metrics["loss:sum"] == pytest.approx(-advantages, abs=1e-3)

    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2, rewards


def test_logprobs_of_samples_and_of_prompts_are_the_learners(client):
    model = lora(client)
    learn(model, [text_datum("a rose is a rose")], steps=2)
    sampler = snapshot(model)
    (sequence,) = sample(sampler, seed=1, max_tokens=6).sequences
    whole = PROMPT + list(sequence.tokens)
    of_prompt = sampler.compute_logprobs(types.ModelInput.from_ints(whole)).result(RESULT_TIMEOUT_S)
    learned = types.Datum(
        model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs={"target_tokens": ints(whole[1:])}
    )
    (by_learner,) = forward(model, [learned])

    assert of_prompt[0] is None
    np.testing.assert_allclose(of_prompt[len(PROMPT) :], sequence.logprobs, atol=1e-5)
    np.testing.assert_allclose(of_prompt[1:], by_learner, atol=1e-5)


def test_top_logprobs_of_a_prompt_are_in_their_order_and_have_the_prompts_own(client):
    sampler = client.create_sampling_client(base_model="tiny").result(RESULT_TIMEOUT_S)
    response = sampler.sample(
        types.ModelInput.from_ints(PROMPT),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=1, temperature=0.0),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=5,
    ).result(RESULT_TIMEOUT_S)
    (after_prompt,) = response.sequences
    again = sampler.sample(
        types.ModelInput.from_ints(PROMPT + after_prompt.tokens),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
    ).result(RESULT_TIMEOUT_S)

    assert response.topk_prompt_logprobs[0] is None
    for row in response.topk_prompt_logprobs[1:]:
        assert len(row) == 5
        assert [p for _, p in row] == sorted((p for _, p in row), reverse=True)
    # What greedy sampling took after the prompt is the likeliest token there.
    token, logprob = again.topk_prompt_logprobs[-1][0]
    assert token == after_prompt.tokens[0]
    assert again.prompt_logprobs[-1] == pytest.approx(logprob, abs=1e-6)


def test_a_stop_token_ends_a_sample_and_is_part_of_it(client):
    sampler = client.create_sampling_client(base_model="tiny").result(RESULT_TIMEOUT_S)
    (free,) = sample(sampler, seed=2, max_tokens=20, stop=[]).sequences
    (stopped,) = sample(sampler, seed=2, max_tokens=20, stop=[free.tokens[4]]).sequences

    assert (len(free.tokens), free.stop_reason) == (20, "length")
    end = free.tokens.index(free.tokens[4])
    assert (stopped.tokens, stopped.stop_reason) == (free.tokens[: end + 1], "stop")


def test_snapshots_stay_what_they_were_while_the_model_goes_on(client):
    model = lora(client)
    base = client.create_sampling_client(base_model="tiny").result(RESULT_TIMEOUT_S)
    first = snapshot(model)
    before = sample(first, seed=4).sequences[0].tokens
    learn(model, [text_datum("aaaaaaaaaaaa")], steps=6)
    second = snapshot(model)

    futures = [
        s.sample(types.ModelInput.from_ints(PROMPT), 1, types.SamplingParams(max_tokens=4, seed=4))
        for s in (first, second, base)
    ]
    first_tokens, second_tokens, base_tokens = (
        f.result(RESULT_TIMEOUT_S).sequences[0].tokens for f in futures
    )

    assert first_tokens == before == base_tokens  # a fresh adapter changes nothing
    assert second_tokens != before


def test_one_key_sees_nothing_of_another(server, client):
    model = lora(client)
    path = model.save_state("mine").result(RESULT_TIMEOUT_S).path
    other = server.client("tml-somebody-else")
    rest, others_rest = rest_client(server, "tml-test"), rest_client(server, "tml-somebody-else")
    own = [item.tinker_path for item in rest.list_user_checkpoints().result(RESULT_TIMEOUT_S).checkpoints]

    assert path in own
    assert others_rest.list_user_checkpoints().result(RESULT_TIMEOUT_S).checkpoints == []
    assert rest.get_weights_info_by_tinker_path(path).result(RESULT_TIMEOUT_S).lora_rank == 8
    for call in (
        lambda: others_rest.get_weights_info_by_tinker_path(path).result(RESULT_TIMEOUT_S),
        lambda: others_rest.get_training_run(model.model_id).result(RESULT_TIMEOUT_S),
        lambda: others_rest.delete_checkpoint_from_tinker_path(path).result(RESULT_TIMEOUT_S),
        lambda: other.create_training_client_from_state(path).result(RESULT_TIMEOUT_S),
    ):
        with pytest.raises(tinker.NotFoundError):
            call()
    other.close("success").result(RESULT_TIMEOUT_S)


def test_runs_and_checkpoints_are_managed_through_the_rest_client(server, client):
    model = lora(client, rank=4)
    path = model.save_state("managed", ttl_seconds=3600).result(RESULT_TIMEOUT_S).path
    rest = rest_client(server, "tml-test")
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
    with pytest.raises(tinker.BadRequestError, match="does not support publishing"):
        rest.publish_checkpoint_from_tinker_path(path).result(RESULT_TIMEOUT_S)
