"""Where a run's metrics go beside metrics.jsonl, which is always written."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, field
from typing import Literal

from rl.config.effect import only_if

INSTALL = "python tools/setup_env.py sinks, or pip install 'relay-rl[sinks]'"

_ENABLED = only_if("enable", True)


@dataclass(kw_only=True, slots=True)
class ConsoleConfig:
    """What a person sees while the run goes."""

    style: Literal["auto", "lines", "off"] = "auto"
    """auto: a live table on a terminal, a line a step elsewhere; lines: a line a step anywhere; off: no
    steps, only what is said beside them."""
    num_rows: int = field(default=12, metadata=only_if("style", "auto"))
    """Steps that the live table shows, the last ones."""

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise ValueError(f"num_rows={self.num_rows}: must be at least 1")


@dataclass(kw_only=True, slots=True)
class TensorBoardConfig:
    """Event files for `tensorboard --logdir outputs`, in tensorboard/ of the run's folder."""

    enable: bool = False
    """Write them; needs the extra `sinks`."""


@dataclass(kw_only=True, slots=True)
class WandbConfig:
    """Weights & Biases."""

    enable: bool = False
    """Send to it; needs the extra `sinks`."""
    mode: Literal["offline", "online"] = field(default="offline", metadata=_ENABLED)
    """offline: into wandb/ of the run's folder, without network, for a later `wandb sync`; online: to the
    server as the run goes, with the key that `wandb login` or WANDB_API_KEY gives."""
    project: str = field(default="relay", metadata=_ENABLED)
    """That the run belongs to."""
    entity: str | None = field(default=None, metadata=_ENABLED)
    """Team or user; None is the key's own."""
    group: str | None = field(default=None, metadata=_ENABLED)
    """Runs of one group are shown together."""
    tags: tuple[str, ...] = field(default=(), metadata=_ENABLED)
    """Of the run."""

    def __post_init__(self) -> None:
        _check_project(self.project)


@dataclass(kw_only=True, slots=True)
class TrackioConfig:
    """Trackio, a local dashboard: `trackio show`."""

    enable: bool = False
    """Write to its database on this machine, in the folder that TRACKIO_DIR names, by default in the cache of
    Hugging Face; needs the extra `sinks`."""
    project: str = field(default="relay", metadata=_ENABLED)
    """That the run belongs to."""
    group: str | None = field(default=None, metadata=_ENABLED)
    """Runs of one group are shown together."""

    def __post_init__(self) -> None:
        _check_project(self.project)


@dataclass(kw_only=True, slots=True)
class SinksConfig:
    """A sink that fails or hangs never stops or delays training: docs/metrics.md."""

    console: ConsoleConfig = field(default_factory=ConsoleConfig)
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    trackio: TrackioConfig = field(default_factory=TrackioConfig)
    write_s: float = 60.0
    """Seconds after which a sink that has not taken a step's metrics is said to hang."""
    close_s: float = 30.0
    """Seconds that sinks have at the end of the run to take what they have not yet; the rest is left out."""

    def __post_init__(self) -> None:
        for name, value in (("write_s", self.write_s), ("close_s", self.close_s)):
            if not 0.0 < value < math.inf:
                raise ValueError(f"{name}={value}: must be above 0 and finite")

    @property
    def enabled(self) -> tuple[str, ...]:
        """Names of those that another package writes; each is that of its package too."""
        parts = {
            "tensorboard": self.tensorboard.enable,
            "wandb": self.wandb.enable,
            "trackio": self.trackio.enable,
        }
        return tuple(name for name, enable in parts.items() if enable)


def check_sinks(config: SinksConfig, *, prefix: str = "sinks") -> None:
    """Whether what the sinks need is there, before anything starts.

    Raises:
        ValueError: a package is not installed, or W&B is to be online and has no key.
    """
    check_installed(config, prefix=prefix)
    if config.wandb.enable and config.wandb.mode == "online":
        import wandb

        wandb.setup(wandb.Settings(silent=True))
        if not wandb.login(prompt=False, verify=False):
            raise ValueError(
                f"{prefix}.wandb.mode='online': there is no key for W&B. Run `wandb login`, set "
                "WANDB_API_KEY, or choose offline"
            )
    if config.trackio.enable:
        from trackio.utils import TRACKIO_DIR, get_storage_mode

        if get_storage_mode() != "sqlite":
            raise ValueError(
                f"{prefix}.trackio.enable=True: {TRACKIO_DIR}, where trackio keeps its database, is on a "
                "file system of the network. Let TRACKIO_DIR name a folder of this machine, or set it to "
                "False"
            )


def check_installed(config: SinksConfig, *, prefix: str = "sinks") -> None:
    """The part of `check_sinks` that imports nothing.

    Raises:
        ValueError: a package is not installed.
    """
    for name in config.enabled:
        if not _is_installed(name):
            raise ValueError(
                f"{prefix}.{name}.enable=True: the package {name} is not installed. Install the extra "
                f"`sinks` ({INSTALL}), or set it to False"
            )


def _is_installed(package: str) -> bool:
    found = importlib.util.find_spec(package)
    # A folder of that name, as W&B makes one in the working directory, is a package without a file.
    return found is not None and found.origin is not None


def _check_project(project: str) -> None:
    if not project or set(project) & set("/\\#?%:"):
        raise ValueError(f"project={project!r}: must be a name without / \\ # ? % or :")
