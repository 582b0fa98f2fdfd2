"""Every block of Python on the pages runs as it stands, each as a module of its own."""

import ast
import asyncio
import inspect
import itertools
import json
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock, create_autospec

import numpy as np
import pytest
import torch

import actors.run
from actors.config import RunConfig
from actors.launch import launcher as launch
from actors.preflight.plan import find_untrained_start, make_run_renderer
from actors.preflight.task import check_demonstrations
from configs.sum_digits import tiny
from losses.types import LossInputs, LossOutput
from relay import training
from relay.process import run_in_process
from rl.config.cli import parse_cli
from rl.config.configurable import Configurable
from rl.config.rules import check_rules
from rl.config.tree import check_fields
from rl.models.files.hf import write_random_model
from rl.models.lora import LoRA
from rl.models.qwen3 import model_registry
from rl.observability.metrics import read_metrics
from rl.rollouts.environment import Environments
from rl.rollouts.rubric import Rubric
from rl.rollouts.samples import make_demonstration_sample
from rl.run_rules import RULES
from rl.tasks.sum_digits import SumDigits, make_problem
from rl.tools.tool import render_call
from rl.training.engine import TrainingEngine
from rl.training.failures import write_batch
from rl.types import Problem, ToolCall
from rl.weights.store import WeightStore
from tests.support.fakes import RENDERER, FakePolicy, RubricRewarder
from tests.support.loops import ListedTask, half_right, make_loop
from tests.support.pages import find_block, find_blocks
from tests.support.scored import replied
from tests.support.tasks import played
from tests.support.virtual_time import run_in_virtual_time

BLOCKS = find_blocks()
MEDIUM = ("ServiceClient(",)
"""Texts of blocks for the medium set: a server compiles the kernels of the batch-invariant mode,
which takes a minute in a new checkout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StandIn:
    """A fixture that stands in for what a block needs and a test cannot have."""

    used_by: str
    """Text of the blocks that get the fixture."""
    fixture: str
    because: str


STAND_INS = (
    StandIn(
        used_by="relay.grpo(",
        fixture="unstarted_runs",
        because="the model is on the hub and a run takes minutes: all but its process is real",
    ),
    StandIn(
        used_by="outputs/try-1/checkpoints",
        fixture="checkpoints",
        because="the files are those of a run: a model of the same config has saved them",
    ),
    StandIn(
        used_by="read_batch(",
        fixture="failed_batch",
        because="no run of ours has a loss that is not finite",
    ),
    StandIn(
        used_by="PeftModel",
        fixture="adapter",
        because="the base model is 1.5 GB: a tiny Qwen3 has its place",
    ),
    StandIn(
        used_by="open_run(",
        fixture="fake_run",
        because="actors start in seconds: tests of the runs have the real ones",
    ),
    StandIn(
        used_by="Launcher",
        fixture="fake_launcher",
        because="actors start in seconds: the arguments of their endpoints are checked",
    ),
)


def execute(block, *, folder, monkeypatch):
    """Execute a block in a folder, and return its names."""
    name = block.module or "docs_block"
    file = folder / f"{name}.py"
    file.write_text(block.text)
    module = ModuleType(name)
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)

    # As in a cell of a notebook, which may await.
    code = compile(block.text, file, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    coroutine = eval(code, vars(module))
    if coroutine is not None:
        asyncio.run(coroutine)
    return vars(module)


def list_configs(names):
    """Return the configs that the block's own functions without parameters return, by name."""
    configs = {}
    for name, value in names.items():
        is_own = inspect.isfunction(value) and value.__module__ == names["__name__"]
        if is_own and not inspect.signature(value).parameters:
            configs[name] = value()
    return {name: made for name, made in configs.items() if isinstance(made, Configurable.Config)}


@pytest.fixture
def run_block(tmp_path, monkeypatch):
    """Function that executes a block in an empty folder and closes its engines at the end."""
    executed = []

    def run(block):
        names = execute(block, folder=tmp_path, monkeypatch=monkeypatch)
        executed.append(names)
        return names

    yield run
    for value in itertools.chain.from_iterable(names.values() for names in executed):
        if isinstance(value, TrainingEngine):
            value.close()


# What stands in


