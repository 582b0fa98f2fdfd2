"""Settings of a run and of the actors that it starts; `actors.preflight.checks` compares them with
each other.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field, fields
from typing import Literal

from actors.agents import AgentEndpoint
from actors.generator import VLLMGenerator
from actors.reward import RewardActor
from actors.trainer import PolicyTrainer
from rl.agents.task import AgentTask
from rl.config.configurable import HIDDEN, ONE_RUN, Configurable, only_if, unless
from rl.config.tree import check_bounds, has_members
from rl.ledger.config import LedgerConfig
from rl.loop.loop import Loop
from rl.loop.warmup import SupervisedWarmup
from rl.models.spec import ModelSpec
from rl.observability.machine import LimitsConfig
from rl.observability.recorder import RecorderConfig
from rl.observability.run_folder import NO_RUNS
from rl.observability.sinks import SinksConfig
from rl.observability.spans import TimelineConfig
from rl.rollouts.renderer import RendererConfig
from rl.tasks.task import Task
from rl.weights.store import WeightStore

Hosts = Literal["this", "process", "slurm", "kubernetes"]
Strategy = Literal["least_loaded", "round_robin", "sticky"]

# The formats that sbatch reads: minutes, min:sec, h:min:sec, days-h, days-h:min, days-h:min:sec.
_SLURM_TIME = re.compile(r"(\d+|\d+:\d{2}|\d+:\d{2}:\d{2}|\d+-\d{1,2}(:\d{2}){0,2})")
# Options of sbatch with which it makes several jobs or none, elsewhere, waits for their end, or
# does not answer.
_NOT_ONE_JOB = re.compile(r"--(array|clusters?|wait|wrap|test-only|quiet)([ =].*)?|-[aMWQ].*")
_SLURM_MEMORY = re.compile(r"\d+[KMGT]?")
_WORD = re.compile(r"\S+")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|[MGTP]|[KMGTP]i)?")
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_RESOURCE = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?")
_JOB_NAME = re.compile(r"[a-z][a-z0-9]{0,29}")


@dataclass(kw_only=True, slots=True)
class Timeouts:
    """Longest waits for an actor, in seconds; after one of them the run stops with an error."""

    start_s: float = 600.0
    """Time for the processes of a role to start: Python, torch, and their connection. A cold disk,
    a network file system or a busy machine can take minutes."""
    setup_s: float = 600.0
    """Time to import, to load the model and to start the engine."""
    generate_s: float = 1800.0
    """Time for all completions of a step or of an evaluation."""
    train_s: float = 1800.0
    """Time of one forward_backward, forward, optim_step or compute_logprobs."""
    score_s: float = 600.0
    """Time to score one request to a reward process, on top of what reward.time_limit_s allows to
    the reward functions of its rollouts and of earlier requests."""
    sync_s: float = 600.0
    """Time of a push of the weights by all trainer ranks, or of a pull by all ranks of a generator;
    a pull that first finishes running completions (generator.on_update 'drain') gets generate_s on
    top."""
    checkpoint_s: float = 1800.0
    """Time to save or load a checkpoint."""
    close_s: float = 20.0
    """Time for an actor's clean end; its process is killed afterwards in any case."""

    def __post_init__(self) -> None:
        check_bounds(self, *(f.name for f in fields(self)), above=0)


@dataclass(kw_only=True, slots=True)
class RecoveryConfig:
    """Limits of restarts of lost processes."""

    max_restarts: int = 3
    """Restarts of each role (the trainer, a generator, the reward processes) allowed within
    `window_s`; one more loss ends the run. 0: the first lost process ends it."""
    window_s: float = field(default=3600.0, metadata=unless("max_restarts", 0))
    """Age in seconds after which a restart is no longer counted."""
    pause_s: float = field(default=1.0, metadata=unless("max_restarts", 0))
    """Wait in seconds before the second restart of a role within `window_s`, doubled before each
    further one; the first restart is immediate."""
    max_pause_s: float = field(default=60.0, metadata=unless("max_restarts", 0))
    """Longest such wait, in seconds."""

    def __post_init__(self) -> None:
        check_bounds(self, "max_restarts", "pause_s", at_least=0)
        check_bounds(self, "max_pause_s", at_least=0)
        check_bounds(self, "window_s", above=0)


