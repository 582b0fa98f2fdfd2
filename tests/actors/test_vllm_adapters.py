"""Adapters beside the weights of a real engine in the batch-invariant mode, and trained by a real
training engine. Prompts are read in parts of 64 tokens, and requests wait for each other.
"""

import asyncio
import dataclasses
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch

from actors.cluster.parity import LogprobParityError, ParityText
from actors.vllm.adapters import AdapterRoomError, MissingAdapterError
from rl.distributed.process_group import World
from rl.models.lora import LoRA
from rl.models.low_rank.bank import AdapterBank
from rl.training.config import TrainingConfig
from rl.training.engine import TrainingEngine
from rl.types import SamplingParams
from rl.weights.types import WeightMismatchError
from tests.actors.test_vllm_batch_invariant import as_sample, same
from tests.support.policies import prompts_of, random_model, small_spec, writer
from tests.support.served_engine import serve_engine, write_factors

pytestmark = pytest.mark.medium

SPEC = replace(small_spec(tie=False), batch_invariant=True, float32_head=True)
MODEL = random_model(SPEC, seed=0)
PROMPTS = prompts_of([5, 1, 40, 150, 33, 64])
LORAS = {
    101: LoRA.Config(rank=1, alpha=2.0),
    102: LoRA.Config(rank=8, target_modules=("q_proj", "v_proj", "down_proj")),
    103: LoRA.Config(rank=16, alpha=4.0, unembedding=True),
    104: LoRA.Config(rank=64, target_modules=(), unembedding=True),
}
BASE_ID = 12345


