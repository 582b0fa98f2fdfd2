"""Models in training behind the local backend: what they share, and that their numbers are their own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rl.tinker.adam import MIN_EPS
from rl.tinker.errors import InvalidRequestError
from rl.tinker.local.base import Base
from rl.tinker.local.models import LocalModel
from rl.tinker.messages import AdamParams, LossCall
from tests.tinker.local.data_parts import datum, random_data
from tests.tinker.local.local_parts import CROSS_ENTROPY, equal, make_model, open_base, same, train, weights

DATA = random_data(5, seed=1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return open_base(tmp_path_factory.mktemp("base") / "tied")


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return open_base(tmp_path_factory.mktemp("base") / "untied", tie=False)


def gradients(model: LocalModel) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.engine.policy.trained_parameters.items()}
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def addresses(model: LocalModel) -> dict[str, int]:
    parameters = model.engine.policy.parameters
    return {name: p.untyped_storage().data_ptr() for name, p in parameters.items() if not p.requires_grad}


def test_lora_models_have_the_bases_memory_and_full_ones_their_own(base):
    own = {name: tensor.untyped_storage().data_ptr() for name, tensor in base.weights.items()}
    one, other, full = make_model(base, 4), make_model(base, 2), make_model(base, 0)
    assert addresses(one) == addresses(other) == own
    assert addresses(full) == {}
    full_weights = {p.untyped_storage().data_ptr() for p in full.engine.policy.parameters.values()}
    assert full_weights.isdisjoint(own.values())


def test_training_changes_nothing_of_the_base(base):
    before = {name: tensor.clone() for name, tensor in base.weights.items()}
    train(make_model(base, 4), DATA)
    train(make_model(base, 0), DATA)
    assert equal(before, base.weights)


@pytest.mark.parametrize("ranks", [(4, 4), (4, 2), (0, 0), (4, 0)], ids=str)
def test_models_trained_alternately_have_the_bits_of_each_alone(base, ranks):
    datas = [random_data(5, seed=seed) for seed in (1, 2)]
    alone = []
    for seed, (rank, data) in enumerate(zip(ranks, datas, strict=True)):
        model = make_model(base, rank, seed=seed)
        alone.append((train(model, data, steps=3), weights(model)))
    both = [make_model(base, rank, seed=seed) for seed, rank in enumerate(ranks)]
    together: list[list[np.ndarray]] = [[], []]
    for _ in range(3):
        for logprobs, model, data in zip(together, both, datas, strict=True):
            logprobs += train(model, data)
    for (logprobs, trained), found, model in zip(alone, together, both, strict=True):
        assert same(logprobs, found)
        assert equal(trained, weights(model))
    assert not same(*together)


def test_a_fresh_lora_model_says_what_the_base_says(base):
    lora, full = (
        make_model(base, rank).forward_backward(DATA, CROSS_ENTROPY, backward=False) for rank in (4, 0)
    )
    for one, other in zip(lora.logprobs, full.logprobs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_a_seed_gives_the_same_adapters_and_none_draws_some(base):
    assert equal(weights(make_model(base, seed=7)), weights(make_model(base, seed=7)))
    assert not equal(weights(make_model(base, seed=7)), weights(make_model(base, seed=8)))
    assert not equal(weights(make_model(base, seed=None)), weights(make_model(base, seed=None)))


def test_the_seed_of_a_notebook_is_left_alone(base):
    torch.manual_seed(1)
    np.random.seed(1)
    expected = torch.rand(1).item(), np.random.rand()
    torch.manual_seed(1)
    np.random.seed(1)
    make_model(base)
    assert (torch.rand(1).item(), np.random.rand()) == expected


@pytest.mark.parametrize(
    ("trains", "layers"),
    [
        ({"train_mlp": False, "train_unembed": False}, {"qkv_proj_lora", "o_proj_lora"}),
        ({"train_attn": False, "train_unembed": False}, {"gate_up_proj_lora", "down_proj_lora"}),
        ({"train_attn": False, "train_mlp": False}, {"lm_head_lora"}),
    ],
    ids=["attention", "feed-forward", "head"],
)
def test_adapters_are_where_the_settings_say(untied, trains, layers):
    names = weights(make_model(untied, **trains))
    assert {name.split(".")[-2] for name in names} == layers


def test_the_products_are_scaled_by_32_over_the_rank(base):
    for rank in (2, 16):
        (lora,) = make_model(base, rank).engine.policy.converters.members
        assert lora.config.scale == 32 / rank  # type: ignore[attr-defined]


def test_the_loss_is_the_sum_over_the_returned_logprobs(base):
    data = [
        datum([5, 6, 7], weights=[0, 2, -0.5]),
        datum([8, 9], [[1, 2], [3, 4]], weights=[[1, 0], [0.25, 2]]),
    ]
    found = make_model(base).forward_backward(data, CROSS_ENTROPY, backward=True)
    assert [logprobs.shape for logprobs in found.logprobs] == [(3,), (2, 2)]
    expected = -sum(
        float((logprobs.astype(np.float64) * one.loss_inputs["weights"]).sum())
        for logprobs, one in zip(found.logprobs, data, strict=True)
    )
    assert found.metrics["loss:sum"] == pytest.approx(expected, rel=1e-6)
    assert found.metrics["num_tokens:sum"] == 5


def test_a_token_may_have_any_target_and_its_logprob_is_that_of_the_distribution(base):
    tokens, last = [5, 6, 7], 320
    every = datum(tokens, [list(range(last))] * 3)
    (logprobs,) = make_model(base).forward_backward([every], CROSS_ENTROPY, backward=False).logprobs
    np.testing.assert_allclose(np.exp(logprobs.astype(np.float64)).sum(1), 1.0, atol=1e-5)
    chosen = datum(tokens, [300, 0, 11])
    (of_chosen,) = make_model(base).forward_backward([chosen], CROSS_ENTROPY, backward=False).logprobs
    np.testing.assert_allclose(of_chosen, [logprobs[0, 300], logprobs[1, 0], logprobs[2, 11]], atol=1e-5)


def test_chunks_of_a_batch_give_the_gradient_of_the_whole(base):
    whole, chunked = make_model(base), make_model(base)
    for call, policy in ((CROSS_ENTROPY, False), (LossCall(name="ppo"), True)):
        data = random_data(6, seed=4, policy=policy)
        one = whole.forward_backward(data, call, backward=True)
        parts = [chunked.forward_backward(data[i : i + 2], call, backward=True) for i in (0, 2, 4)]
        loss = sum(part.metrics["loss:sum"] for part in parts)
        assert loss == pytest.approx(one.metrics["loss:sum"], rel=1e-6, abs=1e-5)
        for name, grad in gradients(whole).items():
            torch.testing.assert_close(gradients(chunked)[name], grad, rtol=1e-4, atol=1e-4)
        assert max(grad.abs().max().item() for grad in gradients(whole).values()) > 0.1


def test_forward_gives_the_same_numbers_and_leaves_the_gradient(base):
    model = make_model(base)
    assert gradients(model) == {}
    forward = model.forward_backward(DATA, CROSS_ENTROPY, backward=False)
    assert gradients(model) == {}
    both = model.forward_backward(DATA, CROSS_ENTROPY, backward=True)
    before = gradients(model)
    model.forward_backward(random_data(2, seed=9), CROSS_ENTROPY, backward=False)
    assert equal(before, gradients(model))
    assert same(list(forward.logprobs), list(both.logprobs))
    assert forward.metrics == both.metrics


def test_a_step_without_a_gradient_is_one_with_a_gradient_of_zero(base):
    model = make_model(base, 0)
    parameters = [p.detach().clone().requires_grad_() for p in model.engine.policy.parameters.values()]
    adam = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1)
    params = AdamParams(learning_rate=1e-2, weight_decay=0.1)
    model.forward_backward(DATA, CROSS_ENTROPY, backward=True)
    for parameter, grad in zip(parameters, gradients(model).values(), strict=True):
        parameter.grad = grad
    adam.step()
    assert model.optim_step(params).metrics["grad_norm:mean"] > 1.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    adam.step()
    assert model.optim_step(params).metrics == {"grad_norm:mean": 0.0}
    for parameter, mine in zip(parameters, model.engine.policy.parameters.values(), strict=True):
        torch.testing.assert_close(mine.detach(), parameter.detach(), rtol=1e-5, atol=1e-6)


def test_the_smallest_eps_leaves_what_has_no_gradient_as_it_was(base):
    model = make_model(base)
    model.forward_backward(random_data(2, seed=1), CROSS_ENTROPY, backward=True)
    before = {name: p.detach().clone() for name, p in model.engine.policy.trained_parameters.items()}
    model.optim_step(AdamParams(learning_rate=0.1, eps=MIN_EPS))
    for name, parameter in model.engine.policy.trained_parameters.items():
        assert torch.isfinite(parameter).all(), name
        assert torch.equal(parameter, before[name]) == name.endswith("lora_a"), name


def test_the_gradient_is_clipped_where_that_is_asked_for(base):
    norms, moved = [], []
    for clip in (0.0, 0.5):
        model = make_model(base, 0)
        before = weights(model)
        model.forward_backward(DATA, CROSS_ENTROPY, backward=True)
        # With so large an eps a step is nearly the gradient itself.
        params = AdamParams(learning_rate=1.0, eps=1e6, beta1=0.0, beta2=0.0, grad_clip_norm=clip)
        norms.append(model.optim_step(params).metrics["grad_norm:mean"])
        after = weights(model)
        moved.append(math.sqrt(sum(float((after[n] - before[n]).square().sum()) for n in before)) * 1e6)
    assert norms[0] == norms[1] > 0.5
    assert moved[1] == pytest.approx(0.5, rel=0.1)
    assert moved[0] > 1.5 * moved[1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", -1.0),
        ("learning_rate", math.inf),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("eps", 0.0),
        ("weight_decay", math.nan),
        ("grad_clip_norm", -1.0),
    ],
)
def test_a_setting_of_a_step_that_cannot_be_is_named_and_nothing_changes(base, field, value):
    model = make_model(base)
    model.forward_backward(DATA, CROSS_ENTROPY, backward=True)
    before = gradients(model)
    with pytest.raises(InvalidRequestError, match=rf"adam_params.{field}={value}: must be "):
        model.optim_step(AdamParams(**{field: value}))
    assert equal(before, gradients(model))


def test_data_that_cannot_be_leave_the_gradient_as_it_was(base):
    model = make_model(base)
    model.forward_backward(DATA, CROSS_ENTROPY, backward=True)
    before = gradients(model)
    for wrong in (datum([320]), datum([1] * 64), datum([1], weights=[math.inf])):
        with pytest.raises(InvalidRequestError, match=r"data\[5\]"):
            model.forward_backward([*DATA, wrong], CROSS_ENTROPY, backward=True)
    assert equal(before, gradients(model))


def test_a_loss_that_is_not_finite_drops_the_gradient_and_says_so(base):
    model = make_model(base)
    before = weights(model)
    model.forward_backward(DATA, CROSS_ENTROPY, backward=True)
    huge = datum([1, 2], weights=[3e38, 3e38])
    with pytest.raises(InvalidRequestError, match=r"not a finite number .*is dropped, of earlier calls too"):
        model.forward_backward([huge], CROSS_ENTROPY, backward=True)
    assert gradients(model) == {}
    assert equal(before, weights(model))
    with pytest.raises(InvalidRequestError, match="forward: the summed loss is not a finite number"):
        model.forward_backward([huge], CROSS_ENTROPY, backward=False)
    train(model, DATA)
    assert not equal(before, weights(model))


def test_policy_losses_report_sums_that_chunks_can_add_up(base):
    data = random_data(4, seed=6, policy=True)
    metrics = make_model(base).forward_backward(data, LossCall(name="ppo"), backward=True).metrics
    assert set(metrics) == {
        "loss:sum", "num_tokens:sum", "entropy:sum", "num_clipped:sum",
        "logprob_diff:sum", "logprob_diff:max",
    }  # fmt: skip
    assert metrics["num_tokens:sum"] == sum(int((d.loss_inputs["advantages"] != 0).sum()) for d in data)


def test_supervised_training_learns_its_data(base):
    model = make_model(base, 8)
    losses = []
    for _ in range(8):
        losses.append(model.forward_backward(DATA, CROSS_ENTROPY, backward=True).metrics["loss:sum"])
        model.optim_step(AdamParams(learning_rate=1e-2))
    assert losses[-1] < 0.6 * losses[0]