@dataclass(kw_only=True, slots=True)
class ParityConfig:
    """Comparison of trainer and generators after every sync of the weights."""

    enable: bool = True
    """Comparison of logprobs on a fixed text; checksums of the weights are compared in any case."""
    num_tokens: int = field(default=32, metadata=only_if("enable", True))
    """Maximum length of the text in tokens; the text is an evaluation problem's prompt with its
    answer.
    """
    max_logprob_diff: float | None = field(default=None, metadata=only_if("enable", True))
    """Largest accepted mean difference, in nats a token; None: by the coarser dtype of trainer and
    generator
    0.001 (float32), 0.05 (float16), 0.1 (bfloat16), 0.3 (a converter to float8), and 0 in the
    batch-invariant mode on CPUs, where both have the same kernels."""

    def __post_init__(self) -> None:
        # A token and its successor: the first token of a text has no logprob.
        check_bounds(self, "num_tokens", at_least=2)
        check_bounds(self, "max_logprob_diff", at_least=0)


@dataclass(kw_only=True, slots=True)
class SlurmConfig:
    """Options of `sbatch` for the one job that holds all hosts of the run."""

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
    """Port of the host's process on each node."""
    log_folder: str = "slurm_logs"
    """Folder for the hosts' own output; all nodes must be able to write to it."""

    def __post_init__(self) -> None:
        # Ports below 1024 are root's.
        check_bounds(self, "port", at_least=1024, at_most=65535)
        _check_pattern(
            "time_limit", self.time_limit, _SLURM_TIME, "such as 90, 12:00:00 or 2-00:00"
        )
        _check_pattern(
            "memory_per_host", self.memory_per_host, _SLURM_MEMORY, "such as 512G or 64000M"
        )
        for name in ("partition", "account", "qos"):
            _check_pattern(name, getattr(self, name), _WORD, "a name without spaces, or None")
        check_bounds(self, "cpus_per_host", at_least=1)
        # They are split into words when the job is submitted, which must not fail at that point.
        for arg in self.sbatch_args:
            try:
                shlex.split(arg)
            except ValueError as error:
                raise ValueError(f"sbatch_args has {arg!r}: {error}: close it") from error
            if not arg.startswith("-"):
                raise ValueError(
                    f"sbatch_args has {arg!r}: each must be one option of sbatch, as --name=value "
                    "or -n value"
                )
            if _NOT_ONE_JOB.fullmatch(arg):
                raise ValueError(
                    f"sbatch_args has {arg!r}: must leave one job that sbatch submits and names: "
                    "remove it"
                )


@dataclass(kw_only=True, slots=True)
class KubernetesConfig:
    """Pods of a run; Monarch's operator makes them from MonarchMesh resources."""

    namespace: str = "default"
    """Namespace of all pods."""
    image: str | None = None
    """Container image with this project, and its Python first on the PATH; there is no default."""
    cpus: str | None = None
    """CPU cores of each pod, such as 16 or 500m; None: not limited."""
    memory: str | None = None
    """Memory of each pod, such as 256Gi; None: not limited."""
    shared_memory: str = "16Gi"
    """Size of each pod's /dev/shm, used by NCCL and by weights on their way between processes of a
    host.
    """
    gpu_resource: str = "nvidia.com/gpu"
    """The cluster's resource name for a GPU."""
    volume_claim: str | None = None
    """PersistentVolumeClaim with the run's folder and the model's files, mounted in every pod."""
    volume_path: str = "/shared"
    """Mount path of `volume_claim`."""
    port: int = 26600
    """Port of the host's process in each pod."""
    kubeconfig: str | None = None
    """File to reach the cluster with from outside; None: this process is in a pod of the cluster.
    """

    def __post_init__(self) -> None:
        # Ports below 1024 are root's.
        check_bounds(self, "port", at_least=1024, at_most=65535)
        _check_pattern(
            "namespace", self.namespace, _DNS_LABEL, "a name of lowercase letters, digits and -"
        )
        for name in ("cpus", "memory", "shared_memory"):
            _check_pattern(
                name, getattr(self, name), _QUANTITY, "a quantity such as 16, 500m or 64Gi"
            )
        _check_pattern(
            "gpu_resource",
            self.gpu_resource,
            _RESOURCE,
            "a name with its domain such as nvidia.com/gpu",
        )
        _check_pattern(
            "volume_claim",
            self.volume_claim,
            _DNS_NAME,
            "a name of lowercase letters, digits, - and .",
        )
        if not self.volume_path.startswith("/") or self.volume_path.rstrip("/") in ("", "/dev/shm"):
            raise ValueError(
                f"volume_path={self.volume_path!r}: must be an absolute path, and not /dev/shm, "
                "which every pod has"
            )