def make_trainer(lora, *, seed, dtype="bfloat16"):
    """A trainer with this adapter, whose B is not zero."""
    training = TrainingConfig(max_tokens_per_microbatch=512, param_dtype=dtype)
    engine = TrainingEngine(
        config=TrainingEngine.Config(training=training, converters=(lora,)),
        model_spec=SPEC,
        hf_assets_path=None,
        world=World(),
        device="cpu",
    )
    engine.policy.model.load_state_dict(MODEL.state_dict(), strict=False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for factor in engine.policy.adapter_state_dict().values():
            factor.copy_(0.2 * torch.randn(factor.shape, generator=generator))
    return engine


TRAINERS = {version: make_trainer(lora, seed=version) for version, lora in LORAS.items()}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serve_engine(
        tmp_path_factory.mktemp("engine"), SPEC, max_num_seqs=64, dtype="bfloat16", num_threads=2
    ) as served:
        served.run(served.engine.update_weights(writer(MODEL), version=-1, base_id=BASE_ID))
        for version, trainer in TRAINERS.items():
            served.run(load(served.engine, version, trainer, is_newest=False))
        yield served


def load(engine, version, trainer, **options):
    return engine.load_adapter(
        write_factors(trainer),
        version=version,
        lora=trainer.policy.lora.config,
        **{"base_id": BASE_ID} | options,
    )


def sample(served, versions, **settings):
    """Completions of all prompts by each of these adapters, drawn at the same time."""
    sampling = SamplingParams(**{"max_tokens": 20, "seed": 1, "num_samples": 2} | settings)

    async def draw():
        calls = [
            served.engine.generate(PROMPTS, sampling=sampling, adapter=version)
            for version in versions
        ]
        return await asyncio.gather(*calls)

    return served.run(draw())


def test_adapters_in_one_batch_give_each_request_the_bits_that_it_has_alone(served):
    together = sample(served, [None, *LORAS, None])
    for version, completions in zip([None, *LORAS, None], together, strict=True):
        assert same(completions, *sample(served, [version])), version
    assert same(together[0], together[-1])
    texts = {completions[3][0].token_ids.tobytes() for completions in together}
    assert len(texts) == len(LORAS) + 1, "every adapter writes something else"


def test_equal_prompts_of_several_adapters_that_begin_in_one_step_stay_apart(served):
    """Rows that are equal are computed once, unless their adapters differ."""
    prompts, sampling = prompts_of([5]), SamplingParams(max_tokens=4, seed=1)

    async def draw(versions):
        calls = [
            served.engine.generate(prompts, sampling=sampling, adapter=version)
            for version in versions
        ]
        return await asyncio.gather(*calls)

    versions = [None, *LORAS]
    together = served.run(draw(versions))
    for version, completions in zip(versions, together, strict=True):
        assert same(completions, *served.run(draw([version]))), version


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_trainer_computes_the_logprobs_that_were_sampled_with(served, temperature):
    together = sample(served, LORAS, temperature=temperature)
    for (version, trainer), completions in zip(TRAINERS.items(), together, strict=True):
        samples = [
            as_sample(prompt, completion, temperature=temperature)
            for prompt, of_prompt in zip(PROMPTS, completions, strict=True)
            for completion in of_prompt
        ]
        for given, logprobs in zip(samples, trainer.compute_logprobs(samples), strict=True):
            expected = given.generator_logprobs[given.mask]
            assert np.array_equal(logprobs[given.mask], expected), version
        [scored] = served.run(
            served.engine.compute_logprobs([samples[0].token_ids], adapter=version)
        )
        plain = dataclasses.replace(samples[0], temperature=1.0)
        assert np.array_equal(scored, trainer.compute_logprobs([plain])[0]), version


def test_requests_that_run_keep_their_adapter_and_new_ones_get_the_newest(served):
    engine = served.engine
    old, new = TRAINERS[101], TRAINERS[103]
    sampling = SamplingParams(max_tokens=60, seed=2)

    async def switch():
        await load(engine, 7, old)
        running = asyncio.create_task(engine.generate(PROMPTS[:2], sampling=sampling))
        while not engine._core.has_requests:
            await asyncio.sleep(0.001)
        await load(engine, 8, new)
        later = await engine.generate(PROMPTS[:2], sampling=sampling)
        return await running, later

    running, later = served.run(switch())
    for completions, version, same_as in ((running, 7, 101), (later, 8, 103)):
        for [completion] in completions:
            assert set(completion.policy_versions.tolist()) == {version}
        expected = served.run(engine.generate(PROMPTS[:2], sampling=sampling, adapter=same_as))
        assert same(completions, expected)
    # Nobody follows adapter 7 any more.
    assert 7 not in engine._core.adapters.versions
    engine.give_up_adapters([8])
    served.run(engine.generate(PROMPTS[:1], sampling=sampling))
    assert 8 not in engine._core.adapters.versions


PARITY = ParityText(token_ids=np.concatenate(PROMPTS[2:4]), max_diff=0.0)


def check_parity(served, version, trainer):
    """The check that a run makes after every pull."""
    [logprobs] = served.run(served.engine.compute_logprobs([PARITY.token_ids], adapter=version))
    return PARITY.check(
        policy_version=version,
        expected_T=trainer.compute_logprobs([PARITY.sample])[0],
        of_generators={"generator_0": logprobs},
    )


def scale_twice(bank, version, factors):
    bank._scales[bank.versions[version].slot] *= next(iter(factors.values())).layer.scale


def transpose(bank, version, factors):
    """Keep a square B of one layer by columns in place of rows."""
    packed = bank.versions[version].layers["layers.0.attention.qkv_proj"]
    rank = packed.b.size(0)
    packed.b[:, :rank] = packed.b[:, :rank].t().clone()


def use_another_slot(bank, version, factors):
    own, other = bank.versions[version].slot, bank.versions[101].slot
    for table in bank._tables.values():
        table[own] = table[other]


def leave_out(bank, version, factors):
    for table in bank._tables.values():
        table[bank.versions[version].slot] = 0


def round_scale(bank, version, factors):
    bank._scales[bank.versions[version].slot] *= 1.001


@pytest.mark.parametrize(
    "fault",
    [leave_out, scale_twice, transpose, use_another_slot, round_scale],
    ids=lambda f: f.__name__,
)
def test_adapter_that_is_not_computed_with_is_found_by_the_parity_of_logprobs(
    served, monkeypatch, fault
):
    trainer = TRAINERS[103]
    served.run(load(served.engine, 50, trainer, is_newest=False))
    assert check_parity(served, 50, trainer) == 0.0

    load_right = AdapterBank.load

    def load_wrong(bank, version, factors):
        load_right(bank, version, factors)
        fault(bank, version, factors)

    monkeypatch.setattr(AdapterBank, "load", load_wrong)
    served.run(load(served.engine, 51, trainer, is_newest=False))
    with pytest.raises(LogprobParityError, match="with policy version 51 generator_0 differs"):
        check_parity(served, 51, trainer)
    assert check_parity(served, 50, trainer) == 0.0
    served.engine.give_up_adapters([50, 51])
    served.run(served.engine.generate(PROMPTS[:1], sampling=SamplingParams(max_tokens=1)))


def test_version_that_comes_again_with_other_bits_finds_no_keys_of_the_first(served):
    """As after a trainer was lost: the base stays, and numbers return. Whole blocks are cached."""
    engine, prompts = served.engine, prompts_of([150])
    sampling = SamplingParams(max_tokens=8, seed=1)

    def generate(version):
        return served.run(engine.generate(prompts, sampling=sampling, adapter=version))

    served.run(load(engine, 60, TRAINERS[103], is_newest=False))
    generate(60)
    served.run(load(engine, 60, TRAINERS[104], is_newest=False))
    assert same(generate(60), generate(104))
    engine.give_up_adapters([60])


def test_adapters_that_do_not_belong_here_are_refused_and_change_nothing(served, monkeypatch):
    engine, trainer = served.engine, TRAINERS[101]
    before = sample(served, [102])
    with pytest.raises(WeightMismatchError, match=r"adapter 9 was trained beside other weights"):
        served.run(load(engine, 9, trainer, base_id=BASE_ID + 1))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "base_id", None)
        with pytest.raises(WeightMismatchError, match="version BASE must be pushed and pulled"):
            served.run(load(engine, 9, trainer))
    lora = LoRA.Config(rank=65)
    with pytest.raises(ValueError, match=r"adapter 9 has rank 65.*max_lora_rank=64"):
        served.run(
            engine.load_adapter(write_factors(trainer), version=9, lora=lora, base_id=BASE_ID)
        )
    with pytest.raises(MissingAdapterError, match=r"adapter 9 is not loaded here"):
        sample(served, [9])

    async def fail(tensors):
        raise OSError("the link is down")

    with pytest.raises(OSError, match="the link is down"):
        served.run(
            engine.load_adapter(fail, version=9, lora=trainer.policy.lora.config, base_id=BASE_ID)
        )
    assert 9 not in engine._core.adapters.versions
    assert same(*before, *sample(served, [102]))


