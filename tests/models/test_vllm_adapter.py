"""Saved adapters open in vLLM's own implementation, in another process."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from rl.models.files.hf import write_random_model
from rl.models.lora import LoRA
from rl.models.spec import ModelSpec, model_spec
from rl.training.engine import TrainingEngine
from tests.models.test_vllm_export import (
    logprobs_of,
    our_logprobs,
    run_vllm,
    with_all_switches,
    write,
)

PROMPTS = [list(b"4+7=11+8=19 [ANSWER] 19"), list(b"3 oder 5?")]
NUM_TOKENS = 8
ALL = {"rank": 8, "alpha": 12.0}
SUBSET = {"rank": 4, "alpha": 6.5, "target_modules": ("q_proj", "v_proj", "up_proj")}
HEAD = {"rank": 24, "alpha": 24.0, "unembedding": True}
SMALL_HEAD = {"rank": 4, "alpha": 4.0, "unembedding": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Base model with the settings of adapters by name."""

    family: str
    tie: bool = False
    max_lora_rank: int = 16
    served: Mapping[str, dict[str, Any]]
    refused: Mapping[str, dict[str, Any]] = field(default_factory=dict)


CASES = (
    # vLLM takes these ranks alone: 1, 8, 16, 32, 64 ..., so rank 24 is served with 32.
    Case(family="qwen3", max_lora_rank=32, served={"all": ALL, "subset": SUBSET, "head": HEAD}),
    Case(family="llama", served={"all": ALL, "head": SMALL_HEAD}),
    # vllm-project/vllm 2847, and thinking-machines-lab/tinker-cookbook 193.
    Case(
        family="qwen2",
        served={"all": ALL, "subset": SUBSET},
        refused={"too large": HEAD, "head": SMALL_HEAD},
    ),
    Case(family="mistral", served={"all": ALL}, refused={"head": SMALL_HEAD}),
    Case(family="gemma3_text", tie=True, served={"all": ALL}),
)
REFUSALS = {
    "too large": ("LoRA rank 24 is greater than max_lora_rank 16",),
    "head": ("expected target modules", "received ['lm_head', 'lm_head']"),
}

ENGINE = """
import gc, json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.model_executor.models import registry

# Otherwise another process imports vllm to look at each class.
registry._run_in_subprocess = lambda look: look()

def ask(llm, prompts, num_tokens, request):
    # The logprobs of prompts are without the head's product, or an error on a CPU.
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, logprobs=0, ignore_eos=True)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    answers = []
    for output in llm.generate(inputs, params, lora_request=request):
        (reply,) = output.outputs
        ids = list(reply.token_ids)
        logprobs = [at[i].logprob for i, at in zip(ids, reply.logprobs, strict=True)]
        answers.append({"token_ids": ids, "logprobs": logprobs})
    return answers

def serve(job, prompts, num_tokens):
    llm = LLM(model=job["base"], dtype="float32", enforce_eager=True, max_model_len=256,
              max_num_seqs=8, enable_lora=True, max_lora_rank=job["max_lora_rank"])
    answers = {"base": ask(llm, prompts, num_tokens, None)}
    errors = {}
    for number, (name, folder) in enumerate(job["adapters"].items(), start=1):
        request = LoRARequest(name, number, folder)
        # Added first, because a request whose adapter is refused stays in the engine.
        try:
            llm.llm_engine.add_lora(request)
        except ValueError as error:
            errors[name] = str(error)
        else:
            answers[name] = ask(llm, prompts, num_tokens, request)
    return {"answers": answers, "errors": errors}

def main(jobs, prompts, num_tokens):
    results = []
    for job in jobs:
        results.append(serve(job, prompts, num_tokens))
        gc.collect()
    print("RESULT" + json.dumps(results))

main(*map(json.loads, sys.argv[1:]))
"""


def make_trained(base: Path, *, spec: ModelSpec, settings: dict[str, Any]) -> TrainingEngine:
    """Build an engine whose adapters' products are as large as the weights."""
    config = TrainingEngine.Config(converters=(LoRA.Config(**settings),))
    engine = config.build(model_spec=spec, hf_assets_path=str(base), device="cpu")
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in engine.policy.trained_parameters.values():
            parameter.normal_(std=0.25, generator=generator)
    return engine


def make_spec(case: Case) -> ModelSpec:
    spec = with_all_switches(case.family)
    spec.model.tie_embeddings = case.tie
    return spec


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_vllm_serves_saved_adapters_with_equal_logprobs(tmp_path):
    tokenizer = write_random_model(tmp_path / "tokenizer", spec=model_spec("qwen3", "tiny"), seed=0)
    engines: dict[tuple[str, str], TrainingEngine] = {}
    jobs = []
    for case in CASES:
        base, folders = tmp_path / case.family, {}
        write(base, spec=make_spec(case), tie=case.tie, tokenizer=tokenizer)
        for name, settings in {**case.served, **case.refused}.items():
            engine = make_trained(base, spec=make_spec(case), settings=settings)
            folders[name] = str(tmp_path / f"{case.family}-{name}")
            engine.save_adapter(folders[name])
            engines[case.family, name] = engine
        jobs.append({"base": str(base), "max_lora_rank": case.max_lora_rank, "adapters": folders})

    results = run_vllm(ENGINE, *map(json.dumps, (jobs, PROMPTS, NUM_TOKENS)))
    for case, result in zip(CASES, results, strict=True):
        assert result["answers"].keys() == {"base", *case.served}
        assert result["errors"].keys() == case.refused.keys()
        for name, error in result["errors"].items():
            assert all(part in error for part in REFUSALS[name]), error
        for name, replies in result["answers"].items():
            for prompt, reply in zip(PROMPTS, replies, strict=True):
                ids = prompt + reply["token_ids"]
                without = our_logprobs(tmp_path / case.family, ids)
                ours = without
                if name != "base":
                    ours = logprobs_of(engines[case.family, name], ids)
                    assert (ours - without)[-NUM_TOKENS:].abs().max() > 0.5
                theirs = torch.tensor(reply["logprobs"])
                torch.testing.assert_close(theirs, ours[-NUM_TOKENS:], atol=1e-4, rtol=0)