@dataclass(kw_only=True, slots=True)
class LaunchConfig:
    """Hosts and devices of the actors."""

    hosts: Hosts = "this"
    """this machine; process: several hosts simulated on it by a process each; or hosts that Monarch
    takes from slurm or kubernetes."""
    trainer_hosts: int = 1
    """Hosts among which the trainer's ranks are divided."""
    generator_hosts: int = 1
    """Hosts of each generator replica, among which its tensor-parallel ranks are divided."""
    replicas_per_host: int = 1
    """Generator replicas that share a host, each with devices of its own; more than 1 requires a
    replica that fits on one host."""
    reward_hosts: int = 0
    """Hosts among which the reward processes are divided; 0: the controller's host."""
    gpus_per_host: int | None = None
    """GPUs of each host of slurm or kubernetes: None is one for each process there, 0 trains on
    CPUs. GPUs of this machine are counted."""
    trainer_gpus: tuple[int, ...] | None = None
    """Devices of the trainer, one for each rank on a host; None: the first ones."""
    generator_gpus: tuple[int, ...] | None = None
    """Devices of the generator replicas, assigned in their order; None: those after the trainer's.
    """
    share_gpus: bool | None = None
    """Trainer and generators use the same devices alternately; refused with other hosts than this.
    None: if this machine has GPUs, too few for both, and loop.max_off_policy_steps is 0."""
    isolate_network: bool | None = field(
        default=None, metadata=unless("hosts", "slurm", "kubernetes")
    )
    """Give the actors a network of their own, so that no other user of this machine reaches them.
    None: where the system permits it and no reward actor needs the network; True refuses to start
    without it.
    """
    keep_env: tuple[str, ...] = ()
    """Environment variables with secrets that actors get. Variables that look like one (HF_TOKEN,
    AWS_SECRET_ACCESS_KEY, a URL with a password) are kept from them, but for the key of a judge in
    reward actors.
    """
    job_name: str = field(default="relay", metadata=only_if("hosts", "slurm", "kubernetes"))
    """Start of the names that the job and its hosts get."""
    python: str | None = field(default=None, metadata=unless("hosts", "this"))
    """Path of the Python on the other hosts; None: the path of this process's Python."""
    controller_address: str | None = field(
        default=None, metadata=only_if("hosts", "slurm", "kubernetes")
    )
    """Address of this process for hosts of slurm or kubernetes; None: what its hostname resolves
    to.
    """
    start_timeout_s: float = field(default=86400.0, metadata=unless("hosts", "this"))
    """Longest wait in seconds for slurm or kubernetes to provide the hosts."""
    dry_run: bool = False
    """Check the config, show the placement of the processes, and stop."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig, metadata=only_if("hosts", "slurm"))
    kubernetes: KubernetesConfig = field(
        default_factory=KubernetesConfig, metadata=only_if("hosts", "kubernetes")
    )

    def __post_init__(self) -> None:
        check_bounds(self, "trainer_hosts", "generator_hosts", "replicas_per_host", at_least=1)
        check_bounds(self, "reward_hosts", "gpus_per_host", at_least=0)
        check_bounds(self, "start_timeout_s", above=0)
        # Names of hosts append to it, and Kubernetes permits 63 characters.
        _check_pattern(
            "job_name", self.job_name, _JOB_NAME, "at most 30 lowercase letters and digits"
        )
        # None takes the first free devices; an empty tuple would be a role without any.
        for name in ("trainer_gpus", "generator_gpus"):
            devices = getattr(self, name)
            if devices is not None and (
                not devices or min(devices) < 0 or len(set(devices)) < len(devices)
            ):
                raise ValueError(
                    f"{name}={devices}: must name devices from 0 on, each once, or be None"
                )

    @property
    def on_cluster(self) -> bool:
        """Return whether the hosts are other machines."""
        return self.hosts in ("slurm", "kubernetes")


def _check_pattern(name: str, value: str | None, pattern: re.Pattern[str], valid: str) -> None:
    # fullmatch, as a pattern with $ accepts a line end after the value.
    if value is not None and not pattern.fullmatch(value):
        raise ValueError(f"{name}={value!r}: must be {valid}")


@dataclass(kw_only=True, slots=True)
class ClusterConfig(Configurable.Config):
    """Settings of all actors: what `actors.cluster.cluster.Cluster` starts."""

    trainer: PolicyTrainer.Config
    generator: VLLMGenerator.Config
    reward: RewardActor.Config = field(default_factory=RewardActor.Config)
    agents: AgentEndpoint.Config | None = None
    """Endpoint of the agents of a task that has some (`rl.agents.task`); None for other tasks."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)


