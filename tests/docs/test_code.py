"""Code of README.md, docs/rewards.md and docs/scripts.md, executed."""

import asyncio
import inspect
import itertools
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import numpy as np

from actors.generator import VLLMGenerator
from actors.launch import launcher as launch
from rl.rollouts.environment import Environments
from rl.rollouts.episode import Episodes
from rl.rollouts.rubric import Rubric
from rl.rollouts.samples import policy_sample
from rl.tasks.sum_digits import SumDigits, make_problem
from rl.types import SamplingParams
from rl.weights.store import WeightStore
from tests.support.fakes import RENDERER, FakePolicy, RubricRewarder
from tests.support.loops import ListedTask
from tests.support.scored import replied

ROOT = Path(__file__).parents[2]


def blocks(page, *, after=""):
    """Return the blocks of Python on a page after a text."""
    text = (ROOT / page).read_text()
    return re.findall(r"```python\n(.*?)```", text[text.index(after) :], flags=re.DOTALL)


def run(block, **names):
    exec(block, names)
    return names


# README.md


def test_loop_of_the_readme_trains_on_each_groups_advantages_also_where_replies_are_equal():
    (loop,) = (block for block in blocks("README.md") if block.startswith("async def train"))
    train: Any = run(
        loop,
        Environments=Environments,
        Episodes=Episodes,
        SamplingParams=SamplingParams,
        islice=itertools.islice,
        np=np,
        policy_sample=policy_sample,
    )["train"]
    policy = FakePolicy(reply=lambda prompt, i: "no")
    training = train(
        policy,
        policy,
        policy,
        RubricRewarder(
            rubric=SumDigits.Config(num_integers=2, reward="noise").build().rubric(seed=0)
        ),
        task=ListedTask(train=itertools.repeat(make_problem([12, 34])), held_out=[]),
        renderer=RENDERER,
        num_steps=2,
    )
    asyncio.run(training)
    step = ["generate", "forward_backward", "optim_step", "push", "pull"]
    assert policy.calls == ["push", "pull", *step, *step]
    for samples in policy.trained:
        advantages = np.array([s.advantages[-1] for s in samples]).reshape(32, 8)
        np.testing.assert_allclose(advantages.sum(axis=1), 0, atol=1e-6)
        assert (advantages[0] > 0).any()  # each of the equal replies tossed its own coin
        assert (advantages[0] < 0).any()


# docs/rewards.md


def test_rubric_of_the_docs_scores_a_group():
    rubric = run(blocks("docs/rewards.md")[0])["RUBRIC"]
    replies = [replied("please: 21"), replied("20"), replied("I do not know")]
    good, wrong, none = asyncio.run(rubric.score_group(replies))
    assert (good.reward, good.correct, good.unparsed) == (1.0 + 0.1 + 0.2, True, ())
    assert (wrong.reward, wrong.correct, wrong.unparsed) == (0.2, False, ())
    assert (none.reward, none.correct, none.unparsed) == (-0.1 + 0.2, False, ("answer",))


def test_judge_of_the_docs_reads_labels():
    names = run(blocks("docs/rewards.md")[1])
    assert isinstance(names["RUBRIC"], Rubric)
    judge = names["JUDGE"]
    assert judge.prompt(replied("21")).startswith(
        "Question: 47 82\n\nReply: 21\n\nIs the reply right?"
    )
    assert [judge.grade.read(text) for text in ("It adds up.\nYes.", "no", "yes and no")] == [
        1.0,
        0.0,
        None,
    ]


# docs/scripts.md


class Actor:
    """Actor whose endpoints only check their arguments."""

    def __init__(self, name, kind, **arguments):
        assert name
        inspect.signature(kind).bind(**arguments)
        self._kind = kind

    def __getattr__(self, name):
        async def call(*args):
            method = inspect.unwrap(getattr(self._kind, name)._method)
            inspect.signature(method).bind(self, *args)
            return {}

        return Mock(call=call)


def test_calls_of_the_three_actors_fit_their_signatures(monkeypatch):
    launcher = create_autospec(launch.Launcher, instance=True)
    launcher.spawn_role.return_value.mesh.spawn = Actor
    monkeypatch.setattr(launch, "run", lambda main: asyncio.run(main(launcher)))
    owned = (launch, "setup_process_group_env"), (WeightStore, "start"), (WeightStore, "announce")
    for owner, name in owned:
        monkeypatch.setattr(owner, name, create_autospec(getattr(owner, name)))
    given = dict.fromkeys(("trainer_config", "spec", "hf_assets_path", "rubric"))
    block, *_ = blocks("docs/scripts.md", after="## The three actors by hand")
    run(block, generator_config=VLLMGenerator.Config(), **given)
    roles = [one.args[0].role for one in launcher.spawn_role.await_args_list]
    assert roles == ["trainer", "generator", "reward"]
