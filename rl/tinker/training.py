"""Requests about models in training, each model's in the order of their seq ids."""

from __future__ import annotations

from collections.abc import Sequence

from rl.tinker.responses import Metadata, ModelInfo, Submitted
from rl.tinker.messages import AdamParams, Datum, LossCall, ModelSettings


class Training:
    """Every submission may be repeated: the same (model_id, seq_id) is the same request and done once, whatever
    the repetition says. Seq ids count from 1.

    Raises:
        InvalidRequestError: of any submission whose text names what is wrong.
        NotFoundError: session, model or checkpoint is unknown, or another's.
        GoneError: session or model have ended.
        BusyError: `limits.waiting`, `waiting_per_model` or `waiting_bytes`.
        LimitReachedError: `limits.models`, in `create_model` and `create_from_state`.
    """

    def create_model(
        self,
        session_id: str,
        model_seq_id: int,
        settings: ModelSettings,
        *,
        user_metadata: Metadata | None = None,
        owner: str,
    ) -> Submitted:
        """-> CreatedModel. Its id is `<session_id>:train:<model_seq_id>`, and requests may follow at once."""
        ...

    def create_from_state(
        self,
        session_id: str,
        model_seq_id: int,
        path: str,
        *,
        optimizer: bool,
        base_model: str | None = None,
        user_metadata: Metadata | None = None,
        owner: str,
    ) -> Submitted:
        """-> LoadedState. A new model with the settings and weights of `tinker://.../weights/<name>`.

        `base_model` is refused unless it is the checkpoint's.
        """
        ...

    def load_state(self, model_id: str, seq_id: int, path: str, *, optimizer: bool, owner: str) -> Submitted:
        """-> LoadedState. Into a model that is there, whose settings are the checkpoint's."""
        ...

    def forward_backward(
        self,
        model_id: str,
        seq_id: int,
        data: Sequence[Datum],
        loss: LossCall,
        *,
        backward: bool = True,
        owner: str,
    ) -> Submitted:
        """-> ForwardBackwardOutput."""
        ...

    def optim_step(self, model_id: str, seq_id: int, params: AdamParams, *, owner: str) -> Submitted:
        """-> OptimStepOutput."""
        ...

    def save_state(
        self,
        model_id: str,
        seq_id: int,
        name: str | None,
        *,
        overwrite: bool = False,
        ttl_seconds: int | None = None,
        user_metadata: Metadata | None = None,
        owner: str,
    ) -> Submitted:
        """-> SavedState. `name` None: made from the seq id. A name that is taken fails without `overwrite`."""
        ...

    def save_sampler(
        self,
        model_id: str,
        seq_id: int,
        name: str | None,
        *,
        sampling_session_seq_id: int | None = None,
        ttl_seconds: int | None = None,
        user_metadata: Metadata | None = None,
        owner: str,
    ) -> Submitted:
        """-> SavedSampler. One of `name` and `sampling_session_seq_id`.

        A name that is taken gets the new weights. Without a name the weights stay in memory, as a sampling session
        of the model's session.
        """
        ...

    def unload(self, model_id: str, *, owner: str) -> Submitted:
        """-> UnloadedModel. What waits fails; what runs is finished first. Checkpoints and samplers stay."""
        ...

    def info(self, model_id: str, *, owner: str) -> ModelInfo: ...