@pytest.fixture
def unstarted_runs(tmp_path, monkeypatch):
    """`relay.grpo`, which checks everything and then finds its run's metrics instead of a run."""
    requests = []

    def finish(request, *, folder, quiet):
        check_fields(request.config)
        check_rules(request.config, RULES)
        folder.mkdir(parents=True)
        lines = [{"step": step, "eval/correct": 0.1 * step} for step in range(3)]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        requests.append(request)

    rows = [{"question": f"What is {n} + 4?", "answer": str(n + 4)} for n in range(20)]
    (tmp_path / "qa.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    started = create_autospec(run_in_process, side_effect=finish)
    monkeypatch.setattr(training, "run_in_process", started)
    return requests


def make_tiny_engine():
    return TrainingEngine(
        config=tiny().trainer, model_spec=model_registry("tiny"), hf_assets_path=None
    )


@pytest.fixture
def checkpoints(tmp_path):
    """Checkpoints of outputs/try-1."""
    engine = make_tiny_engine()
    for version in (12, 80):
        engine.policy_version = version
        folder = tmp_path / "outputs" / "try-1" / "checkpoints" / f"step-{version}"
        engine.save_checkpoint(str(folder))
    engine.close()


@pytest.fixture
def failed_batch(tmp_path):
    """The batch of a step of outputs/try-1, of which the second sample has no finite loss."""
    samples = []
    for advantage in (1.0, np.nan, -1.0):
        sample = make_demonstration_sample(*(np.array(ids, np.int32) for ids in ([1, 2], [3, 4])))
        advantages = np.full_like(sample.advantages, advantage)
        logprobs = np.full_like(sample.generator_logprobs, -5.0)
        samples.append(replace(sample, advantages=advantages, generator_logprobs=logprobs))
    write_batch(tmp_path / "outputs" / "try-1" / "nan_batch_version_12.npz", samples)


@pytest.fixture
def adapter(tmp_path):
    """A tiny Qwen3 and an adapter for it."""
    spec = model_registry("tiny")
    folder = str(write_random_model(tmp_path / "models" / "Qwen3-0.6B", spec=spec, seed=0))
    config = TrainingEngine.Config(converters=(LoRA.Config(rank=2),))
    engine = TrainingEngine(config=config, model_spec=spec, hf_assets_path=folder)
    engine.save_adapter(str(tmp_path / "outputs" / "my-run" / "checkpoints" / "adapter"))
    engine.close()


@pytest.fixture
def fake_run(monkeypatch):
    """`open_run` with fakes of the actors; returns the policy."""
    policy = FakePolicy(reply=half_right)
    problem = make_problem([12, 34])

    @asynccontextmanager
    async def open_fake(config):
        check_fields(config)
        run = SimpleNamespace(
            generator=policy,
            trainer=policy,
            publisher=policy,
            rewarder=RubricRewarder(rubric=config.task.build().rubric(seed=0)),
            renderer=RENDERER,
            task=ListedTask(train=itertools.repeat(problem), held_out=[]),
        )
        known = {field.name for field in fields(actors.run.Run)} | {"task", "renderer"}
        assert vars(run).keys() <= known
        yield run

    monkeypatch.setattr(
        actors.run, "open_run", create_autospec(actors.run.open_run, side_effect=open_fake)
    )
    return policy


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


@pytest.fixture
def fake_launcher(monkeypatch):
    """Launcher whose actors only check their arguments."""
    launcher = create_autospec(launch.Launcher, instance=True)
    launcher.spawn_role.return_value.mesh.spawn = Actor
    monkeypatch.setattr(launch, "run", lambda main: asyncio.run(main(launcher)))
    owned = (launch, "setup_process_group_env"), (WeightStore, "start"), (WeightStore, "announce")
    for owner, name in owned:
        monkeypatch.setattr(owner, name, create_autospec(getattr(owner, name)))
    return launcher


# All blocks


def list_cases():
    """Return the blocks as cases of a test."""
    cases = []
    for block in BLOCKS:
        is_medium = any(text in block.text for text in MEDIUM)
        marks = [pytest.mark.medium] if is_medium else []
        cases.append(pytest.param(block, marks=marks, id=f"{block.page}-{block.number}"))
    return cases


@pytest.mark.parametrize("block", list_cases())
def test_block_runs_as_it_stands(request, run_block, block):
    for stand_in in STAND_INS:
        if stand_in.used_by in block.text:
            request.getfixturevalue(stand_in.fixture)
    names = run_block(block)
    for name, config in list_configs(names).items():
        check_fields(config)
        if isinstance(config, RunConfig):
            check_rules(config, RULES)
            argv = ["--module", names["__name__"], "--config", name, "--steps", "3"]
            assert parse_cli(argv, default_module="sum_digits").config.loop.num_steps == 3


def test_every_page_with_python_is_found():
    assert len(BLOCKS) > 25
    assert len({block.page for block in BLOCKS}) > 8


def test_every_stand_in_is_used():
    texts = [block.text for block in BLOCKS]
    assert not [s for s in STAND_INS if not any(s.used_by in text for text in texts)]


# What the blocks do: README.md, docs/own_data.md


@pytest.mark.parametrize("page", ["README.md", "docs/own_data.md"])
def test_six_lines_ask_for_an_ordinary_run_of_the_users_parts(
    run_block, unstarted_runs, tmp_path, page
):
    run = run_block(find_block(page, "relay.grpo("))["run"]
    (request,) = unstarted_runs
    config = request.config
    assert config.hf_assets_path == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert config.task.train_files == ("qa.jsonl",)
    assert config.loop.num_steps == 80
    rubric = config.task.build().rubric(seed=0)
    problem = Problem(id="0", question="What is 3 + 4?", answer="7")
    scores = [rubric.score(played_once(problem, text)).reward for text in ("It is 7.", "8", "")]
    assert scores == [1, 0, 0]
    assert (run.folder / "learning_curve.png").is_file()


def played_once(problem, text):
    return replied(text, question=problem.question, answer=problem.answer)


# docs/scripts.md


def test_loop_of_the_docs_trains_on_each_groups_advantages_also_where_replies_are_equal(run_block):
    train = run_block(find_block("docs/scripts.md", "async def train"))["train"]
    policy = FakePolicy(reply=lambda prompt, i: "no")
    steps = train(
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
    asyncio.run(steps)
    step = ["generate", "forward_backward", "optim_step", "push", "pull"]
    assert policy.calls == ["push", "pull", *step, *step]
    for samples in policy.trained:
        advantages = np.array([s.advantages[-1] for s in samples]).reshape(32, 8)
        np.testing.assert_allclose(advantages.sum(axis=1), 0, atol=1e-6)
        assert (advantages[0] > 0).any()  # each of the equal replies tossed its own coin
        assert (advantages[0] < 0).any()


def test_script_of_the_docs_trains_on_a_group(run_block, fake_run):
    run_block(find_block("docs/scripts.md", "open_run("))
    step = ["generate", "forward_backward", "optim_step", "push", "pull"]
    assert fake_run.calls == ["push", "pull", *step]
    (samples,) = fake_run.trained
    assert [sample.advantages[-1] > 0 for sample in samples] == [True, False] * 4


def test_calls_of_the_three_actors_fit_their_signatures(run_block, fake_launcher):
    run_block(find_block("docs/scripts.md", "Launcher"))
    roles = [one.args[0].role for one in fake_launcher.spawn_role.await_args_list]
    assert roles == ["trainer", "generator", "reward"]


# docs/checkpoints.md, docs/metrics.md


def test_checkpoint_of_the_docs_is_loaded_as_its_comments_say(run_block, checkpoints, capsys):
    run_block(find_block("docs/checkpoints.md", "load_checkpoint(folder"))
    assert capsys.readouterr().out.split() == ["0", "80"]


def test_sample_without_a_finite_loss_is_named(run_block, checkpoints, failed_batch, capsys):
    run_block(find_block("docs/checkpoints.md", "read_batch("))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("sample 1: loss nan")


def test_sinks_of_the_docs_write_each_step(run_block, tmp_path):
    run_block(find_block("docs/metrics.md", "open_sinks("))
    records = read_metrics(tmp_path / "outputs" / "my-loop" / "metrics.jsonl")
    assert [(r["step"], round(r["reward/mean"], 3)) for r in records] == [
        (1, 0.667),
        (2, 0.667),
        (3, 0.667),
    ]


# docs/agents.md


def test_agent_of_the_docs_can_be_warmed_up_on_its_problems(run_block, tmp_path):
    run_block(find_block("docs/agents.md", "async def solve"))
    config = run_block(find_block("docs/agents.md", "AgentTask.Config("))["tiny"]()
    config.dump_folder = str(tmp_path)
    task = config.task.build()
    check_demonstrations(
        task.warmup_problems(seed=config.seed),
        environments=Environments(make=task.environment),
        renderer=make_run_renderer(config.renderer, find_untrained_start(config)),
        max_tokens=config.loop.sampling.max_tokens,
        max_model_len=config.generator.max_model_len,
    )


# docs/losses.md


def test_advantage_of_the_docs_ranks_a_group(run_block):
    advantage = run_block(find_block("docs/losses.md", "class RankAdvantage"))["RankAdvantage"]()
    rewards_PG = [
        [np.array([0.0, 5.0]), np.array([0.25]), np.array([0.0, 0.0, 0.5])],
        [np.array([1.0]), np.array([1.0])],
    ]
    (best, worst, middle), equal = advantage(rewards_PG)
    assert (best.tolist(), worst.tolist(), middle.tolist()) == ([1, 1], [-1], [0, 0, 0])
    assert best.dtype == np.float32
    assert [values.tolist() for values in equal] == [[0], [0]]


def test_advantage_of_the_docs_is_an_option_and_trains(run_block):
    run_block(find_block("docs/losses.md", "class RankAdvantage"))
    argv = ["--module", "my_runs", "--config", "ranked", "--loop.advantage.power", "2"]
    advantage = parse_cli(argv, default_module="sum_digits").config.loop.advantage
    policy = FakePolicy(reply=half_right)
    loop, _ = make_loop(policy, advantage=advantage)
    run_in_virtual_time(loop.run())
    (samples,) = policy.trained
    # Each right sample of a group of four beats the two wrong ones: (2 / 3) squared.
    assert [s.advantages[-1] for s in samples] == pytest.approx([4 / 9, -4 / 9] * 4)


def test_loss_of_the_docs_is_the_negative_sum_of_weighted_logprobs(run_block):
    loss = run_block(find_block("docs/losses.md", "class Reinforce"))["Reinforce"]()
    output = loss(
        LossInputs(
            logprobs=torch.tensor([-1.0, -2.0, -4.0]),
            generator_logprobs=torch.tensor([-1.0, -2.0, -4.0]),
            advantages=torch.tensor([1.0, -1.0, 3.0]),
            mask=torch.tensor([True, True, False]),
            sequence_ids=torch.tensor([0, 0, 0]),
            num_sequences=1,
        )
    )
    assert isinstance(output, LossOutput)
    assert output.loss_sum.item() == -1.0
    assert output.denominator is not None
    assert output.denominator.item() == 2.0
    assert output.metric_sums["surprise"] == 3.0


# docs/rewards.md


def test_rubric_of_the_docs_scores_a_group(run_block):
    rubric = run_block(find_block("docs/rewards.md", "GroupCriterion"))["RUBRIC"]
    replies = [replied("please: 21"), replied("20"), replied("I do not know")]
    good, wrong, none = asyncio.run(rubric.score_group(replies))
    assert (good.reward, good.correct, good.unparsed) == (1.0 + 0.1 + 0.2, True, ())
    assert (wrong.reward, wrong.correct, wrong.unparsed) == (0.2, False, ())
    assert (none.reward, none.correct, none.unparsed) == (-0.1 + 0.2, False, ("answer",))


def test_judge_of_the_docs_reads_labels(run_block):
    names = run_block(find_block("docs/rewards.md", "Judge("))
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


def test_environment_of_the_docs_answers_a_call(run_block):
    config = run_block(find_block("docs/rewards.md", "ToolEnvironment("))["qwen3_0_6b"]()
    call = render_call(ToolCall(name="calculator", arguments={"expression": "4 + 7"}))
    rollout = played(config.task.build(), make_problem([47]), call, "[ANSWER] 11")
    assert [turn.observation.messages for turn in rollout.turns][1] == ()
    (answer,) = rollout.turns[0].observation.messages
    assert (answer.role, answer.content) == ("tool", "11")


def test_function_of_the_docs_is_a_tool(run_block):
    tool = run_block(find_block("docs/rewards.md", "FunctionTool("))["tool"]
    dates = {"first": "2026-02-28", "second": "2026-01-31"}
    assert asyncio.run(tool.call(dates)) == "28"
    assert tool.parameters["required"] == ["first", "second"]


# docs/configuration.md


def test_slotted_config_of_the_docs_checks_its_parents_fields_and_its_own(run_block):
    sampling = run_block(find_block("docs/configuration.md", "class ShortSampling"))[
        "ShortSampling"
    ]
    with pytest.raises(ValueError, match="max_tokens=65: must be at most 64"):
        sampling(max_tokens=65)
    with pytest.raises(ValueError, match="temperature=0: must be at least"):
        sampling(max_tokens=8, temperature=0)


def test_super_in_a_slotted_dataclass_raises_as_the_docs_say(run_block):
    block = find_block("docs/configuration.md", "class ShortSampling")
    wrong = replace(
        block, text=block.text.replace("Sampling.__post_init__(self)", "super().__post_init__()")
    )
    with pytest.raises(TypeError, match="obj must be an instance or subtype of type"):
        run_block(wrong)["ShortSampling"]()
