"""Batch-invariant mode in a real generation engine with little room, beside a real training engine.
Prompts are read in parts of 64 tokens, requests wait for each other, and repeated prompts come from
the prefix cache. Products are in bfloat16, those of the output head in float32.
"""

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from rl.distributed.process_group import World
from rl.models.generate import generate as generate_plainly
from rl.models.layers.rope import LinearScaling
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.types import SamplingParams, TrainingSample
from rl.utils import load
from rl.utils.processes import use_threads
from tests.support.policies import prompts_of, random_model, small_spec
from tests.support.served_engine import serve_engine

pytestmark = pytest.mark.medium

SWITCHES = {"window": 37, "global_layers": (1,), "scaling": LinearScaling(factor=3.0)}
SPEC = replace(
    small_spec(family="gemma3_text", switches=SWITCHES, qkv_bias=True, o_bias=True, ffn_bias=True),
    batch_invariant=True,
    float32_head=True,
)
MODEL = random_model(SPEC, seed=0)
PROMPTS = prompts_of([5, 1, 40, 150, 33, 64])


@pytest.fixture(scope="module")
def generate(tmp_path_factory):
    with serve_engine(
        tmp_path_factory.mktemp("engine"), SPEC, max_num_seqs=64, dtype="bfloat16", num_threads=2
    ) as served:
        served.load(MODEL)
        yield partial(served.generate, max_tokens=20, seed=1)


@pytest.fixture(scope="module")
def trainer():
    training = TrainingConfig(max_tokens_per_microbatch=512, param_dtype="bfloat16")
    config = TrainingEngine.Config(training=training)
    engine = TrainingEngine(
        config=config, model_spec=SPEC, hf_assets_path=None, world=World(), device="cpu"
    )
    engine.policy.model.load_state_dict(MODEL.state_dict())
    return engine


def as_sample(prompt, completion, *, temperature):
    token_ids = np.concatenate([prompt, completion.token_ids])
    is_new = np.arange(len(token_ids)) >= len(prompt)
    logprobs = np.full(len(token_ids), np.nan, dtype=np.float32)
    logprobs[is_new] = completion.logprobs
    return TrainingSample(
        token_ids=token_ids,
        mask=is_new,
        generator_logprobs=logprobs,
        policy_versions=np.zeros(len(token_ids), dtype=np.int32),
        advantages=np.where(np.arange(len(token_ids)) % 2, 1.0, -1.0).astype(np.float32),
        temperature=temperature,
    )


def same(some, others):
    """Return whether tokens and logprobs have equal bits."""
    pairs = [(a, b) for x, y in zip(some, others, strict=True) for a, b in zip(x, y, strict=True)]
    assert pairs
    return all(
        np.array_equal(a.token_ids, b.token_ids) and a.logprobs.tobytes() == b.logprobs.tobytes()
        for a, b in pairs
    )


def test_request_gets_the_same_bits_alone_in_a_batch_in_parts_and_from_the_cache(generate):
    crowd = prompts_of(range(2, 60), seed=3)
    together = generate([*PROMPTS, *crowd])[: len(PROMPTS)]
    # The second time whole blocks of the longer prompts are cached; the first prompts are read in
    # parts.
    alone = [generate([prompt])[0] for prompt in PROMPTS]
    again = [generate([prompt])[0] for prompt in reversed(PROMPTS)][::-1]
    assert same(together, alone)
    assert same(together, again)


def test_number_of_threads_that_changes_between_steps_changes_no_bit(generate, monkeypatch):
    before = generate(PROMPTS)
    counts = []

    def use_and_note(count):
        counts.append(count)
        use_threads(count)

    # Each step ends a window, in which threads have always waited too long.
    always = {"STRETCH_S": 0.0, "WINDOW_S": 1e-9, "MOST_WAITING": -1.0, "LONGEST_PAUSE": 0}
    for name, value in always.items():
        monkeypatch.setattr(load, name, value)
    monkeypatch.setattr(load, "use_threads", use_and_note)
    after = generate(PROMPTS)
    assert {1, 2} <= set(counts)
    assert same(before, after)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_trainer_and_generator_logprobs_have_equal_bits_however_packed(
    generate, trainer, temperature
):
    completions = generate(PROMPTS, num_samples=4, temperature=temperature)
    samples = [
        as_sample(prompt, completion, temperature=temperature)
        for prompt, of_prompt in zip(PROMPTS, completions, strict=True)
        for completion in of_prompt
    ]
    result = trainer.forward_backward(samples)
    assert (result.logprobs_identical, result.logprob_diff_max) == (True, 0.0)
    packed = trainer.compute_logprobs(samples)
    backwards = trainer.compute_logprobs(samples[::-1])[::-1]
    alone = [trainer.compute_logprobs([sample])[0] for sample in samples]
    for sample, *ways in zip(samples, packed, backwards, alone, strict=True):
        for logprobs in ways:
            assert (
                logprobs[sample.mask].tobytes() == sample.generator_logprobs[sample.mask].tobytes()
            )
        assert ways[0].tobytes() == ways[1].tobytes() == ways[2].tobytes()


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"temperature": 0.0}], ids=str)
def test_plain_sampler_gives_the_tokens_and_bits_of_the_engine(generate, trainer, settings):
    sampling = SamplingParams(max_tokens=20, num_samples=2, seed=1, **settings)
    model = copy.deepcopy(trainer.policy.model)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    ours = generate_plainly(model, PROMPTS, sampling=sampling)
    assert same(generate(PROMPTS, num_samples=2, **settings), ours)
