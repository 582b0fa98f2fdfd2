import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.multiprocessing.spawn import spawn
from torch.utils._python_dispatch import TorchDispatchMode

from rl.distributed.gloo import use_one_worker
from rl.models.logprobs import token_logprobs

# T tokens, E width, V vocabulary.
T, E, V = 12, 5, 9


def inputs(*, requires_grad=True):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, E, generator=generator).requires_grad_(requires_grad)
    weight = torch.randn(V, E, generator=generator).requires_grad_(requires_grad)
    targets = torch.randint(0, V, (T,), generator=generator)
    temperatures = 0.5 + torch.rand(T, generator=generator)
    return hidden, weight, {"targets_T": targets, "temperatures_T": temperatures}


def test_logprobs_and_entropy_of_a_distribution_known_by_hand():
    # Logits 0, ln 2 and ln 5 at temperature 1: probabilities 1/8, 2/8 and 5/8.
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(5)]])
    logprobs, entropy = token_logprobs(
        torch.ones(2, 1), weight, targets_T=torch.tensor([1, 2]), temperatures_T=torch.tensor([1.0, 0.5])
    )
    # At temperature 0.5 they are squared: 1/30, 4/30 and 25/30.
    expected = [math.log(2 / 8), math.log(25 / 30)]
    torch.testing.assert_close(logprobs, torch.tensor(expected))
    entropies = [
        -sum(p * math.log(p) for p in row) for row in ((1 / 8, 2 / 8, 5 / 8), (1 / 30, 4 / 30, 25 / 30))
    ]
    torch.testing.assert_close(entropy, torch.tensor(entropies))


