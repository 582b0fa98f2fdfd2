"""Where a run's processes are to be: the settings, each checked; `actors.placement` puts them together."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from rl.config.effect import only_if, unless

Hosts = Literal["this", "process", "slurm", "kubernetes"]

# As sbatch reads them: minutes, min:sec, h:min:sec, days-h, days-h:min, days-h:min:sec.
_SLURM_TIME = re.compile(r"(\d+|\d+:\d{2}|\d+:\d{2}:\d{2}|\d+-\d{1,2}(:\d{2}){0,2})")
_SLURM_MEMORY = re.compile(r"\d+[KMGT]?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|[MGTP]|[KMGTP]i)?")
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_JOB_NAME = re.compile(r"[a-z][a-z0-9]{0,29}")


@dataclass(kw_only=True, slots=True)
class SlurmConfig:
    """What `sbatch` is asked for, for the one job that holds all hosts of the run."""

    partition: str | None = None
    """Partition to submit to; None: the cluster's default."""
    account: str | None = None
    """Account that is charged; None: the cluster's default."""
    qos: str | None = None
    """Quality of service; None: the cluster's default."""
    time_limit: str | None = None
    """Longest time of the job, such as 12:00:00 or 2-00; None: the cluster's default."""
    exclusive: bool = True
    """No other job on these nodes."""
    cpus_per_host: int | None = None
    """CPU cores of each node; None: the cluster's default."""
    memory_per_host: str | None = None
    """Memory of each node, such as 512G; None: the cluster's default."""
    sbatch_args: tuple[str, ...] = ()
    """Further options of sbatch, each as --name=value."""
    port: int = 22222
    """Where the host's process listens on each node."""
    log_folder: str = "slurm_logs"
    """Of the hosts' own output; one that all nodes can write to."""

    def __post_init__(self) -> None:
        _check_port(self.port)
        _check_pattern("time_limit", self.time_limit, _SLURM_TIME, "such as 90, 12:00:00 or 2-00:00")
        _check_pattern("memory_per_host", self.memory_per_host, _SLURM_MEMORY, "such as 512G or 64000M")
        for name in ("partition", "account", "qos"):
            value = getattr(self, name)
            if value is not None and (not value or re.search(r"\s", value)):
                raise ValueError(f"{name}={value!r}: must be a name without spaces, or None")
        if self.cpus_per_host is not None and self.cpus_per_host < 1:
            raise ValueError(f"cpus_per_host={self.cpus_per_host}: must be at least 1, or None")
        for arg in self.sbatch_args:
            if not arg.startswith("-") or "\n" in arg:
                raise ValueError(
                    f"sbatch_args has {arg!r}: each must be one option of sbatch, as --name=value or -n value"
                )


@dataclass(kw_only=True, slots=True)
class KubernetesConfig:
    """What the pods of a run are made of; Monarch's operator makes them from MonarchMesh resources."""

    namespace: str = "default"
    """Namespace of all pods."""
    image: str | None = None
    """Container image with this project, and its Python first on the PATH; there is no default."""
    cpus: str | None = None
    """CPU cores of each pod, such as 16 or 500m; None: not limited."""
    memory: str | None = None
    """Memory of each pod, such as 256Gi; None: not limited."""
    shared_memory: str = "16Gi"
    """Size of each pod's /dev/shm: NCCL's, and the weights' on their way between processes of a host."""
    gpu_resource: str = "nvidia.com/gpu"
    """What the cluster calls a GPU."""
    volume_claim: str | None = None
    """PersistentVolumeClaim with the run's folder and the model's files, mounted in every pod."""
    volume_path: str = "/shared"
    """Where `volume_claim` is mounted."""
    port: int = 26600
    """Where the host's process listens in each pod."""
    kubeconfig: str | None = None
    """File to reach the cluster with from outside; None: this process is in a pod of the cluster."""

    def __post_init__(self) -> None:
        _check_port(self.port)
        _check_pattern("namespace", self.namespace, _DNS_LABEL, "a name of lowercase letters, digits and -")
        for name in ("cpus", "memory", "shared_memory"):
            _check_pattern(name, getattr(self, name), _QUANTITY, "a quantity such as 16, 500m or 64Gi")
        if not self.volume_path.startswith("/"):
            raise ValueError(f"volume_path={self.volume_path!r}: must be an absolute path")


