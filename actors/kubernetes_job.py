"""Hosts from Kubernetes: a MonarchMesh resource for each group of hosts, whose pods are the hosts.

A module of its own, since it needs the package `kubernetes`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kubernetes import client
from monarch._src.job.kubernetes import ImageSpec, KubeConfig, KubernetesJob

from actors.compat import quiet_jobs
from actors.config import KubernetesConfig, LaunchConfig
from actors.processes import RUN
from rl.weights import SETTINGS

quiet_jobs()


class PodsOfRun(KubernetesJob):
    """Monarch's job, whose pods also get Monarch's settings of this process and the claim with the
    run's folder.
    """

    def __init__(self, *, config: KubernetesConfig, timeout_s: float) -> None:
        kubeconfig = None if config.kubeconfig is None else KubeConfig.from_path(config.kubeconfig)
        super().__init__(
            namespace=config.namespace, timeout=max(1, round(timeout_s)), kubeconfig=kubeconfig
        )
        self.config = config

    def _build_worker_pod_template(  # static there
        self, image_spec: ImageSpec, port: int, service_proc_ids: list[Any]
    ) -> client.V1PodTemplateSpec:
        template = KubernetesJob._build_worker_pod_template(image_spec, port, service_proc_ids)
        container = template.spec.containers[0]
        container.env += [client.V1EnvVar(name=name, value=os.environ[name]) for name in SETTINGS]
        claim = self.config.volume_claim
        if claim is not None:
            source = client.V1PersistentVolumeClaimVolumeSource(claim_name=claim)
            volume = client.V1Volume(name="run", persistent_volume_claim=source)
            mount = client.V1VolumeMount(name="run", mount_path=self.config.volume_path)
            template.spec.volumes = [*(template.spec.volumes or ()), volume]
            container.volume_mounts = [*(container.volume_mounts or ()), mount]
        return template


def mesh_name(launch: LaunchConfig, group: str) -> str:
    """Return the name of a group's resource, unique in the namespace."""
    return f"{launch.job_name}{RUN}{group}"


def make_job(
    launch: LaunchConfig, groups: Mapping[str, int], *, gpus_of: Mapping[str, int]
) -> PodsOfRun:
    """Return the job of these groups of hosts, with the devices of each host; it is not yet
    applied.
    """
    config = launch.kubernetes
    assert config.image is not None, "refused by LaunchConfig"
    job = PodsOfRun(config=config, timeout_s=launch.start_timeout_s)
    for group, num_hosts in groups.items():
        asked = {
            config.gpu_resource: gpus_of[group] or None,
            "cpu": config.cpus,
            "memory": config.memory,
        }
        resources = {name: value for name, value in asked.items() if value is not None}
        image = ImageSpec(
            config.image, resources=resources or None, shared_memory_size=config.shared_memory
        )
        job.add_mesh(mesh_name(launch, group), num_hosts, image_spec=image, port=config.port)
    return job
