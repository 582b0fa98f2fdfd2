import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rl.distributed.compat import use_one_gloo_worker
from rl.models.logprobs import compute_token_logprobs
from tests.support.distributed import run_ranks

# T tokens, E width, V vocabulary.
T, E, V = 12, 5, 9


def fresh_inputs(*, requires_grad=True):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, E, generator=generator).requires_grad_(requires_grad)
    weight = torch.randn(V, E, generator=generator).requires_grad_(requires_grad)
    targets = torch.randint(0, V, (T,), generator=generator)
    temperatures = 0.5 + torch.rand(T, generator=generator)
    return hidden, weight, {"targets_T": targets, "temperatures_T": temperatures}


def test_logprobs_and_entropy_of_a_distribution_known_by_hand():
    # Logits 0, ln 2 and ln 5 at temperature 1: probabilities 1/8, 2/8 and 5/8.
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(5)]])
    logprobs, entropy = compute_token_logprobs(
        torch.ones(2, 1),
        weight,
        targets_T=torch.tensor([1, 2]),
        temperatures_T=torch.tensor([1.0, 0.5]),
    )
    # At temperature 0.5 they are squared: 1/30, 4/30 and 25/30.
    expected = [math.log(2 / 8), math.log(25 / 30)]
    torch.testing.assert_close(logprobs, torch.tensor(expected))
    entropies = [
        -sum(p * math.log(p) for p in row)
        for row in ((1 / 8, 2 / 8, 5 / 8), (1 / 30, 4 / 30, 25 / 30))
    ]
    torch.testing.assert_close(entropy, torch.tensor(entropies))


def by_autograd(hidden, weight, given):
    """Compute logprobs and entropy from whole logits, [T] or [T, K] and [T]."""
    logprobs_TV = (hidden @ weight.T / given["temperatures_T"][:, None]).log_softmax(-1)
    targets = given["targets_T"].view(T, -1)
    logprobs = logprobs_TV.gather(1, targets).view(given["targets_T"].shape)
    return logprobs, -(logprobs_TV.exp() * logprobs_TV).sum(-1)


def with_targets(given, num_targets):
    """Return the inputs with K targets a token, the first two equal, or unchanged for one
    target.
    """
    if num_targets == 1:
        return given
    targets_TK = torch.randint(0, V, (T, num_targets), generator=torch.Generator().manual_seed(1))
    targets_TK[:, 1] = targets_TK[:, 0]
    return given | {"targets_T": targets_TK}


def gradients_of(values, inputs):
    """Return the gradients of a sum in which each logprob and each entropy has its own weight."""
    logprobs, entropy = values
    total = (logprobs * torch.linspace(-0.3, 1.0, logprobs.numel()).view(logprobs.shape)).sum()
    if entropy.requires_grad:
        total = total + (entropy * torch.linspace(1.0, -2.0, T)).sum()
    gradients = torch.autograd.grad(total, inputs)
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]


def assert_equals_autograd(values, gradients, *, given, entropy_gradient, msg=None):
    hidden, weight, _ = fresh_inputs()
    expected = by_autograd(hidden, weight, given)
    if not entropy_gradient:
        expected = (expected[0], expected[1].detach())
    assert values[1].requires_grad == entropy_gradient
    for a, b in zip(
        (*values, *gradients), (*expected, *gradients_of(expected, (hidden, weight))), strict=True
    ):
        torch.testing.assert_close(a, b, msg=msg)


@pytest.mark.parametrize("num_targets", [1, 4])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("chunk_tokens", [None, 5, 12])
def test_values_and_gradients_equal_autograd_on_whole_logits(
    chunk_tokens, entropy_gradient, num_targets
):
    hidden, weight, given = fresh_inputs()
    given = with_targets(given, num_targets)
    settings = {"chunk_tokens": chunk_tokens, "entropy_gradient": entropy_gradient}
    values = compute_token_logprobs(hidden, weight, **given, **settings)
    assert values[0].shape == given["targets_T"].shape
    assert (
        values[0]._base is values[1]._base is None
    )  # FSDP2 loses its hooks on outputs that are views.
    gradients = gradients_of(values, (hidden, weight))
    assert_equals_autograd(values, gradients, given=given, entropy_gradient=entropy_gradient)


