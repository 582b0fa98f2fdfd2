"""The trainer in the batch-invariant mode: refused settings, and equal bits in all layouts."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.models.batch_invariant.model import make_batch_invariant, pad_rows
from rl.models.generate import prompt_logprobs
from rl.models.layers.attention import SequenceLayout
from rl.models.parallelize import gather_logits, parallelize_decoder_generator
from rl.training.checks import check_trainer_rules
from rl.training.engine import TrainingEngine
from rl.types import TrainingSample
from rl.utils.processes import use_threads
from tests.support.distributed import run_ranks
from tests.test_architecture import ROOT, import_with_blocked
from tests.training.layouts import join, parallelism
from tests.training.parts import engine_config, make_engine, make_samples, windowed_spec

RANKS_TIMEOUT_S = 120
REDUCTIONS = [
    f"allow_{dtype}_reduced_precision_reduction{split}"
    for dtype in ("bf16", "fp16")
    for split in ("", "_split_k")
]
SPEC = replace(windowed_spec(), batch_invariant=True)


def engine(assets: str, layout: str, **settings: Any) -> TrainingEngine:
    own_vocabulary = replace(parallelism(layout), loss_parallel=False)
    return make_engine(assets, spec=SPEC, parallelism=own_vocabulary, **settings)


def trained_logprobs(assets: str, layouts: list[str]) -> dict[str, list[np.ndarray]]:
    """Return the initial weights' logprobs of all samples by layout."""
    join(layouts[0])
    return {layout: engine(assets, layout).compute_logprobs(make_samples()) for layout in layouts}


