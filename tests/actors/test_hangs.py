"""Frozen processes of real actors, and the errors of the calls that wait for them."""

import os
import re
import signal
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from actors.backend import TrainerClient
from actors.calls import ActorTimeoutError
from actors.config import ClusterConfig, RecoveryConfig, Timeouts
from actors.generator import VLLMGenerator
from actors.hang_report import add_hang_report
from actors.members import LogSettings
from actors.parity import ParityCheck
from actors.reward import RewardActor
from actors.trainer import PolicyTrainer
from rl.distributed.mesh import ParallelismConfig
from rl.distributed.process_group import CollectiveTimeoutError, CommConfig
from rl.models.hf import write_random_model
from rl.models.qwen3 import model_registry
from rl.rollouts.samples import demonstration_sample
from rl.tasks.sum_digits import make_problem
from rl.training.config import TrainingConfig
from rl.utils.processes import kernel_state
from rl.weights.store import WeightStore
from tests.support.clusters import start_cluster
from tests.support.fakes import prompt_of
from tests.support.fleet_actors import rubric
from tests.support.monarch_meshes import monarch_meshes
from tests.support.scored import replied

pytestmark = [pytest.mark.medium, pytest.mark.timeout(240)]

SPEC = model_registry("tiny")
PROMPT = prompt_of(make_problem([11, 41]))
SAMPLE = demonstration_sample(PROMPT.token_ids, PROMPT.token_ids)
STOPPED = "no stacks: the process is stopped by a signal"
CONFIG = ClusterConfig(
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
SHORT = Timeouts(generate_s=2, train_s=2.1, score_s=2.2, close_s=10)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return tmp_path_factory.mktemp("run") / "logs"


@pytest.fixture(scope="module")
def running(tmp_path_factory, logs):
    """Return a function that runs a coroutine, and the cluster."""
    with monarch_meshes() as meshes:
        assets = write_random_model(tmp_path_factory.mktemp("assets") / "tiny", spec=SPEC, seed=0)
        starting = start_cluster(
            CONFIG,
            store=WeightStore.Config(timeout_s=4.0).build(dtype="float32"),
            check=ParityCheck(None),
            model_spec=SPEC,
            hf_assets_path=str(assets),
            rubric=rubric(),
            failure_folder=logs.parent,
            logs=LogSettings(folder=logs, console_level="WARNING"),
        )
        fleet = meshes.run(starting, timeout_s=200)
        yield meshes.run, fleet
        meshes.run(fleet.close())


@contextmanager
def stopped(group, rank):
    """Stop a process with SIGSTOP for the block; yield its pid."""
    process = group.processes[rank]
    os.kill(process.pid, signal.SIGSTOP)
    while kernel_state(process) != "is stopped by a signal":
        os.sched_yield()
    try:
        yield process.pid
    finally:
        os.kill(process.pid, signal.SIGCONT)


def report_of(error):
    """Return the lines after the message, and the text of the file with all stacks."""
    (file,) = re.findall(r"all stacks: (.*)", error.more)
    return error.more.splitlines(), Path(file).read_text()


def test_stopped_trainer_rank_is_named_with_the_activity_of_the_other_rank(running):
    run, fleet = running
    short = replace(fleet.trainer, timeouts=SHORT)
    with stopped(fleet.trainer, 1), pytest.raises(ActorTimeoutError) as caught:
        run(short.call("drop_gradient", limit_s=SHORT.train_s))
    lines, file = report_of(caught.value)
    message = "trainer.drop_gradient gave no answer within 2.1 s (timeouts.train_s)"
    assert str(caught.value).startswith(f"{message}\n")
    assert lines[0].startswith("  trainer[0]: idle for ")
    (place,) = (number for number, line in enumerate(lines) if line.startswith("  trainer[1]: "))
    assert lines[place + 1] == f"    {STOPPED}"
    assert file.startswith(f"{message}\n")
    assert "==== trainer[0]" in file
    assert 'actors/trainer.py", line' in file or 'threads.py", line' in file
    assert run(fleet.trainer.call("drop_gradient", limit_s=600.0)) == [None, None]


def test_stopped_reward_process_is_the_only_one_named(running):
    run, fleet = running
    rollout = replied("1")
    reward = run(fleet.reward.current())
    short = replace(reward, timeouts=SHORT).at_rank(1)
    with stopped(reward, 1), pytest.raises(ActorTimeoutError) as caught:
        run(short.call("score", [[rollout]], True, False, limit_s=SHORT.score_s))
    lines, _ = report_of(caught.value)
    expected = "reward.score of rank 1 of 2 gave no answer within 2.2 s (timeouts.score_s)"
    assert caught.value.message() == expected
    assert [line.split(":")[0] for line in lines if line.startswith("  reward")] == ["  reward[1]"]


def test_collective_timeout_names_the_call_and_reports_all_processes(running, logs):
    """Run this test last: it breaks the process group."""
    run, fleet = running

    async def step():
        try:
            # Rank 0 is called alone, since an error of one rank is not raised until the others have answered.
            await TrainerClient(fleet.trainer.at_rank(0)).forward_backward([SAMPLE, SAMPLE])
        except CollectiveTimeoutError as error:
            return error, await add_hang_report(error, fleet.launcher.roles)

    error, file = run(step())
    assert error.message().startswith(
        "rank 0 of 2 of the trainer: in forward_backward of step 0 the other ranks did not take part within "
        "the deadline of a collective (comm.train_timeout_s; "
    )
    assert file.parent == logs
    headings = re.findall(r"==== (.*?\[\d\]):", file.read_text())
    assert sorted(headings) == ["generator[0]", "reward[0]", "reward[1]", "trainer[0]", "trainer[1]"]
    assert f"  all stacks: {file}" in str(error)
    told = r"\n  trainer\[0\]: idle for .* s; forward_backward failed .* s ago: CollectiveTimeoutError: "
    assert re.search(told, str(error))
