"""Whole off-policy runs of the command line."""

from pathlib import Path

import pytest

from tests.support.runs import SHORT, run_to_the_end


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_hosts_train_while_two_others_generate_at_most_one_step_ahead(tmp_path: Path) -> None:
    """Hosts simulated on this machine: FSDP over two, and one generator on each of the other
    two.
    """
    run = run_to_the_end(
        tmp_path, "ahead", *SHORT, "--loop.num_steps", "6", "--loop.max_off_policy_steps", "1",
        "--loop.eval_every", "3", "--launch.hosts", "process", "--launch.trainer_hosts", "2",
        "--trainer.num_procs", "2", "--trainer.parallelism.data_parallel_shard_degree", "2",
        "--generator.num_replicas", "2", "--generator.on_update", "keep",
        limit_s=300,
    )  # fmt: skip
    assert run.status == 0, run.output
    steps = run.steps
    assert [step["step"] for step in steps] == list(range(1, 7))
    assert [step["policy_version"] for step in steps] == list(range(1, 7))
    staleness = [step["staleness/max"] for step in steps]
    assert staleness[0] == 0
    assert max(staleness) == 1
    assert {step: e["policy_version"] for step, e in run.evaluations.items()} == {0: 0, 3: 3, 6: 6}
    assert all(step["parity/logprob_diff"] <= 1e-5 for step in steps)
    logs = {path.name for path in (run.folder / "logs").iterdir()}
    assert {"trainer-0.log", "trainer-1.log", "generator_0-0.log", "generator_1-0.log"} <= logs
