"""A whole run one step off-policy, on four hosts: a mixture of experts trains on two of them, and
a generator runs on each of the other two."""

import math

import pytest

from rl.models.files.hf import HFFolder
from tests.support.runs import run_to_the_end

LIMIT_S = 400


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 100)
def test_two_hosts_train_a_mixture_while_two_others_generate_at_most_one_step_ahead(tmp_path):
    """Hosts are simulated on this machine: FSDP over two, and one generator on each other one."""
    run = run_to_the_end(
        tmp_path, "ahead", "--module", "tests.support.faulty_configs", "--config", "mixture",
        "--loop.num_steps", "6", "--loop.max_off_policy_steps", "1",
        "--loop.eval_every", "3", "--launch.hosts", "process", "--launch.trainer_hosts", "2",
        "--trainer.num_procs", "2", "--trainer.parallelism.data_parallel_shard_degree", "2",
        "--generator.num_replicas", "2", "--generator.on_update", "keep",
        # Random replies do not end within four tokens, which is found and told.
        "--loop.sampling.max_tokens", "4",
        limit_s=LIMIT_S,
    )  # fmt: skip
    assert run.status == 0, run.output
    assert "\nfinding: Replies are cut off. Since step 1 " in run.output
    assert "\n  finding         Replies are cut off. Since step 1 " in run.output
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
    # The bias that balances the experts moves in each step, and reaches the generators: else the
    # logprobs of the check after a push would differ.
    for step in steps:
        assert math.isfinite(step["loss/mean"])
        assert 1.0 <= step["experts/busiest_mean"] <= step["experts/busiest_max"] <= 8.0
    exported = HFFolder(run.folder / "checkpoints" / "hf", tokenizer=True)
    assert sum("e_score_correction_bias" in name for name in exported.shapes) == 3
