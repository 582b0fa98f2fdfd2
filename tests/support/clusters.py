"""Clusters of real actors for tests."""

from __future__ import annotations

from pathlib import Path

from actors.cluster import Cluster
from actors.config import ClusterConfig
from actors.members import LogSettings
from actors.parity import ParityCheck
from actors.recovery import AddEvent, no_event
from rl.models.spec import ModelSpec
from rl.rollouts.rubric import Rubric
from rl.weights.store import WeightStore


async def start_cluster(
    config: ClusterConfig,
    *,
    store: WeightStore,
    check: ParityCheck,
    model_spec: ModelSpec,
    hf_assets_path: str,
    rubric: Rubric,
    failure_folder: Path,
    logs: LogSettings,
    events: AddEvent = no_event,
) -> Cluster:
    """Return a cluster with actors that are set up as in a run."""
    cluster = Cluster(
        config,
        model_spec=model_spec,
        hf_assets_path=hf_assets_path,
        store=store,
        logs=logs,
        check=check,
        rubric=rubric,
        trainer_arguments={"model_spec": model_spec, "failure_folder": str(failure_folder)},
        events=events,
    )
    await cluster.start()
    return cluster