def test_gradient_is_that_of_cross_entropy():
    hidden, weight, given = inputs()
    logprobs, entropy = token_logprobs(hidden, weight, **given)
    gradients = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    logits = hidden @ weight.T / given["temperatures_T"][:, None]
    loss = F.cross_entropy(logits, given["targets_T"], reduction="sum")
    for ours, theirs in zip(gradients, torch.autograd.grad(-loss, (hidden, weight)), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not entropy.requires_grad


@pytest.mark.parametrize("chunk_tokens", [1, 5, 12, 100])
def test_chunks_change_neither_values_nor_gradients(chunk_tokens):
    hidden, weight, given = inputs()
    expected = token_logprobs(hidden, weight, **given)
    expected_gradients = torch.autograd.grad(expected[0].square().sum(), (hidden, weight))
    chunked = token_logprobs(hidden, weight, **given, chunk_tokens=chunk_tokens)
    gradients = torch.autograd.grad(chunked[0].square().sum(), (hidden, weight))
    for ours, theirs in zip((*chunked, *gradients), (*expected, *expected_gradients), strict=True):
        torch.testing.assert_close(ours, theirs)


def entropy_of(hidden, weight, given):
    """By autograd, of whole logits."""
    logprobs = (hidden @ weight.T / given["temperatures_T"][:, None]).log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def of_both(values):
    """Something whose gradient each logprob and each entropy has a part of its own in."""
    logprobs, entropy = values
    return (logprobs * torch.arange(T)).sum() + (entropy * (1 - torch.arange(T))).sum()


@pytest.mark.parametrize("chunk_tokens", [None, 1, 5, 100])
def test_entropy_has_its_gradient_on_request(chunk_tokens):
    hidden, weight, given = inputs()
    values = token_logprobs(hidden, weight, **given, chunk_tokens=chunk_tokens, entropy_gradient=True)
    plain = token_logprobs(hidden, weight, **given, chunk_tokens=chunk_tokens)
    assert all(torch.equal(a, b) for a, b in zip(values, plain, strict=True))
    assert not plain[1].requires_grad
    expected = entropy_of(hidden, weight, given)
    torch.testing.assert_close(values[1], expected)
    of_entropy = torch.autograd.grad(values[1].square().sum(), (hidden, weight), retain_graph=True)
    by_autograd = torch.autograd.grad(expected.square().sum(), (hidden, weight), retain_graph=True)
    for ours, theirs in zip(of_entropy, by_autograd, strict=True):
        torch.testing.assert_close(ours, theirs)
    together = torch.autograd.grad(of_both(values), (hidden, weight))
    for ours, theirs in zip(
        together, torch.autograd.grad(of_both((plain[0], expected)), (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_entropy_of_a_distribution_that_is_nearly_certain_has_a_finite_gradient():
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.tensor([[500.0], [0.0]])
    _, entropy = token_logprobs(
        hidden, weight, targets_T=torch.tensor([0]), temperatures_T=torch.ones(1), entropy_gradient=True
    )
    (gradient,) = torch.autograd.grad(entropy.sum(), hidden)
    assert (entropy.item(), gradient.item()) == (0.0, 0.0)


def test_bfloat16_logits_are_normalised_in_float32():
    hidden, weight, given = inputs(requires_grad=False)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    logprobs, entropy = token_logprobs(hidden, weight, **given)
    assert logprobs.dtype == entropy.dtype == torch.float32
    logits = F.linear(hidden, weight).float() / given["temperatures_T"][:, None]
    expected = logits.log_softmax(-1)[range(T), given["targets_T"]]
    assert torch.equal(logprobs, expected)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize(("chunk_tokens", "bound"), [(None, 60 * 50), (10, 10 * 50)])
def test_with_chunks_logits_of_all_tokens_never_exist_at_once(chunk_tokens, bound):
    hidden = torch.randn(60, 4, requires_grad=True)
    weight = torch.randn(50, 4, requires_grad=True)
    with LargestTensor() as seen:
        logprobs, _ = token_logprobs(
            hidden, weight, targets_T=torch.zeros(60, dtype=torch.int64), temperatures_T=torch.ones(60),
            chunk_tokens=chunk_tokens,
        )  # fmt: skip
        logprobs.sum().backward()
    assert seen.largest == bound


class PeakBytes(TorchDispatchMode):
    """Most bytes that results of operations held at once."""

    def __init__(self):
        super().__init__()
        self.live = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self.live.values()))
        return out


def peak_bytes(num_tokens, **settings):
    hidden = torch.randn(num_tokens, 4, requires_grad=True)
    weight = torch.randn(2000, 4, requires_grad=True)
    targets, temperatures = torch.zeros(num_tokens, dtype=torch.int64), torch.ones(num_tokens)
    with PeakBytes() as seen:
        logprobs, _ = token_logprobs(
            hidden, weight, targets_T=targets, temperatures_T=temperatures, **settings
        )
        logprobs.sum().backward()
    return seen.peak


def test_with_chunks_peak_memory_does_not_grow_with_tokens_times_vocabulary():
    chunk_of_logits = 32 * 2000 * 4
    peak = peak_bytes(64, chunk_tokens=32)
    assert chunk_of_logits < peak < 6 * chunk_of_logits
    assert peak_bytes(1024, chunk_tokens=32) - peak < chunk_of_logits / 2
    assert peak_bytes(1024) > 1024 * 2000 * 4


def several_targets(given, k):
    """The same inputs with K targets a token, of which the first two are the same."""
    targets_TK = torch.randint(0, V, (T, k), generator=torch.Generator().manual_seed(k))
    targets_TK[:, 1] = targets_TK[:, 0]
    return given | {"targets_T": targets_TK}


def plain_columns(hidden, weight, given):
    logprobs_TV = (hidden @ weight.T / given["temperatures_T"][:, None]).log_softmax(-1)
    return logprobs_TV.gather(1, given["targets_T"])


def of_several(values):
    """Something in which each logprob and each entropy has a part of its own."""
    logprobs_TK, entropy_T = values
    weights_TK = torch.linspace(-0.3, 1.0, logprobs_TK.numel()).view(logprobs_TK.shape)
    return (logprobs_TK * weights_TK).sum() + (entropy_T * torch.linspace(1.0, -2.0, T)).sum()


@pytest.mark.parametrize("chunk_tokens", [None, 5])
def test_several_targets_of_a_token_are_columns_of_one_distribution(chunk_tokens):
    hidden, weight, given = inputs()
    given = several_targets(given, 4)
    values = token_logprobs(hidden, weight, **given, chunk_tokens=chunk_tokens, entropy_gradient=True)
    expected = (plain_columns(hidden, weight, given), entropy_of(hidden, weight, given))
    assert values[0].shape == (T, 4)
    gradients = torch.autograd.grad(of_several(values), (hidden, weight))
    by_autograd = torch.autograd.grad(of_several(expected), (hidden, weight))
    for ours, theirs in zip((*values, *gradients), (*expected, *by_autograd), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_chunk_of_no_tokens_is_refused():
    hidden, weight, given = inputs()
    with pytest.raises(ValueError, match="chunk_tokens=0: must be at least 1"):
        token_logprobs(hidden, weight, **given, chunk_tokens=0)


def sharded_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    use_one_worker()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    hidden, weight, given = inputs()
    expected = token_logprobs(hidden, weight, **given)
    expected_gradients = torch.autograd.grad(
        (expected[0] * torch.arange(T)).sum(), (hidden, weight), retain_graph=True
    )
    both = (expected[0], entropy_of(hidden, weight, given))
    expected_of_both = torch.autograd.grad(of_both(both), (hidden, weight))
    placements = {"tokens": Shard(0), "replicated": Replicate(), "plain": None}
    cases = itertools.product(placements.items(), (Shard(0), Replicate()), (None, 5), (True, False))
    for (name, placement), weight_placement, chunk_tokens, loss_parallel in cases:
        ours = hidden.detach().clone().requires_grad_()
        if placement is not None:
            ours = distribute_tensor(ours.detach(), mesh, [placement]).requires_grad_()
        rows = distribute_tensor(weight.detach(), mesh, [weight_placement]).requires_grad_()
        settings: dict[str, Any] = {"chunk_tokens": chunk_tokens, "loss_parallel": loss_parallel}
        with LargestTensor() as seen:
            values = token_logprobs(ours, rows, **given, **settings)
            gradients = torch.autograd.grad((values[0] * torch.arange(T)).sum(), (ours, rows))
        whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
        case = f"hidden {name}, weight {weight_placement}, {settings}"
        for a, b in zip((*values, *whole), (*expected, *expected_gradients), strict=True):
            torch.testing.assert_close(a, b, msg=case)
        assert not values[1].requires_grad
        values = token_logprobs(ours, rows, **given, **settings, entropy_gradient=True)
        gradients = torch.autograd.grad(of_both(values), (ours, rows))
        whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
        for a, b in zip((*values, *whole), (*expected, *expected_of_both), strict=True):
            torch.testing.assert_close(a, b, msg=f"with entropy: {case}")
        columns = several_targets(given, 3)
        for entropy_gradient in (False, True):
            values = token_logprobs(ours, rows, **columns, **settings, entropy_gradient=entropy_gradient)
            entropies = entropy_of(hidden, weight, given)
            plain = (
                plain_columns(hidden, weight, columns),
                entropies if entropy_gradient else entropies.detach(),
            )
            expected_of_several = torch.autograd.grad(of_several(plain), (hidden, weight))
            gradients = torch.autograd.grad(of_several(values), (ours, rows))
            whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
            assert values[1].requires_grad == entropy_gradient
            for a, b in zip((*values, *whole), (*plain, *expected_of_several), strict=True):
                torch.testing.assert_close(a, b, msg=f"three targets: {case}")
        if chunk_tokens is None:
            # Of a token 9 logits; split they are 5 on a rank, and gathered 10, of which one is padding.
            is_split = weight_placement == Shard(0)
            assert seen.largest == T * ((5 if loss_parallel else 10) if is_split else 9), case
    dist.destroy_process_group()


@pytest.mark.medium
def test_sharded_equals_whole_in_values_and_gradients(tmp_path):
    spawn(sharded_rank, args=(str(tmp_path),), nprocs=2)