@pytest.mark.parametrize("chunk_tokens", [None, 2])
def test_tokens_that_are_not_needed_have_zeros_and_no_gradient(chunk_tokens):
    hidden, weight, given = fresh_inputs()
    rows = torch.tensor([1, 4, 5, 9])
    values = compute_token_logprobs(hidden, weight, **given, rows_R=rows, chunk_tokens=chunk_tokens)
    is_needed = torch.zeros(T).index_fill(0, rows, 1.0)
    expected = [value * is_needed for value in by_autograd(hidden, weight, given)]
    gradients = gradients_of(values, (hidden, weight))
    expected_gradients = gradients_of((expected[0], expected[1].detach()), (hidden, weight))
    for a, b in zip((*values, *gradients), (*expected, *expected_gradients), strict=True):
        torch.testing.assert_close(a, b)


def test_gradient_of_a_nearly_certain_target_in_bfloat16_is_not_rounded_with_its_probability():
    hidden = torch.ones(1, 1, dtype=torch.bfloat16)
    weight = torch.tensor([[8.0], [0.0]], dtype=torch.bfloat16, requires_grad=True)
    logprobs, _ = compute_token_logprobs(
        hidden, weight, targets_T=torch.tensor([0]), temperatures_T=torch.ones(1)
    )
    (gradient,) = torch.autograd.grad(logprobs.sum(), weight)
    other = 1 / (1 + math.exp(8))
    torch.testing.assert_close(
        gradient.float(), torch.tensor([[other], [-other]]), rtol=0.01, atol=0
    )


def test_entropy_of_a_nearly_certain_distribution_has_a_finite_gradient():
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.tensor([[500.0], [0.0]])
    _, entropy = compute_token_logprobs(
        hidden,
        weight,
        targets_T=torch.tensor([0]),
        temperatures_T=torch.ones(1),
        entropy_gradient=True,
    )
    (gradient,) = torch.autograd.grad(entropy.sum(), hidden)
    assert (entropy.item(), gradient.item()) == (0.0, 0.0)


def saved_bytes(num_tokens, **settings):
    """Return the bytes that wait for the backward."""
    hidden = torch.randn(num_tokens, 4, requires_grad=True)
    weight = torch.randn(2000, 4, requires_grad=True)
    targets, temperatures = torch.zeros(num_tokens, dtype=torch.int64), torch.ones(num_tokens)
    saved = []

    def pack(tensor):
        saved.append(tensor.nbytes)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        compute_token_logprobs(
            hidden, weight, targets_T=targets, temperatures_T=temperatures, **settings
        )
    return sum(saved)


def test_with_chunks_no_logits_wait_for_the_backward():
    assert saved_bytes(64) > 64 * 2000 * 4
    assert saved_bytes(64, chunk_tokens=32) < 32 * 2000 * 4


def compare_sharded() -> None:
    use_one_gloo_worker()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    placements = {"tokens": Shard(0), "replicated": Replicate(), "plain": None}
    options = (None, False, 1), (None, True, 3), (5, True, 1)
    for (name, placement), weight_placement, loss_parallel, option in itertools.product(
        placements.items(), (Shard(0), Replicate()), (True, False), options
    ):
        chunk_tokens, entropy_gradient, targets = option
        hidden, weight, given = fresh_inputs(requires_grad=False)
        given = with_targets(given, targets)
        if placement is not None:
            hidden = distribute_tensor(hidden, mesh, [placement])
        weight = distribute_tensor(weight, mesh, [weight_placement])
        hidden.requires_grad_()
        weight.requires_grad_()
        settings: dict[str, Any] = {"chunk_tokens": chunk_tokens, "loss_parallel": loss_parallel}
        case = f"hidden {name}, weight {weight_placement}, {targets} targets, {settings}"
        values = compute_token_logprobs(
            hidden, weight, **given, **settings, entropy_gradient=entropy_gradient
        )
        gradients = gradients_of(values, (hidden, weight))
        assert_equals_autograd(
            values, gradients, given=given, entropy_gradient=entropy_gradient, msg=case
        )
    dist.destroy_process_group()


@pytest.mark.medium
def test_sharded_equals_whole_in_values_and_gradients():
    run_ranks(compare_sharded, 2, timeout_s=60)
