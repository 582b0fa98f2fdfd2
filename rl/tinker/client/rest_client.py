"""Training runs and checkpoints: what there is, and what is to go."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from tinker import types
from tinker.lib.public_interfaces import APIFuture

from rl.tinker.client.convert import capabilities
from rl.tinker.client.deprecated import awaited_variant
from rl.tinker.client.host import Host
from rl.tinker.client.hosts import running_host
from rl.tinker.client.unsupported import refuse
from rl.tinker.service.responses import Checkpoint, Page, TrainingRun
from rl.tinker.service.service import LOCAL_OWNER

if TYPE_CHECKING:
    from tinker.lib.telemetry import Telemetry


class RestClient:
    """Reads and edits what the storage folder holds, of earlier processes too. It needs a backend that is
    running: a `ServiceClient` has to be open. What the hosted service has beyond that (accounts, projects,
    published weights) is not there."""

    def __init__(
        self, _holder: Host | None = None, *, base_url: str | None = None, api_key: str | None = None
    ) -> None:
        """`api_key` is without effect.

        Raises:
            ValueError: a `base_url`, or not exactly one backend is running.
        """
        refuse("base_url", base_url, only=None, why="the official client is for servers")
        self._host = _holder or running_host()
        self._catalogue = self._host.service.catalogue

    def get_server_capabilities(self) -> APIFuture[types.GetServerCapabilitiesResponse]:
        """The base models."""

        async def get() -> types.GetServerCapabilitiesResponse:
            return capabilities(self._catalogue.base_models())

        return self._host.submit(get(), title="get_server_capabilities")

    def get_training_run(
        self, training_run_id: types.ModelID, access_scope: str = "owned"
    ) -> APIFuture[types.TrainingRun]:
        """A run, in memory or with checkpoints; its id is its model's."""
        return self._ask(self._catalogue.training_run, _training_run, training_run_id)

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: str = "owned"
    ) -> APIFuture[types.TrainingRun]:
        """The run that a checkpoint is of."""
        return self._ask(self._catalogue.training_run, _training_run, _run_of(tinker_path))

    def list_training_runs(
        self, limit: int = 20, offset: int = 0, access_scope: str = "owned", project_id: str | None = None
    ) -> APIFuture[types.TrainingRunsResponse]:
        """The newest first."""
        refuse("project_id", project_id, only=None, why="there are no projects")
        return self._ask(self._catalogue.training_runs, _training_runs, limit=limit, offset=offset)

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> APIFuture[types.WeightsInfoResponse]:
        """What a model must be to have these weights."""
        return self._ask(self._catalogue.weights_info, _weights_info, tinker_path)

    def list_checkpoints(self, training_run_id: types.ModelID) -> APIFuture[types.CheckpointsListResponse]:
        """A run's, the newest first."""
        return self._ask(self._catalogue.checkpoints, _checkpoints, training_run_id)

    def list_user_checkpoints(
        self, limit: int = 100, offset: int = 0
    ) -> APIFuture[types.CheckpointsListResponse]:
        """All runs', the newest first."""
        return self._ask(self._catalogue.all_checkpoints, _page_of_checkpoints, limit=limit, offset=offset)

    def delete_checkpoint(self, training_run_id: types.ModelID, checkpoint_id: str) -> APIFuture[None]:
        """`checkpoint_id` is the end of a path, `weights/<name>` or `sampler_weights/<name>`."""
        return self.delete_checkpoint_from_tinker_path(f"tinker://{training_run_id}/{checkpoint_id}")

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        return self._ask(self._catalogue.delete_checkpoint, _nothing, tinker_path)

    def set_checkpoint_ttl_from_tinker_path(
        self, tinker_path: str, ttl_seconds: int | None
    ) -> APIFuture[None]:
        """Seconds from now; None: it stays."""
        return self._ask(self._catalogue.set_ttl, _nothing, tinker_path, ttl_seconds)

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: str = "owned"
    ) -> APIFuture[types.ListSessionsResponse]:
        """Those that are open, the newest first."""

        async def list_them() -> types.ListSessionsResponse:
            page = self._host.service.sessions.list(owner=LOCAL_OWNER, limit=limit, offset=offset)
            return types.ListSessionsResponse(sessions=list(page.items))

        return self._host.submit(list_them(), title="list_sessions")

    def get_session(
        self, session_id: str, access_scope: str = "owned"
    ) -> APIFuture[types.GetSessionResponse]:
        async def get() -> types.GetSessionResponse:
            info = self._host.service.sessions.info(session_id, owner=LOCAL_OWNER)
            return types.GetSessionResponse(
                training_run_ids=list(info.model_ids),
                sampler_ids=list(info.sampling_session_ids),
                user_metadata=dict(info.user_metadata) if info.user_metadata else None,
                display_name=info.display_name,
            )

        return self._host.submit(get(), title="get_session")

    def get_sampler(self, sampler_id: str) -> APIFuture[types.GetSamplerResponse]:
        async def get() -> types.GetSamplerResponse:
            info = self._host.service.sampling.info(sampler_id, owner=LOCAL_OWNER)
            return types.GetSamplerResponse(
                sampler_id=info.sampling_session_id, base_model=info.base_model, model_path=info.model_path
            )

        return self._host.submit(get(), title="get_sampler")

    def get_telemetry(self) -> Telemetry | None:
        """None: nothing is reported to anybody."""
        return None

    # As in the official client

    get_training_run_async = awaited_variant(get_training_run)
    get_training_run_by_tinker_path_async = awaited_variant(get_training_run_by_tinker_path)
    list_training_runs_async = awaited_variant(list_training_runs)
    list_checkpoints_async = awaited_variant(list_checkpoints)
    list_user_checkpoints_async = awaited_variant(list_user_checkpoints)
    delete_checkpoint_async = awaited_variant(delete_checkpoint)
    delete_checkpoint_from_tinker_path_async = awaited_variant(delete_checkpoint_from_tinker_path)
    set_checkpoint_ttl_from_tinker_path_async = awaited_variant(set_checkpoint_ttl_from_tinker_path)
    list_sessions_async = awaited_variant(list_sessions)
    get_session_async = awaited_variant(get_session)
    get_sampler_async = awaited_variant(get_sampler)

    def _ask(
        self,
        question: Callable[..., Awaitable[Any]],
        convert: Callable[[Any], Any],
        *args: Any,
        **options: Any,
    ) -> Any:
        async def ask() -> Any:
            return convert(await question(*args, **options, owner=LOCAL_OWNER))

        return self._host.submit(ask(), title=question.__name__)


