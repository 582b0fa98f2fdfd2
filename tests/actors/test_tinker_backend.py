"""The Tinker backend over actors computes what the local one does, on one trainer rank and one generator."""

import asyncio
import math

import numpy as np
import pytest

from actors.tinker_backend import ActorBackend
from rl.tinker.errors import InvalidRequestError, LimitReachedError, NotFoundError
from rl.tinker.messages import AdamParams
from tests.support.tinker_backends import (
    CROSS_ENTROPY,
    actor_config,
    assert_same_outputs,
    created,
    local_backend,
    running,
    sampled,
    tokens_of,
    train,
)
from tests.tinker.local.data_parts import datum, random_data
from tests.tinker.local.local_parts import request, settings

pytestmark = [pytest.mark.medium, pytest.mark.timeout(300)]


class Both:
    """The backend over actors, and the local one, on the same base."""

    def __init__(self, loop, actors, local, folder):
        self.run = loop.run
        self.actors, self.local = actors, local
        self.folder = folder

    def each(self, function, *args, **kwargs):
        """What both say: first the actors."""
        return tuple(self.run(function(backend, *args, **kwargs)) for backend in (self.actors, self.local))

    def deleted(self, *model_ids, samplers=()):
        async def delete(backend):
            for model_id in model_ids:
                await backend.delete_model(model_id)
            for sampler_id in samplers:
                await backend.close_sampler(sampler_id)

        self.each(delete)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tinker")
    actors: ActorBackend = actor_config(folder / "base").build()
    local = local_backend(folder / "base")
    with running(actors, local) as loop:
        yield Both(loop, actors, local, folder)


@pytest.mark.parametrize("rank", [4, 0], ids=["lora", "all"])
def test_losses_and_logprobs_are_those_of_the_local_backend(both, rank):
    ours, theirs = both.each(created, "m", rank=rank, steps=4)
    assert_same_outputs(ours, theirs)
    assert not np.allclose(ours[0].logprobs[0], ours[2].logprobs[0][: len(ours[0].logprobs[0])], atol=1e-3)

    async def evaluated(backend):
        return [await backend.forward_backward("m", random_data(3, seed=9), CROSS_ENTROPY, backward=False)]

    assert_same_outputs(*both.each(evaluated))
    norms = both.each(step_after_a_drop)
    assert norms == (0.0, 0.0)
    both.deleted("m")


async def step_after_a_drop(backend):
    await backend.forward_backward("m", random_data(3, seed=9), CROSS_ENTROPY, backward=True)
    await backend.drop_gradient("m")
    return (await backend.optim_step("m", AdamParams())).metrics["grad_norm:mean"]


def test_a_supervised_loop_learns_its_data(both):
    async def loop(backend):
        await backend.create_model("m", settings(8))
        data = random_data(4, seed=3)
        losses = []
        for _ in range(12):
            output = await backend.forward_backward("m", data, CROSS_ENTROPY, backward=True)
            losses.append(output.metrics["loss:sum"] / output.metrics["num_tokens:sum"])
            await backend.optim_step("m", AdamParams(learning_rate=2e-2))
        await backend.delete_model("m")
        return losses

    losses = both.run(loop(both.actors))
    assert losses[-1] < losses[0] / 2


def test_snapshots_and_the_base_give_each_their_own_while_training_goes_on(both):
    async def life(backend):
        await created(backend, "m")
        await backend.take_snapshot("m", "first")
        await train(backend, "m", seed=5)
        await backend.take_snapshot("m", "second")
        await backend.open_sampler("base", settings(), None)
        order = ["first", "base", "second", "first", "second", "base", "base", "first"]
        asked = [asyncio.create_task(sampled(backend, name)) for name in order]
        await train(backend, "m", seed=7)
        outputs = await asyncio.gather(*asked)
        again = [await sampled(backend, name) for name in ("first", "base", "second")]
        for name in ("first", "second", "base"):
            await backend.close_sampler(name)
        await backend.delete_model("m")
        assert [tokens_of(o) for o in again] == [tokens_of(outputs[i]) for i in (0, 1, 2)]
        return outputs

    ours, theirs = both.each(life)
    assert [tokens_of(o) for o in ours] == [tokens_of(o) for o in theirs]
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one.sequences[0].logprobs, other.sequences[0].logprobs, atol=1e-4, rtol=0)
    first, base, second = (tokens_of(output) for output in ours[:3])
    assert first != base != second != first


def test_a_seed_draws_the_tokens_that_the_local_backend_draws(both):
    async def life(backend):
        await created(backend, "m", rank=0)
        await backend.take_snapshot("m", "s")
        how = {"temperature": 0.8, "num_samples": 3, "seed": 11, "top_k": 40, "top_p": 0.9}
        drawn = await sampled(backend, "s", **how, prompt_logprobs=True)
        free = await sampled(backend, "s", temperature=1.0, num_samples=2, seed=None)
        assert tokens_of(free)[0] != tokens_of(free)[1]
        full = await backend.sample("s", request([7] * 64, prompt_logprobs=True))
        await backend.close_sampler("s")
        await backend.delete_model("m")
        return drawn, full

    (ours, our_full), (theirs, their_full) = both.each(life)
    assert tokens_of(ours) == tokens_of(theirs)
    for one, other in zip(ours.sequences, theirs.sequences, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4, rtol=0)
    for one, other in ((ours, theirs), (our_full, their_full)):
        assert math.isnan(one.prompt_logprobs[0])
        np.testing.assert_allclose(one.prompt_logprobs[1:], other.prompt_logprobs[1:], atol=1e-4, rtol=0)
    assert tokens_of(our_full) == [[]]


