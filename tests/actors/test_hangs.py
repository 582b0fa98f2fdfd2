"""Processes of a real fleet that stop dead, and what whoever waits for them is told."""

import os
import re
import signal
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from actors.backend import ActorLearner, ActorPublisher, ActorSampler
from actors.calls import ActorTimeoutError, Timeouts
from actors.diagnosis import tell_what_run_does
from actors.fleet import close_fleet, start_fleet
from actors.fleet_config import FleetConfig
from actors.generator import VLLMGenerator
from actors.reward import RewardActor
from actors.roles import LogSettings
from actors.supervision import RecoveryConfig
from actors.sync_check import SyncCheck
from actors.trainer import PolicyTrainer
from rl.distributed.mesh import ParallelismConfig
from rl.distributed.process_group import CollectiveTimeoutError, CommConfig
from rl.models.qwen3 import model_registry
from rl.models.starting_point import write_random_model
from rl.process_id import kernel_state
from rl.rollouts.samples import demonstration_sample
from rl.tasks.sum_digits import make_problem
from rl.training.config import TrainingConfig
from rl.types import SamplingParams
from rl.weights.errors import WeightTimeoutError
from rl.weights.store import WeightStore
from tests.support.fakes import prompt_of
from tests.support.fleet_actors import rubric
from tests.support.monarch_meshes import monarch_meshes
from tests.support.scored import replied

pytestmark = [pytest.mark.medium, pytest.mark.timeout(240)]

SPEC = model_registry("tiny")
PROMPT = prompt_of(make_problem([11, 41]))
SAMPLE = demonstration_sample(PROMPT.token_ids, PROMPT.token_ids)
STOPPED = "no stacks: the process is stopped by a signal"
CONFIG = FleetConfig(
    trainer=PolicyTrainer.Config(
        num_procs=2,
        parallelism=ParallelismConfig(data_parallel_shard_degree=2),
        training=TrainingConfig(max_tokens_per_microbatch=128),
        comm=CommConfig(train_timeout_s=4.0),
    ),
    generator=VLLMGenerator.Config(dtype="float32", max_model_len=128, cpu_kv_cache_gib=0.05),
    reward=RewardActor.Config(num_procs=2),
    timeouts=Timeouts(close_s=10),
    recovery=RecoveryConfig(max_restarts=0),
)
SHORT = Timeouts(generate_s=2, train_s=2, score_s=2, close_s=10)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return tmp_path_factory.mktemp("run") / "logs"


@pytest.fixture(scope="module")
def running(tmp_path_factory, logs):
    """A way to run a coroutine, and the fleet, whose generator has weights."""
    with monarch_meshes() as meshes:
        assets = write_random_model(tmp_path_factory.mktemp("assets") / "tiny", spec=SPEC, seed=0)
        starting = start_fleet(
            CONFIG,
            store=WeightStore.Config(timeout_s=4.0).build(dtype="float32"),
            check=SyncCheck(None),
            model_spec=SPEC,
            hf_assets_path=str(assets),
            rubric=rubric(),
            failure_folder=logs.parent,
            logs=LogSettings(folder=logs, console_level="WARNING"),
        )
        fleet = meshes.run(starting, timeout_s=200)
        publisher = ActorPublisher(
            trainer=fleet.trainer, generators=fleet.generators, store=fleet.store, check=fleet.check
        )

        async def publish():
            await publisher.serve(await publisher.push())

        meshes.run(publish())
        yield meshes.run, fleet
        meshes.run(close_fleet(fleet))


@contextmanager
def stopped(group, rank):
    """Its process does nothing, as if the machine had lost it; the pid."""
    process = group.processes[rank]
    os.kill(process.pid, signal.SIGSTOP)
    while kernel_state(process) != "is stopped by a signal":
        os.sched_yield()
    try:
        yield process.pid
    finally:
        os.kill(process.pid, signal.SIGCONT)


def told_in(error):
    """What follows the message: lines, and the file with all stacks."""
    (file,) = re.findall(r"all stacks: (.*)", error.more)
    return error.more.splitlines(), Path(file).read_text()


