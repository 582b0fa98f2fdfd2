"""Sampling sessions: what clients sample from."""

from __future__ import annotations

from rl.tinker.responses import SamplerInfo, SubmittedSample
from rl.tinker.messages import SampleRequest


class SamplingSessions:
    def create(
        self,
        session_id: str,
        sampling_session_seq_id: int,
        *,
        model_path: str | None = None,
        base_model: str | None = None,
        owner: str,
    ) -> str:
        """Its id, `<session_id>:sample:<sampling_session_seq_id>`, the same for the same call.

        Of saved sampler weights (`tinker://.../sampler_weights/<name>`), or of a base model. Weights are loaded with
        the first sample.

        Raises:
            InvalidRequestError: neither or an unknown base model, a path of weights for training, or a base model
                other than the path's.
            NotFoundError, GoneError: session or path.
            LimitReachedError: `limits.sampling_sessions`.
        """
        ...

    def sample(
        self, sampling_session_id: str, seq_id: int, request: SampleRequest, *, owner: str
    ) -> SubmittedSample:
        """-> SampleOutput. The same (sampling_session_id, seq_id) is the same request. Seq ids from 0, in any order.

        Raises:
            InvalidRequestError, NotFoundError, BusyError
            GoneError: the session has ended, or the weights were closed for newer ones.
        """
        ...

    def info(self, sampling_session_id: str, *, owner: str) -> SamplerInfo: ...
