"""Agents against a real model in this process: rollouts with branches, their rows and logprobs."""

from __future__ import annotations

import asyncio
import re
from itertools import chain
from typing import Any

import numpy as np
import pytest

from rl.agents.config import EndpointConfig
from rl.agents.players.local import open_local_player
from rl.agents.program import AgentProgram
from rl.agents.rollouts import AgentEpisodes, choose_branches
from rl.local import LocalBackend
from rl.models.files.tokenizer import build_byte_tokenizer, load_tokenizer
from rl.models.qwen3 import model_registry
from rl.rollouts.episode import EpisodeLimits
from rl.rollouts.renderer import RendererConfig, make_renderer
from rl.rollouts.samples import policy_samples
from rl.training.engine import TrainingEngine
from rl.types import Problem, Rollout, SamplingParams

PROBLEMS = [Problem(id=str(n), question="1*2 3*4 5*6 7*8 9*10", answer="2") for n in range(2)]
COMPACTING = AgentProgram(function="examples.agents.compacting:solve")


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    build_byte_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    return make_renderer(
        RendererConfig(kind="raw"), tokenizer=tokenizer, stop_token_ids=(tokenizer.eos_token_id,)
    )


def play(renderer, program, use=None, *, seed=3, **limits):
    """Play agents against a random model; return the rollouts, and the result of `use`."""

    async def run():
        config = EndpointConfig(announces_tools=False)
        backend = LocalBackend(
            TrainingEngine.Config(), spec=model_registry("tiny"), hf_assets_path=None, device="cpu"
        )
        async with (
            backend as local,
            open_local_player(config, program=program, renderer=renderer) as player,
        ):
            await local.pull(await local.push())
            episodes = AgentEpisodes(
                generator=local,
                player=player,
                limits=EpisodeLimits(timeout_s=60.0, **limits),
                max_tokens=200,
            )
            sampling = SamplingParams(max_tokens=6, num_samples=2, seed=seed, stop_token_ids=(256,))
            groups = await episodes.run(PROBLEMS, sampling=sampling)
            return groups, None if use is None else await use(local, groups)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def played(renderer):
    """Return rollouts of the example that rewrites its history; their rows; and the largest
    difference of the logprobs that the trainer computes for them."""

    async def compare(local, groups):
        rollouts = [rollout for group in groups for rollout in group]
        advantages = [np.ones(r.num_completion_tokens, np.float32) for r in rollouts]
        rows = policy_samples(rollouts, advantages, temperature=1.0)
        trained = await local.compute_logprobs(rows)
        diffs = []
        for row, logprobs_T in zip(rows, trained, strict=True):
            diffs.append(np.abs(row.generator_logprobs - logprobs_T)[row.mask].max())
        return rollouts, rows, max(diffs)

    return play(renderer, COMPACTING, compare)[1]


def test_rows_of_branches_have_the_logprobs_of_the_trainer(played):
    rollouts, rows, largest = played
    assert len(rows) == 3 * len(rollouts) == 12
    assert largest <= 1e-5
    for rollout in rollouts:
        assert rollout.failure is None
        assert [(b.role, b.cause) for b in rollout.branches] == [
            ("sub-agent", ""),
            ("main", "agent"),
            ("main", "rewritten"),
        ]
        assert len(rollout.turns) == 5
        assert rollout.state["exit_status"] == 0
        assert len(rollout.state["value"]) == 5
        assert rollout.turns[-1].observation.metrics["agent/requests"] == 5
    num_trained = sum(int(row.mask.sum()) for row in rows)
    assert num_trained == sum(rollout.num_completion_tokens for rollout in rollouts)


def test_function_of_the_rollout_chooses_the_branches_that_are_trained(played):
    """Of the branches above: the conversation before its history was rewritten alone."""
    rollout = played[0][0]
    chosen = choose_branches(rollout, lambda r: [i for i, b in enumerate(r.branches) if i == 1])
    assert [branch.is_trained for branch in chosen.branches] == [False, True, False]
    assert chosen.trained_turns == tuple(rollout.turns[i] for i in rollout.branches[1].turns)
    wrong: list[tuple[Any, str]] = [
        (lambda r: [3], r"choose_branches returned \[3\]: 3 must be an index of its 3 branches"),
        (lambda r: None, "choose_branches failed: TypeError: 'NoneType'"),
        (lambda r: ["a"], "choose_branches failed: TypeError: 'str'"),
    ]
    for choose, reason in wrong:
        failed = choose_branches(rollout, choose)
        assert failed.end == "failed"
        assert re.search(reason, str(failed.failure))


def test_seed_decides_the_rollouts_also_of_agents_that_run_at_the_same_time(renderer, played):
    def list_texts(rollouts: list[Rollout]) -> list[list[str]]:
        return [[turn.text for turn in rollout.turns] for rollout in rollouts]

    first = list_texts(played[0])
    again, other = play(renderer, COMPACTING)[0], play(renderer, COMPACTING, seed=4)[0]
    assert first == list_texts([*chain(*again)]) != list_texts([*chain(*other)])
    assert len(set(map(str, first))) == 4


FAILING = {
    "import sys; print('broken'); sys.exit(3)": r"the agent failed: exit status 3; .*'broken'",
    "print('nothing')": r"the agent has asked the model nothing; .*'nothing'",
    "import os; print(os.environ['OPENAI_API_KEY'])": r"the agent has asked .*'<key>'",
    "import os, signal; os.kill(os.getppid(), signal.SIGKILL); os.abort()": (
        r"the agent was lost; .*guard"
    ),
    "import os, time; os.fork() or (os.setsid(), os.fork(), time.sleep(60))": (
        r"the agent left processes behind, which were ended; it wrote nothing"
    ),
}


@pytest.mark.parametrize(("code", "reason"), FAILING.items())
def test_agent_that_fails_is_a_failed_rollout_with_its_reason(renderer, code, reason):
    program = AgentProgram(command=("{python}", "-c", code))
    groups, _ = play(renderer, program)
    for rollout in (rollout for group in groups for rollout in group):
        assert rollout.end == "failed"
        assert rollout.failure is not None
        assert re.match(reason, rollout.failure, re.DOTALL), rollout.failure
        assert "sk-relay" not in rollout.state["output"]


def test_limit_of_replies_ends_an_episode_that_still_counts(renderer):
    groups, _ = play(renderer, COMPACTING, max_turns=2)
    for rollout in (rollout for group in groups for rollout in group):
        assert (rollout.end, rollout.failure, len(rollout.turns)) == ("turns", None, 2)
