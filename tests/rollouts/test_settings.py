"""Settings of rollouts, loop, tasks and tools that are out of bounds are refused with name, value
and bound.
"""

import math

import pytest

from rl.loop.loop import Loop
from rl.loop.warmup import SupervisedWarmup
from rl.rollouts.advantage import Advantage, KLReward, OverlongPunishment
from rl.rollouts.episode import EpisodeLimits, Sampling
from rl.rollouts.evaluation import Evaluation
from rl.rollouts.renderer import RendererConfig
from rl.tasks.alphabet_sort import AlphabetSort
from rl.tasks.countdown import Countdown
from rl.tasks.data import DifficultyFilter
from rl.tasks.dataset import DatasetTask
from rl.tasks.math_problems import MathProblems
from rl.tasks.reasoning_gym_task import ReasoningGym
from rl.tasks.reverse_text import ReverseText
from rl.tasks.sum_digits import SumDigits
from rl.tasks.verifiers_task import VerifiersTask
from rl.tools.calculator import Calculator
from rl.tools.environment import ToolEnvironment
from rl.tools.sandbox import PythonSandbox
from rl.types import Problem

GYM, TASKSET = {"dataset": "gcd"}, {"taskset": "t"}
TOOLS = {"problem": Problem(id="p", question="q", answer=""), "tools": (Calculator(),)}


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (Advantage, {"eps": math.nan}, "eps=nan: must be at least 0 and below inf"),
        (Advantage, {"discount": 0.9}, "discount=0.9 has no effect with credit='sequence'"),
        (Sampling, {"temperature": 0.0}, "temperature=0.0: must be at least 0.01"),
        (Sampling, {"top_p": 0.9}, "top_p=0.9: must be 1.0: the trainer's logprobs are of the "
                                   "whole distribution"),
        (EpisodeLimits, {"step_timeout_s": math.nan}, "step_timeout_s=nan: must be above 0"),
        (Evaluation, {"num_samples": -1}, "num_samples=-1: must be at least 0"),
        (OverlongPunishment, {"buffer_tokens": 0}, "buffer_tokens=0: must be at least 1"),
        (KLReward, {"coef": -0.1}, "coef=-0.1: must be at least 0"),
        (RendererConfig, {"kind": "raw", "thinking": False}, "thinking=False: has no effect with "
                                                             "kind='raw'"),
        (RendererConfig, {"kind": "qwen3", "keep_replies": True}, "keep_replies=True: has no "
                                                                  "effect"),
        (Loop.Config, {"group_size": 0}, "group_size=0: must be at least 1"),
        (KLReward, {"coef": 1e39}, "coef=1e+39: must be at least 0 and at most 1e+15"),
        (SupervisedWarmup.Config, {"lr": 0.0}, "lr=0.0: must be above 0"),
        (SupervisedWarmup.Config, {"betas": (0.9, 1.0)}, "must be at least 0 and below 1"),
        (AlphabetSort.Config, {"num_eval": 0}, "num_eval=0: must be at least 1"),
        (AlphabetSort.Config, {"num_words": (3, 0)}, "num_words=(3, 0): must be a number of at "
                                                     "least 1"),
        (AlphabetSort.Config, {"letters": "aab", "num_words": (2,)}, "letters='aab': must be "
                                                                     "different letters"),
        (AlphabetSort.Config, {"letters": "abcd"}, "enough for 5 different words"),
        (Countdown.Config, {"num_numbers": 1}, "num_numbers=1: must be at least 2"),
        (Countdown.Config, {"operations": "+%"}, "operations='+%': must be one or more of"),
        (ReverseText.Config, {"num_letters": (5, 4)}, "must be two numbers, 2 or more, in order"),
        (SumDigits.Config, {"num_integers": 5}, "num_integers=5: must be at least 2 and at most 4"),
        (MathProblems.Config, {"format_reward": 1.5}, "format_reward=1.5: must be at least 0 and "
                                                      "at most 1"),
        (DatasetTask.Config, {"held_out": 1.0}, "held_out=1.0: must be at least 0 and below 1"),
        (DatasetTask.Config, {"template": "Think."}, "template='Think.': must contain {question}"),
        (DifficultyFilter, {}, "column=None, file=None: exactly one must say"),
        (DifficultyFilter, {"column": "c", "min": 0.5, "max": 0.4}, "min=0.5: must be at least 0 "
                                                                    "and at most 0.4"),
        (ReasoningGym.Config, {"solved_at": 0, **GYM},
            "solved_at=0: must be above 0 and at most 1"),
        (ReasoningGym.Config, {"settings": {"seed": 2}, **GYM}, "seed and size are chosen by this "
                                                                "task"),
        (VerifiersTask.Config, {"num_eval": 0, **TASKSET}, "num_eval=0: must be at least 1"),
        (PythonSandbox.Config, {"time_limit_s": 0}, "time_limit_s=0: must be at least 0.1"),
        (PythonSandbox.Config, {"import_paths": ("/no/such",)}, "import_paths: '/no/such' is not a "
                                                                "folder"),
        (ToolEnvironment, {**TOOLS, "tools": ()}, "tools is empty"),
        (ToolEnvironment, {**TOOLS, "tools": (Calculator(), Calculator())},
            "tool name 'calculator'"),
        (ToolEnvironment, {**TOOLS, "max_calls": 0}, "max_calls=0: must be at least 1"),
        (ToolEnvironment, {**TOOLS, "max_result_chars": 10}, "max_result_chars=10: must be at "
                                                             "least 100"),
    ],
)  # fmt: skip
def test_setting_out_of_bounds_is_refused(config, settings, message):
    with pytest.raises(ValueError, match=r".") as caught:
        config(**settings)
    assert message in str(caught.value)
