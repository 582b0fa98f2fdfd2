"""Hosts from Kubernetes: a MonarchMesh resource for each group of hosts, whose pods are the hosts.

A module of its own, since it needs the package `kubernetes`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kubernetes import client
from monarch.job.kubernetes import ImageSpec, KubeConfig, KubernetesJob

from actors.config import KubernetesConfig
from actors.launch.cleanup import RUN
from actors.launch.compat import KubernetesHooks, hide_job_logs
from rl.weights import SETTINGS

hide_job_logs()


class PodsOfRun(KubernetesHooks, KubernetesJob):
    """Monarch's job, whose pods also get Monarch's settings and the claim with the run's folder."""

    def __init__(self, *, config: KubernetesConfig, timeout_s: float) -> None:
        kubeconfig = None if config.kubeconfig is None else KubeConfig.from_path(config.kubeconfig)
        super().__init__(
            namespace=config.namespace, timeout=max(1, round(timeout_s)), kubeconfig=kubeconfig
        )
        self.config = config

    def extend_pod(self, template: Any) -> None:
        """Add the settings that Monarch reads when it is loaded, and the run's folder."""
        container = template.spec.containers[0]
        for name in SETTINGS:
            container.env.append(client.V1EnvVar(name=name, value=os.environ[name]))

        claim = self.config.volume_claim
        if claim is None:
            return
        source = client.V1PersistentVolumeClaimVolumeSource(claim_name=claim)
        volume = client.V1Volume(name="run", persistent_volume_claim=source)
        mount = client.V1VolumeMount(name="run", mount_path=self.config.volume_path)
        template.spec.volumes = [*(template.spec.volumes or ()), volume]
        container.volume_mounts = [*(container.volume_mounts or ()), mount]


def name_mesh(group: str, *, job_name: str) -> str:
    """Return the name of a group's resource, unique in the namespace."""
    return f"{job_name}{RUN}{group}"


def make_job(
    config: KubernetesConfig,
    groups: Mapping[str, int],
    *,
    gpus_of: Mapping[str, int],
    job_name: str,
    timeout_s: float,
) -> PodsOfRun:
    """Return the job of these groups of hosts, which is not yet applied.

    Args:
        groups: number of hosts of each group.
        gpus_of: number of devices of each host of a group.
        timeout_s: longest wait for the hosts.
    """
    assert config.image is not None, "refused by rl/run_rules.py"
    job = PodsOfRun(config=config, timeout_s=timeout_s)
    for group, num_hosts in groups.items():
        resources: dict[str, Any] = {}
        if gpus_of[group]:
            resources[config.gpu_resource] = gpus_of[group]
        if config.cpus is not None:
            resources["cpu"] = config.cpus
        if config.memory is not None:
            resources["memory"] = config.memory
        # Without a size a pod has 64 MB of /dev/shm, too little for NCCL.
        image = ImageSpec(
            config.image, resources=resources or None, shared_memory_size=config.shared_memory
        )
        name = name_mesh(group, job_name=job_name)
        job.add_mesh(name, num_hosts, image_spec=image, port=config.port)
    return job