def test_what_either_backend_saves_the_other_goes_on_with(both):
    names = {both.actors: "actors", both.local: "local"}

    async def save(backend):
        await created(backend, "m")
        for kind in ("state", "sampler"):
            folder = both.folder / names[backend] / kind
            folder.mkdir(parents=True)
            await (backend.save_state if kind == "state" else backend.save_sampler)("m", folder)
        await backend.take_snapshot("m", "now")
        tokens = tokens_of(await sampled(backend, "now"))
        await backend.close_sampler("now")
        return tokens, await train(backend, "m", seed=20)

    async def load(backend, other):
        await backend.create_model("loaded", settings(4, seed=99))
        await backend.load_state("loaded", both.folder / names[other] / "state", optimizer=True)
        await backend.open_sampler("saved", settings(4), both.folder / names[other] / "sampler")
        tokens = tokens_of(await sampled(backend, "saved"))
        return tokens, await train(backend, "loaded", seed=20)

    saved = both.each(save)
    loaded = (both.run(load(both.actors, both.local)), both.run(load(both.local, both.actors)))
    for (tokens, outputs), (loaded_tokens, loaded_outputs) in zip(saved, loaded, strict=True):
        assert tokens == loaded_tokens
        assert_same_outputs(loaded_outputs, outputs)
    sampler = both.folder / "local" / "sampler"
    with pytest.raises(InvalidRequestError, match="other settings"):
        both.run(both.actors.open_sampler("none", settings(2), sampler))
    with pytest.raises(InvalidRequestError, match=r"no optimizer\.safetensors"):
        both.run(both.actors.load_state("m", sampler, optimizer=True))
    both.deleted("m", "loaded", samplers=("saved",))


def test_texts_and_tokens_end_a_completion(both):
    async def life(backend):
        await backend.open_sampler("base", settings(), None)
        (free,) = tokens_of(await sampled(backend, "base", temperature=1.0, seed=2, max_tokens=30))
        letters = [token for token in free if 32 <= token < 127]
        text = chr(letters[1])
        how = {"temperature": 1.0, "seed": 2, "max_tokens": 30}
        by_text = await sampled(backend, "base", stop=("no such text", text), **how)
        by_token = await sampled(backend, "base", stop=(free[4],), **how)
        await backend.close_sampler("base")
        return free, text, by_text.sequences[0], by_token.sequences[0]

    ours, theirs = both.each(life)
    free, text, by_text, by_token = ours
    for stopped, local in ((by_text, theirs[2]), (by_token, theirs[3])):
        assert stopped.stop_reason == local.stop_reason == "stop"
        assert stopped.tokens.tolist() == local.tokens.tolist() == free[: len(stopped.tokens)]
        assert len(stopped.tokens) < len(free)
        assert len(stopped.logprobs) == len(stopped.tokens)
    assert by_text.tokens[-1] == ord(text)
    assert by_token.tokens[-1] == free[4]


def test_a_cancelled_request_makes_room_for_another_snapshot(both):
    async def life(backend):
        await created(backend, "m")
        await backend.take_snapshot("m", "s")
        await backend.open_sampler("base", settings(), None)
        await sampled(backend, "base")
        running = asyncio.create_task(sampled(backend, "base", max_tokens=50, num_samples=8))
        waiting = [asyncio.create_task(sampled(backend, name)) for name in ("s", "base")]
        await asyncio.sleep(0)
        running.cancel()
        waiting[1].cancel()
        answers = await asyncio.gather(running, *waiting, return_exceptions=True)
        assert [type(answer) for answer in (answers[0], answers[2])] == [asyncio.CancelledError] * 2
        assert not isinstance(answers[1], BaseException), answers[1]
        await backend.close_sampler("s")
        await backend.delete_model("m")
        return tokens_of(answers[1])

    ours, theirs = both.each(life)
    assert ours == theirs


def test_what_cannot_be_is_refused_and_everything_goes_on(both):
    async def life(backend):
        await backend.create_model("m", settings(4))
        with pytest.raises(NotFoundError, match="no model 'x'"):
            await backend.optim_step("x", AdamParams())
        wrong = datum([1, 2, 3], weights=[1, 1])
        with pytest.raises(InvalidRequestError, match=r"data\[0\].weights: has shape"):
            await backend.forward_backward("m", [wrong], CROSS_ENTROPY, backward=True)
        with pytest.raises(InvalidRequestError, match="topk_prompt_logprobs=2: must be 0"):
            backend.check_request("small", request([1], topk=2))
        with pytest.raises(InvalidRequestError, match=r"temperature=0\.001: must be 0 \(greedy\) or"):
            backend.check_request("small", request([1], temperature=0.001))
        with pytest.raises(InvalidRequestError, match=r"model\.json is missing"):
            await backend.open_sampler("none", settings(4), both.folder)
        await backend.open_sampler("base", settings(), None)
        for number in range(5):
            await backend.take_snapshot("m", f"s{number}")
        with pytest.raises(LimitReachedError, match="there are 6 snapshots in memory"):
            await backend.take_snapshot("m", "more")
        for number in range(5):
            await backend.close_sampler(f"s{number}")
        await train(backend, "m")
        await backend.forward_backward("m", random_data(2, seed=1), CROSS_ENTROPY, backward=True)
        await backend.optim_step("m", AdamParams(learning_rate=1e30))
        with pytest.raises(InvalidRequestError, match="its weights have diverged"):
            await backend.take_snapshot("m", "diverged")
        await backend.delete_model("m")
        return await sampled(backend, "base")

    assert len(tokens_of(both.run(life(both.actors)))[0]) == 12
