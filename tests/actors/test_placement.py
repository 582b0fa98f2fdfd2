"""Hosts and devices of each role, and layouts that are refused."""

import pytest

from actors.config import LaunchConfig
from tests.support.placed import placed as of_launch

CLUSTER, SHARED = {"hosts": "slurm"}, {"share_gpus": True}


def placed(launch, **numbers):
    return of_launch(LaunchConfig(**launch), **numbers)


@pytest.mark.parametrize(
    ("launch", "num_gpus", "numbers", "trainer", "generators"),
    [
        ({}, 0, {"replicas": 2}, None, [None, None]),
        ({}, 4, {}, (0, 1), [(2,)]),
        ({}, 8, {"replicas": 3, "degree": 2}, (0, 1), [(2, 3), (4, 5), (6, 7)]),
        ({"trainer_gpus": (3, 1)}, 4, {"replicas": 2}, (3, 1), [(0,), (2,)]),
        ({"generator_gpus": (1, 0)}, 4, {"replicas": 2}, (2, 3), [(1,), (0,)]),
        (SHARED, 1, {"trainer": 1}, (0,), [(0,)]),
        (SHARED, 4, {"replicas": 2, "degree": 2}, (0, 1), [(0, 1), (2, 3)]),
        # Simulated hosts divide the devices of this machine; those of a cluster are counted per
        # host.
        ({"hosts": "process", "trainer_hosts": 2}, 4, {"replicas": 2}, (0, 1), [(2,), (3,)]),
        (CLUSTER | {"trainer_hosts": 2, "generator_hosts": 2}, 0,
            {"trainer": 16, "replicas": 2, "degree": 4},
         tuple(range(8)), [(0, 1), (0, 1)]),
        (CLUSTER | {"replicas_per_host": 2}, 0, {"replicas": 3, "degree": 2},
         (0, 1), [(0, 1), (2, 3), (0, 1)]),
        (CLUSTER | {"gpus_per_host": 0}, 0, {}, None, [None]),
    ],
)  # fmt: skip
def test_devices_are_the_chosen_ones_then_the_trainers_then_those_of_each_generator(
    launch, num_gpus, numbers, trainer, generators
):
    placement = placed(launch, num_gpus=num_gpus, **numbers)
    assert placement.trainer.gpus == trainer
    assert [generator.gpus for generator in placement.generators] == generators


def test_roles_have_their_own_hosts_and_small_replicas_may_share_one():
    placement = placed(
        CLUSTER | {"trainer_hosts": 2, "generator_hosts": 2}, trainer=16, replicas=2, degree=4
    )
    assert placement.count_hosts() == {"trainer": 2, "generator0": 2, "generator1": 2}
    assert (placement.trainer.procs_per_host, placement.reward.hosts) == (8, None)
    assert (placement.count_gpus_of("trainer"), placement.count_gpus_of("generator1")) == (8, 2)
    placement = placed(CLUSTER | {"replicas_per_host": 2, "reward_hosts": 1}, replicas=3, degree=2)
    assert [p.hosts for p in placement.generators] == ["generator0", "generator0", "generator1"]
    assert (placement.count_gpus_of("generator0"), placement.reward.hosts) == (4, "reward")
    assert placed(CLUSTER | {"gpus_per_host": 0}).count_gpus_of("trainer") == 0


@pytest.mark.parametrize(
    ("launch", "num_gpus", "numbers", "says"),
    [
        (
            {}, 3, {"replicas": 2},
            r"trainer\.num_procs=2 and generator\.num_replicas=2 of "
            r"generator\.tensor_parallel_degree=1 need "
            "4 GPUs on this machine, which has 3",
        ),
        ({"share_gpus": True}, 1, {"trainer": 1, "replicas": 2}, "need 2 GPUs .* that they share, "
                                                                 "which has 1"),
        ({"trainer_gpus": (0, 1)}, 0, {}, "trainer_gpus and .* must be None: this machine has no "
                                          "GPU"),
        ({"trainer_gpus": (0,)}, 4, {}, r"trainer_gpus=\(0,\): must be 2 devices, one for each "
                                        r"process"),
        ({"trainer_gpus": (0, 4)}, 4, {}, "this machine has 4 GPUs, numbered 0 to 3"),
        ({"generator_gpus": (1, 2)}, 4, {}, r"generator_gpus=\(1, 2\): must be 1 devices, one for"),
        (
            {"trainer_gpus": (0, 1), "generator_gpus": (1,)}, 4, {},
            r"trainer_gpus=\(0, 1\) and launch\.generator_gpus=\(1,\) have devices in common: "
            r"share_gpus=True",
        ),
        (CLUSTER | {"trainer_hosts": 3}, 0, {}, r"launch\.trainer_hosts=3 does not divide trainer"),
        (CLUSTER | {"generator_hosts": 2}, 0, {},
            r"does not divide generator\.tensor_parallel_degree=1"),
        (CLUSTER | {"reward_hosts": 2}, 0, {}, r"launch\.reward_hosts=2 does not divide "
                                               r"reward\.num_procs=1"),
        (CLUSTER | {"replicas_per_host": 2}, 0, {}, r"=2 is more than generator\.num_replicas=1"),
        (CLUSTER | {"gpus_per_host": 1}, 0, {}, r"need 2 GPUs on a host \(launch\.gpus_per_host\), "
                                                r"which has 1"),
        (
            CLUSTER | {"gpus_per_host": 4, "trainer_gpus": (4, 5)}, 0, {},
            r"trainer_gpus=\(4, 5\): must be 2 .* has 4 GPUs, numbered 0 to 3",
        ),
        (CLUSTER | {"gpus_per_host": 0, "trainer_gpus": (0, 1)}, 0, {}, "must be None: a host .* "
                                                                        "has no GPU"),
    ],
)  # fmt: skip
def test_inconsistent_layout_is_refused_by_field(launch, num_gpus, numbers, says):
    with pytest.raises(ValueError, match=says):
        placed(launch, num_gpus=num_gpus, **numbers)