def test_a_stopped_trainer_rank_is_named_and_the_other_tells_where_it_is(running):
    run, fleet = running
    short = replace(fleet.trainer, timeouts=SHORT)
    with stopped(fleet.trainer, 1), pytest.raises(ActorTimeoutError) as caught:
        run(short.call("drop_gradient", limit="train_s"))
    lines, file = told_in(caught.value)
    message = "trainer.drop_gradient gave no answer within timeouts.train_s=2"
    assert str(caught.value).startswith(f"{message}\n")
    assert lines[0].startswith("  trainer[0]: nothing for ")
    (place,) = (number for number, line in enumerate(lines) if line.startswith("  trainer[1]: "))
    assert lines[place + 1] == f"    {STOPPED}"
    assert file.startswith(f"{message}\n")
    assert "==== trainer[0]" in file
    assert 'actors/trainer.py", line' in file or 'worker_thread.py", line' in file
    assert run(fleet.trainer.call("drop_gradient", limit="train_s")) == [None, None]


def test_a_stopped_generator_is_named_with_the_version_that_it_serves(running):
    run, fleet = running
    (generator,) = fleet.generators
    sampler = ActorSampler(replace(generator, timeouts=SHORT))
    sampling = SamplingParams(max_tokens=4, num_samples=1, seed=1)
    run(ActorSampler(generator).generate([PROMPT.token_ids], sampling=sampling))
    with stopped(generator, 0), pytest.raises(ActorTimeoutError) as caught:
        run(sampler.generate([PROMPT.token_ids], sampling=sampling))
    lines, _ = told_in(caught.value)
    assert caught.value.message() == "generator.generate gave no answer within timeouts.generate_s=2"
    assert lines[0].startswith("  generator[0]: ")
    assert lines[1] == f"    {STOPPED}"


def test_a_stopped_reward_process_is_named_by_its_rank_alone(running):
    run, fleet = running
    rollout = replied("1")
    reward = run(fleet.reward.group())
    short = replace(reward, timeouts=SHORT).at_rank(1)
    with stopped(reward, 1), pytest.raises(ActorTimeoutError) as caught:
        run(short.call("score", [[rollout]], True, False, limit="score_s"))
    lines, _ = told_in(caught.value)
    expected = "reward.score of rank 1 of 2 gave no answer within timeouts.score_s=2"
    assert caught.value.message() == expected
    assert [line.split(":")[0] for line in lines if line.startswith("  reward")] == ["  reward[1]"]


def test_a_pull_that_waits_for_a_stopped_rank_is_one_of_the_stores_deadline(running):
    run, fleet = running
    (generator,) = fleet.generators
    with stopped(fleet.trainer, 0), pytest.raises(WeightTimeoutError) as caught:
        run(generator.call("pull_model_state_dict", 0, limit="sync_s"))
    message = r"weight store: pull of version 0 \(\d+ tensors\) on rank 0 not finished within timeout_s=4"
    assert re.match(f"{message}: waited for", str(caught.value))


def test_a_rank_that_waits_for_another_says_in_which_call_and_the_run_tells_all(running, logs):
    """The last of these: the process group is broken afterwards."""
    run, fleet = running
    reward = run(fleet.reward.group())

    async def step():
        try:
            # Without the other: an error of one rank is not told while another has not answered.
            await ActorLearner(fleet.trainer.at_rank(0)).forward_backward([SAMPLE, SAMPLE])
        except CollectiveTimeoutError as error:
            return error, await tell_what_run_does(
                error, [group.watched for group in (fleet.trainer, *fleet.generators, reward)]
            )

    error, file = run(step())
    assert error.message().startswith(
        "rank 0 of 2 of the trainer: in forward_backward of step 0 the other ranks did not take part within "
        "the deadline of a collective (comm.train_timeout_s; "
    )
    assert file.parent == logs
    headings = re.findall(r"==== (.*?\[\d\]):", file.read_text())
    assert sorted(headings) == ["generator[0]", "reward[0]", "reward[1]", "trainer[0]", "trainer[1]"]
    assert f"  all stacks: {file}" in str(error)
    told = r"\n  trainer\[0\]: nothing for .* s; forward_backward failed .* s ago: CollectiveTimeoutError: "
    assert re.search(told, str(error))
