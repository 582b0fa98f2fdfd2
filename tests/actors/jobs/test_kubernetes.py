"""Kubernetes resources of a run, at a server that plays the API."""

import asyncio
import dataclasses
import json
import os

import pytest
from monarch.config import configured

from actors.config import KubernetesConfig, LaunchConfig
from actors.launch.calls import ActorCallError
from actors.launch.hosts import Hosts, make_job
from rl.weights import SETTINGS
from tests.support.fake_kubernetes import KubernetesServer
from tests.support.placed import placed

POD = KubernetesConfig(
    namespace="rl", image="registry/relay:1", cpus="16", memory="64Gi", volume_claim="runs"
)
ROLES = {"trainer": 8, "replicas": 2, "degree": 2, "reward": 4}
PATH = "/apis/monarch.pytorch.org/v1alpha1/namespaces/rl/monarchmeshes"


def launch_at(kubeconfig, **fields):
    pod = dataclasses.replace(POD, kubeconfig=str(kubeconfig))
    return LaunchConfig(
        hosts="kubernetes",
        trainer_hosts=2,
        reward_hosts=1,
        job_name="mine",
        kubernetes=pod,
        **fields,
    )


def test_each_host_group_is_a_resource_with_its_pods_and_devices_which_ends_with_the_job(tmp_path):
    with KubernetesServer() as server, configured():
        launch = launch_at(server.kubeconfig(tmp_path))
        placements = placed(launch, **ROLES)
        job = make_job(launch, placements, placements.count_hosts())
        job.apply()
        resources = [*server.resources.values()]
        names = [resource["metadata"]["name"] for resource in resources]
        assert [*server.resources] == [f"{PATH}/{name}" for name in names]
        job.kill()
        assert server.resources == {}
        assert server.requests[-1][0] == "DELETE"
    # The run's part of the name lets several runs share a namespace.
    assert [name[:4] for name in names] == ["mine"] * 4
    assert [name[12:] for name in names] == ["trainer", "generator0", "generator1", "reward"]
    assert [resource["spec"]["replicas"] for resource in resources] == [2, 1, 1, 1]
    templates = [resource["spec"]["podTemplate"]["spec"] for resource in resources]
    containers = [template["containers"][0] for template in templates]
    others = {"cpu": "16", "memory": "64Gi"}
    assert [container["resources"]["limits"] for container in containers] == [
        {"nvidia.com/gpu": "4"} | others, {"nvidia.com/gpu": "2"} | others,
        {"nvidia.com/gpu": "2"} | others, others,
    ]  # fmt: skip
    assert containers[0]["image"] == "registry/relay:1"
    assert containers[0]["volumeMounts"] == [
        {"mountPath": "/dev/shm", "name": "dev-shm"}, {"mountPath": "/shared", "name": "run"},
    ]  # fmt: skip
    assert templates[0]["volumes"] == [
        {"name": "dev-shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}},
        {"name": "run", "persistentVolumeClaim": {"claimName": "runs"}},
    ]
    env = {variable["name"]: variable.get("value") for variable in containers[0]["env"]}
    assert {name: env[name] for name in SETTINGS} == {name: os.environ[name] for name in SETTINGS}
    # Each pod finds its own identity by its number.
    assert len(set(json.loads(env["MONARCH_SERVICE_PROC_IDS"]))) == 2


def test_unreachable_cluster_is_an_error(tmp_path):
    with KubernetesServer() as gone:
        kubeconfig = gone.kubeconfig(tmp_path)
    launch = launch_at(kubeconfig, controller_address="127.0.0.1")

    async def start():
        hosts = Hosts(launch, placed(launch, **ROLES))
        try:
            await hosts.start()
        finally:
            await hosts.end()

    with (
        configured(),
        pytest.raises(ActorCallError, match=r"no hosts from kubernetes job 'mine': .*refused"),
    ):
        asyncio.run(start())
