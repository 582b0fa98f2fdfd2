"""Logprobs of each rank of a layout in the batch-invariant mode, for `test_batch_invariant.py`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from rl.distributed.activation_checkpoint import ActivationCheckpointConfig
from rl.models.attention import SequenceLayout
from rl.models.batch_invariant.model import make_batch_invariant, pad_rows
from rl.models.parallelize_generator import generator_head, parallelize_decoder_generator
from rl.training.engine import TrainingEngine
from rl.types import TrainingSample
from tests.training.layouts import join, parallelism
from tests.training.parts import engine_config, make_samples, small_spec

SPEC = replace(small_spec(), batch_invariant=True)


def engine(assets: str, layout: str, *, checkpointed: bool = False) -> TrainingEngine:
    config = engine_config(parallelism=replace(parallelism(layout), loss_parallel=False))
    if checkpointed:
        config.activation_checkpoint = ActivationCheckpointConfig(mode="full")
    return config.build(model_spec=SPEC, hf_assets_path=assets, device="cpu")


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
        head=generator_head,
    )[: len(ids)]
    logprobs = (logits.float() / torch.full((len(ids), 1), sample.temperature)).log_softmax(-1)
    targets = torch.from_numpy(sample.token_ids[1:].astype(np.int64))
    return F.pad(logprobs.gather(1, targets.unsqueeze(1)).squeeze(1), (1, 0)).numpy()