@dataclass(kw_only=True, slots=True)
class LaunchConfig:
    """Which hosts and devices the actors run on."""

    hosts: Hosts = "this"
    """this machine; process: several hosts simulated on it by a process each; or hosts that Monarch takes
    from slurm or kubernetes."""
    trainer_hosts: int = 1
    """Hosts that the trainer's ranks are shared out to."""
    generator_hosts: int = 1
    """Hosts of each generator replica, over which its tensor-parallel ranks are shared out."""
    replicas_per_host: int = 1
    """Generator replicas that share a host, each with devices of its own; above 1 only where a replica
    fits on one host."""
    reward_hosts: int = 0
    """Hosts that the reward processes are shared out to; 0: where the controller runs."""
    gpus_per_host: int | None = None
    """GPUs of each host of slurm or kubernetes: None is one for each process there, 0 trains on CPUs.
    GPUs of this machine are counted."""
    trainer_gpus: tuple[int, ...] | None = None
    """Devices for the trainer, one for each rank on a host; None: the first ones."""
    generator_gpus: tuple[int, ...] | None = None
    """Devices for the generator replicas, shared out in their order; None: those after the trainer's."""
    share_gpus: bool = False
    """Trainer and generators have the same devices and take turns; refused with other hosts than this."""
    job_name: str = field(default="relay", metadata=only_if("hosts", "slurm", "kubernetes"))
    """Start of the names that the job and its hosts get."""
    python: str | None = field(default=None, metadata=unless("hosts", "this"))
    """Path of the Python on the other hosts; None: where it is on this one."""
    controller_address: str | None = field(default=None, metadata=only_if("hosts", "slurm", "kubernetes"))
    """Where hosts of slurm or kubernetes reach this process; None: what its hostname resolves to."""
    start_timeout_s: float = field(default=86400.0, metadata=unless("hosts", "this"))
    """Longest wait for slurm or kubernetes to provide the hosts."""
    dry_run: bool = False
    """Check the config, show which process goes where and what would be submitted, and stop."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig, metadata=only_if("hosts", "slurm"))
    kubernetes: KubernetesConfig = field(
        default_factory=KubernetesConfig, metadata=only_if("hosts", "kubernetes")
    )

    def __post_init__(self) -> None:
        for name, least in (
            ("trainer_hosts", 1),
            ("generator_hosts", 1),
            ("replicas_per_host", 1),
            ("reward_hosts", 0),
            ("gpus_per_host", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value}: must be at least {least}")
        if not self.start_timeout_s > 0:
            raise ValueError(f"start_timeout_s={self.start_timeout_s}: must be above 0")
        _check_pattern("job_name", self.job_name, _JOB_NAME, "at most 30 lowercase letters and digits")
        for name in ("trainer_gpus", "generator_gpus"):
            _check_devices(name, getattr(self, name))
        self._check_hosts()

    def check(self) -> None:
        """Once more what was checked when this was made: a field may have been edited since.

        Raises:
            ValueError: names the field.
        """
        for path, node in (
            ("launch", self),
            ("launch.slurm", self.slurm),
            ("launch.kubernetes", self.kubernetes),
        ):
            try:
                node.__post_init__()
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error

    def _check_hosts(self) -> None:
        if self.hosts == "this":
            for name, default in (("trainer_hosts", 1), ("generator_hosts", 1), ("replicas_per_host", 1)):
                if getattr(self, name) != default:
                    raise ValueError(
                        f"{name}={getattr(self, name)} with hosts='this', which is one host: choose process, "
                        "slurm or kubernetes"
                    )
            if self.reward_hosts:
                raise ValueError(f"reward_hosts={self.reward_hosts} with hosts='this': must be 0")
        if not self.on_cluster and self.gpus_per_host is not None:
            raise ValueError(
                f"gpus_per_host={self.gpus_per_host} with hosts={self.hosts!r}: GPUs of this machine are "
                "counted; choose them by trainer_gpus and generator_gpus, or leave it None"
            )
        if self.replicas_per_host > 1 and self.generator_hosts > 1:
            raise ValueError(
                f"replicas_per_host={self.replicas_per_host} with generator_hosts={self.generator_hosts}: "
                "replicas that share a host need to fit on it, so one of the two must be 1"
            )
        if self.hosts == "kubernetes" and not self.kubernetes.image:
            raise ValueError("kubernetes.image=None: hosts='kubernetes' needs an image with this project")
        if self.share_gpus and self.hosts != "this":
            raise ValueError(f"share_gpus=True with hosts={self.hosts!r}: works with hosts='this' only")
        if self.share_gpus and self.generator_gpus is not None:
            raise ValueError(
                f"generator_gpus={self.generator_gpus} with share_gpus=True: the generators have the "
                "trainer's devices, so leave it None"
            )

    @property
    def on_cluster(self) -> bool:
        """Whether the hosts are other machines."""
        return self.hosts in ("slurm", "kubernetes")


def _check_devices(name: str, devices: tuple[int, ...] | None) -> None:
    if devices is None:
        return
    if not devices or min(devices) < 0:
        raise ValueError(f"{name}={devices}: must name devices from 0 on, or be None")
    if len(set(devices)) < len(devices):
        raise ValueError(f"{name}={devices}: names a device twice")


def _check_port(port: int) -> None:
    if not 1024 <= port <= 65535:
        raise ValueError(f"port={port}: must be between 1024 and 65535")


def _check_pattern(name: str, value: str | None, pattern: re.Pattern[str], valid: str) -> None:
    if value is not None and not pattern.fullmatch(value):
        raise ValueError(f"{name}={value!r}: must be {valid}")
