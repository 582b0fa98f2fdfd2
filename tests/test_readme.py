"""The loop that the README shows is one that runs."""

import asyncio
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np

from rl.rollouts.environment import Environments
from rl.rollouts.episode import Episodes
from rl.rollouts.samples import policy_sample
from rl.tasks.sum_digits import SumDigits, make_problem
from rl.types import SamplingParams
from tests.support.fakes import RENDERER, FakePolicy, RubricRewarder
from tests.support.loops import ListedTask

README = Path(__file__).parents[1] / "README.md"


def test_the_loop_trains_on_each_groups_advantages_also_where_replies_are_equal():
    (loop,) = re.findall(r"```python\n(async def train.*?)```", README.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {
        "Environments": Environments,
        "Episodes": Episodes,
        "SamplingParams": SamplingParams,
        "islice": itertools.islice,
        "np": np,
        "policy_sample": policy_sample,
    }
    exec(loop, names)
    policy = FakePolicy(reply=lambda prompt, i: "no")
    training = names["train"](
        policy,
        policy,
        policy,
        RubricRewarder(rubric=SumDigits.Config(num_integers=2, reward="noise").build().rubric(seed=0)),
        task=ListedTask(train=itertools.repeat(make_problem([12, 34])), held_out=[]),
        renderer=RENDERER,
        num_steps=2,
    )
    asyncio.run(training)
    step = ["generate", "forward_backward", "optim_step", "push", "serve"]
    assert policy.calls == ["push", "serve", *step, *step]
    for samples in policy.trained:
        advantages = np.array([s.advantages[-1] for s in samples]).reshape(32, 8)
        np.testing.assert_allclose(advantages.sum(axis=1), 0, atol=1e-6)
        assert (advantages[0] > 0).any()  # each of the equal replies tossed a coin of its own
        assert (advantages[0] < 0).any()