@dataclass(kw_only=True, slots=True)
class RunConfig(ClusterConfig):
    """Root config of a run: a tree of the configs of its components."""

    name: str | None = field(default=None, metadata=ONE_RUN)
    """Folder of the run inside `dump_folder`; by default the config's name and a time stamp."""
    dump_folder: str = "outputs"
    """Folder of all runs and of the starting points that they share."""
    overwrite: bool = field(default=False, metadata=ONE_RUN)
    """Permission to replace the folder of an earlier run with this name."""
    description: str = ""
    """A line for the reader of config.json."""
    print_config: bool = False
    """Show the resolved config before the start."""
    console_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "WARNING"
    """Lowest level of the actors' log records that also go to the console."""
    seed: int = 0
    """Seed of the starting point, of the order of problems and of the sampling."""
    batch_invariant: bool | None = False
    """A request's completion does not depend on the other requests of its batch, and on CPUs
    trainer and generator compute bit-identical logprobs. None: True on CPUs, False on GPUs."""
    float32_head: bool = False
    """Compute logits in float32 in trainer and generators, whatever the dtype of their other
    products: bfloat16 rounds a logit of 16 by up to 0.06. Costs memory and time in proportion to
    the vocabulary."""
    model: ModelSpec | None = field(metadata=HIDDEN)
    """None takes family and sizes from `hf_assets_path`."""
    hf_assets_path: str | None = None
    """A model to start from, without warm-up: a Hugging Face folder (config, tokenizer,
    safetensors), a GGUF file, package:NAME, an installed package with one, or owner/name on the
    Hugging Face hub, where no such folder exists; None makes the starting point here."""
    hf_revision: str | None = field(default=None, metadata=unless("hf_assets_path", None))
    """Branch, tag or commit of a model on the hub; None takes its main branch."""
    any_model_size: bool = field(default=False, metadata=unless("hf_assets_path", None))
    """Take the model's family and sizes from `hf_assets_path` instead of requiring those of this
    config.
    """
    task: Configurable.Config
    warmup: SupervisedWarmup.Config | None = field(
        default=None, metadata=only_if("hf_assets_path", None)
    )
    """Supervised steps that make the starting point; their result is kept for later runs."""
    renderer: RendererConfig = field(default_factory=RendererConfig)
    weights: WeightStore.Config = field(default_factory=WeightStore.Config)
    loop: Loop.Config = field(default_factory=Loop.Config)
    router: Strategy = field(default="least_loaded", metadata=unless("generator.num_replicas", 1))
    """Choice of the generator for a prompt; sticky: a session stays with its generator, other
    prompts go where least_loaded sends them."""
    recorder: RecorderConfig = field(default_factory=RecorderConfig)
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    timeline: TimelineConfig = field(default_factory=TimelineConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    sinks: SinksConfig = field(default_factory=SinksConfig)
    parity: ParityConfig = field(default_factory=ParityConfig)

    def __post_init__(self) -> None:
        check_bounds(self, "seed", at_least=0, below=2**63)
        # A config is judged by the class that it builds; anything else is shown by its own class.
        made = getattr(self.task, "owner", type(self.task))
        if not has_members(made, Task):
            raise ValueError(
                f"task={made.__qualname__}: must be the config of a task (rl.tasks.task)"
            )
        plays_agents = issubclass(made, AgentTask)
        if plays_agents != (self.agents is not None):
            raise ValueError(
                f"agents={'None' if plays_agents else '...'}: a task of agents (rl.agents.task) "
                "needs an endpoint, and other tasks have none: set agents to "
                f"{'AgentEndpoint.Config()' if plays_agents else 'None'}"
            )
        # It lies beside the runs in dump_folder, where a run with overwrite would replace it.
        if self.name in NO_RUNS:
            raise ValueError(
                f"name={self.name!r} is a folder that runs share ({', '.join(NO_RUNS)}): choose "
                "another"
            )