def both_sides_of_tensor_parallelism(assets: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the trainer's logprobs, and those under the generator's plan with the same weights."""
    samples = make_samples()
    made = engine(assets, "tp2")
    whole = {name: p.full_tensor() for name, p in made.policy.parameters.items()}  # type: ignore[attr-defined]
    model = SPEC.model.build()
    model.load_state_dict(whole)
    make_batch_invariant(model, spec=SPEC, device=torch.device("cpu"))
    parallelize_decoder_generator(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    theirs = [generated_logprobs(model, sample) for sample in samples]
    ours = made.compute_logprobs(samples)
    made.close()
    return ours, theirs


@torch.no_grad()
def generated_logprobs(model: torch.nn.Module, sample: TrainingSample) -> np.ndarray:
    """Return the logprobs of one sample, computed alone by the generator's model and sampler."""
    ids = torch.from_numpy(sample.token_ids[:-1].astype(np.int64))
    padded = pad_rows(ids)
    lengths = [len(ids), *([len(padded) - len(ids)] if len(padded) > len(ids) else [])]
    logits = model(
        padded,
        positions=pad_rows(torch.arange(len(ids))),
        sequences=SequenceLayout.from_lengths(lengths),
        head=gather_logits,
    )[: len(ids)]
    logprobs = (logits.float() / torch.full((len(ids), 1), sample.temperature)).log_softmax(-1)
    targets = torch.from_numpy(sample.token_ids[1:].astype(np.int64))
    return F.pad(logprobs.gather(1, targets.unsqueeze(1)).squeeze(1), (1, 0)).numpy()


def test_gradients_have_the_same_bits_on_one_thread_and_on_two():
    made = make_engine(None, spec=SPEC)
    before = torch.get_num_threads()
    gradients = []
    for count in (1, 2, 1):
        use_threads(count)
        try:
            made.forward_backward(make_samples())
        finally:
            use_threads(before)
        grads = [parameter.grad for parameter in made.policy.parameters.values()]
        gradients.append([grad.clone() for grad in grads if grad is not None])
        made.drop_gradient()
    assert len(gradients[0]) > 10
    for one, two, again in zip(*gradients, strict=True):
        assert one.any()
        assert torch.equal(one, two)
        assert torch.equal(one, again)


def test_products_on_a_gpu_neither_split_their_sums_nor_reduce_in_half_precision(monkeypatch):
    matmul = torch.backends.cuda.matmul
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(
        torch.backends.cuda, "preferred_blas_library", lambda name: None
    )  # needs CUDA
    try:
        make_batch_invariant(torch.nn.Module(), spec=SPEC, device=torch.device("cuda"))
        assert {name: getattr(matmul, name) for name in REDUCTIONS} == dict.fromkeys(
            REDUCTIONS, False
        )
    finally:
        matmul.allow_bf16_reduced_precision_reduction = (
            matmul.allow_fp16_reduced_precision_reduction
        ) = True


@pytest.fixture(scope="module")
def one_device(windowed_assets):
    """Return each sample's logprobs when it is computed alone."""
    made = engine(windowed_assets, "one")
    return [made.compute_logprobs([sample])[0] for sample in make_samples()]


def same_bits(some, others):
    return [a.tobytes() for a in some] == [b.tobytes() for b in others]


def test_settings_that_change_bits_are_refused_only_in_the_mode():
    config = engine_config()
    config.parallelism.tensor_parallel_degree = 4
    with pytest.raises(ValueError, match="degree=4: must be at most 2 with batch_invariant=True"):
        check_trainer_rules(config, batch_invariant=True)
    check_trainer_rules(config, batch_invariant=False)


@pytest.mark.medium
def test_engine_needs_no_numba_without_the_mode():
    assert (
        import_with_blocked(
            ROOT, ["rl.training.engine", "rl.models.generate"], ("numba", "llvmlite")
        )
        == ""
    )


@pytest.mark.medium
def test_logprobs_have_the_same_bits_in_every_micro_batch(windowed_assets, one_device):
    samples = make_samples()
    made = engine(windowed_assets, "one")
    assert same_bits(made.compute_logprobs(samples), one_device)
    assert same_bits(made.compute_logprobs(samples[::-1])[::-1], one_device)
    other = engine(windowed_assets, "one", logits_chunk_tokens=32, max_tokens_per_microbatch=200)
    assert same_bits(other.compute_logprobs(samples), one_device)
    assert not same_bits(
        make_engine(windowed_assets, spec=windowed_spec()).compute_logprobs(samples), one_device
    )


@pytest.mark.medium
def test_recomputed_activations_give_the_same_gradients(windowed_assets):
    gradients = []
    modes: tuple[Literal["none", "full"], ...] = ("none", "full")
    for mode in modes:
        made = engine(
            windowed_assets, "one", activation_checkpoint=ActivationCheckpointConfig(mode=mode)
        )
        made.forward_backward(make_samples())
        gradients.append(
            [p.grad.numpy() for p in made.policy.parameters.values() if p.grad is not None]
        )
    assert len(gradients[0]) == len(made.policy.parameters)
    assert same_bits(*gradients)


@pytest.mark.medium
def test_data_and_context_parallel_ranks_have_the_bits_of_one_device(windowed_assets, one_device):
    layouts = ["fsdp2", "ddp2", "cp2", "cp2_alltoall"]
    for rank in run_ranks(trained_logprobs, 2, windowed_assets, layouts, timeout_s=RANKS_TIMEOUT_S):
        for layout, logprobs in rank.items():
            assert same_bits(logprobs, one_device), layout


@pytest.mark.medium
def test_trainer_and_generator_have_the_same_bits_on_two_tensor_parallel_ranks(
    windowed_assets, one_device
):
    ranks = run_ranks(
        both_sides_of_tensor_parallelism, 2, windowed_assets, timeout_s=RANKS_TIMEOUT_S
    )
    for ours, theirs in ranks:
        assert same_bits(ours, theirs)
        # A sum of two parts rounds differently from the whole sum.
        assert not same_bits(ours, one_device)
        for some, whole in zip(ours, one_device, strict=True):
            np.testing.assert_allclose(some, whole, atol=1e-4)


@pytest.mark.medium
def test_prompt_logprobs_have_the_trainers_bits(windowed_assets):
    made = engine(windowed_assets, "one", param_dtype="bfloat16")
    model = SPEC.model.build()
    model.load_state_dict(made.policy.model.state_dict())
    model = model.to(torch.bfloat16)
    make_batch_invariant(model, spec=SPEC, device=torch.device("cpu"))
    samples = [replace(sample, temperature=1.0) for sample in make_samples()]
    trained = [logprobs[1:] for logprobs in made.compute_logprobs(samples)]
    prompts = [sample.token_ids for sample in samples]
    answers = [prompt_logprobs(model, prompt, top_k=3) for prompt in prompts]
    assert same_bits([answer.logprobs[1:] for answer in answers], trained)
