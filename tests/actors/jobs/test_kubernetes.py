"""Kubernetes resources of a run."""

import asyncio
import dataclasses
import json
import os

import pytest
from monarch.config import configured

from actors.calls import ActorCallError
from actors.config import KubernetesConfig, LaunchConfig
from actors.hosts import Hosts, make_job
from rl.weights.monarch_env import SETTINGS
from tests.support.fake_kubernetes import KubernetesServer
from tests.support.placed import placed

POD = KubernetesConfig(
    namespace="rl",
    image="registry/relay:1",
    cpus="16",
    memory="64Gi",
    volume_claim="runs",
    volume_path="/runs",
)
LAUNCH = LaunchConfig(hosts="kubernetes", trainer_hosts=2, reward_hosts=1, job_name="mine", kubernetes=POD)
ROLES = {"trainer": 8, "replicas": 2, "degree": 2, "reward": 4}
IDENTITIES = "MONARCH_SERVICE_PROC_IDS"


@pytest.fixture
def resources(tmp_path):
    """The resources that Monarch creates, which end with the job."""
    with KubernetesServer() as server, configured():
        pod = dataclasses.replace(POD, kubeconfig=str(server.kubeconfig(tmp_path)))
        launch = dataclasses.replace(LAUNCH, kubernetes=pod)
        placements = placed(launch, **ROLES)
        job = make_job(launch, placements, placements.host_groups())
        job.apply()
        created = dict(server.resources)
        yield list(created.values())
        job.kill()
        assert server.resources == {}
        assert server.requests[-1][0] == "DELETE"
    path = "/apis/monarch.pytorch.org/v1alpha1/namespaces/rl/monarchmeshes"
    assert list(created) == [f"{path}/{r['metadata']['name']}" for r in created.values()]


def test_each_host_group_is_a_resource_with_its_pods_and_devices(resources):
    assert {(r["kind"], r["apiVersion"]) for r in resources} == {
        ("MonarchMesh", "monarch.pytorch.org/v1alpha1")
    }
    assert {r["metadata"]["namespace"] for r in resources} == {"rl"}
    names = [r["metadata"]["name"] for r in resources]
    # The run's part of the name lets several runs share a namespace.
    assert [name[:4] for name in names] == ["mine"] * 4
    assert [name[12:] for name in names] == ["trainer", "generator0", "generator1", "reward"]
    assert [r["spec"]["replicas"] for r in resources] == [2, 1, 1, 1]
    limits = [container(r)["resources"]["limits"] for r in resources]
    others = {"cpu": "16", "memory": "64Gi"}
    assert limits == [
        {"nvidia.com/gpu": "4"} | others, {"nvidia.com/gpu": "2"} | others,
        {"nvidia.com/gpu": "2"} | others, others,
    ]  # fmt: skip


def container(resource):
    (only,) = resource["spec"]["podTemplate"]["spec"]["containers"]
    return only


def test_pods_have_the_image_the_shared_memory_and_the_run_folder(resources):
    resource = resources[0]
    assert container(resource)["image"] == "registry/relay:1"
    assert container(resource)["volumeMounts"] == [
        {"mountPath": "/dev/shm", "name": "dev-shm"}, {"mountPath": "/runs", "name": "run"},
    ]  # fmt: skip
    assert resource["spec"]["podTemplate"]["spec"]["volumes"] == [
        {"name": "dev-shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}},
        {"name": "run", "persistentVolumeClaim": {"claimName": "runs"}},
    ]
    env = {variable["name"]: variable.get("value") for variable in container(resource)["env"]}
    assert env["MONARCH_PORT"] == "26600"
    assert {name: env[name] for name in SETTINGS} == {name: os.environ[name] for name in SETTINGS}
    # Each pod finds its own identity by its number.
    assert len(set(json.loads(env[IDENTITIES]))) == 2


def test_unreachable_cluster_is_an_error(tmp_path):
    with KubernetesServer() as gone:
        kubeconfig = str(gone.kubeconfig(tmp_path))
    launch = dataclasses.replace(
        LAUNCH, controller_address="127.0.0.1", kubernetes=dataclasses.replace(POD, kubeconfig=kubeconfig)
    )

    async def start():
        hosts = Hosts(launch, placed(launch, **ROLES))
        try:
            await hosts.start()
        finally:
            await hosts.end()

    with configured(), pytest.raises(ActorCallError, match=r"no hosts from kubernetes job 'mine': .*refused"):
        asyncio.run(start())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"namespace": "My_Space"}, "namespace='My_Space': must be a name of lowercase letters"),
        ({"memory": "64 GB"}, "memory='64 GB': must be a quantity such as 16, 500m or 64Gi"),
        ({"shared_memory": "all"}, "shared_memory='all': must be a quantity"),
        ({"port": 80}, "port=80: must be at least 1024 and at most 65535"),
        ({"volume_path": "runs"}, "volume_path='runs': must be an absolute path"),
    ],
)
def test_values_that_kubernetes_rejects_are_refused_by_field(fields, says):
    with pytest.raises(ValueError, match=says):
        KubernetesConfig(**fields)