def _run_of(tinker_path: str) -> str:
    return types.ParsedCheckpointTinkerPath.from_tinker_path(tinker_path).training_run_id


def _nothing(_: object) -> None:
    return None


def _checkpoint(checkpoint: Checkpoint) -> types.Checkpoint:
    return types.Checkpoint(
        checkpoint_id=checkpoint.checkpoint_id,
        checkpoint_type=checkpoint.kind,
        time=checkpoint.created,
        tinker_path=checkpoint.path,
        size_bytes=checkpoint.size_bytes,
        user_metadata=dict(checkpoint.user_metadata) if checkpoint.user_metadata else None,
        expires_at=checkpoint.expires,
    )


def _checkpoints(checkpoints: tuple[Checkpoint, ...]) -> types.CheckpointsListResponse:
    return types.CheckpointsListResponse(checkpoints=[_checkpoint(one) for one in checkpoints])


def _page_of_checkpoints(page: Page[Checkpoint]) -> types.CheckpointsListResponse:
    return types.CheckpointsListResponse(
        checkpoints=[_checkpoint(one) for one in page.items], cursor=_cursor(page)
    )


def _training_run(run: TrainingRun) -> types.TrainingRun:
    last, last_sampler = run.last_checkpoint, run.last_sampler_checkpoint
    return types.TrainingRun(
        training_run_id=run.training_run_id,
        base_model=run.settings.base_model,
        model_owner=LOCAL_OWNER,
        is_lora=run.settings.lora is not None,
        lora_rank=run.settings.lora.rank if run.settings.lora else None,
        last_request_time=run.last_request,
        last_checkpoint=_checkpoint(last) if last else None,
        last_sampler_checkpoint=_checkpoint(last_sampler) if last_sampler else None,
        user_metadata=dict(run.user_metadata) if run.user_metadata else None,
    )


def _training_runs(page: Page[TrainingRun]) -> types.TrainingRunsResponse:
    return types.TrainingRunsResponse(
        training_runs=[_training_run(run) for run in page.items], cursor=_cursor(page)
    )


def _cursor(page: Page[Any]) -> types.Cursor:
    return types.Cursor(offset=page.offset, limit=page.limit, total_count=page.total)


def _weights_info(checkpoint: Checkpoint) -> types.WeightsInfoResponse:
    lora = checkpoint.settings.lora
    return types.WeightsInfoResponse(
        base_model=checkpoint.settings.base_model,
        is_lora=lora is not None,
        lora_rank=lora.rank if lora else None,
        train_unembed=lora.train_unembed if lora else None,
        train_mlp=lora.train_mlp if lora else None,
        train_attn=lora.train_attn if lora else None,
    )