def test_least_recently_used_adapter_makes_room_but_never_one_in_use(served, monkeypatch):
    engine = served.engine
    shelf = engine._shelf
    sizes = {version: kept.num_bytes for version, kept in shelf._kept.items()}
    assert set(sizes) == set(LORAS)
    monkeypatch.setattr(shelf, "_limit_bytes", sum(sizes.values()))
    for version in (103, 101, 102, 104):
        sample(served, [version], max_tokens=1)
    served.run(load(engine, 20, TRAINERS[101], is_newest=False))
    assert set(shelf.versions) == {101, 102, 104, 20}, "103 was not used for longest"
    served.run(load(engine, 103, TRAINERS[103], is_newest=False))
    left = {*shelf.versions}

    # As large as all others, and 103 is in use.
    monkeypatch.setattr(shelf, "_limit_bytes", sizes[103])
    sampling = SamplingParams(max_tokens=100, seed=2)

    async def load_meanwhile():
        running = asyncio.create_task(engine.generate(PROMPTS[:3], sampling=sampling, adapter=103))
        while not engine._core.has_requests:
            await asyncio.sleep(0.001)
        with pytest.raises(AdapterRoomError, match=r"beside 103 \(.* used by 3 requests\)"):
            await load(engine, 21, TRAINERS[103], is_newest=False)
        return await running

    completions = served.run(load_meanwhile())
    # A load that was refused has dropped nothing, on the shelf or in the bank.
    assert {*shelf.versions} == {*engine._core.adapters.versions} == left
    assert [len(c.token_ids) for [c] in completions] == [100, 100, 100]
    served.run(load(engine, 21, TRAINERS[103], is_newest=False))
    assert shelf.versions == [*engine._core.adapters.versions] == [21]
    assert same(
        completions, served.run(engine.generate(PROMPTS[:3], sampling=sampling, adapter=21))
    )


def test_memory_stays_flat_over_a_thousand_loads_and_drops(served):
    engine, trainer = served.engine, TRAINERS[103]
    sampling = SamplingParams(max_tokens=1, seed=2)

    async def load_and_drop(first, last):
        for version in range(first, last):
            await load(engine, version, trainer, is_newest=False)
            if version % 50 == 0:
                await engine.generate(PROMPTS[:1], sampling=sampling, adapter=version)
            engine.give_up_adapters([version])
        return psutil.Process().memory_info().rss

    before = served.run(load_and_drop(1000, 1300))
    after = served.run(load_and_drop(1300, 2000))
    assert after - before < 2**20
    assert not engine._shelf.versions or max(engine._shelf.versions) < 2000
    assert len(engine._core.adapters.versions) <= len(LORAS) + 2
    assert len(engine._core.adapters._scales) == 16, "no more slots than at the start"
