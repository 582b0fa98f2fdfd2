"""What a training client is made of: its model's facts, and requests in their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tinker import types
from tinker.lib.public_interfaces import APIFuture

from rl.tinker.client.futures import ClientFuture
from rl.tinker.client.session import Session
from rl.tinker.client.stream import Stream, Submit
from rl.tinker.client.tokenizers import tokenizer_of
from rl.tinker.client.unsupported import refuse
from rl.tinker.messages import Datum, LossCall
from rl.tinker.service.responses import ModelInfo
from rl.tinker.service.service import LOCAL_OWNER

if TYPE_CHECKING:
    from tinker.lib.telemetry import Telemetry
    from transformers import PreTrainedTokenizer


class ModelRequests:
    """The base of `TrainingClient`, which has the requests themselves."""

    def __init__(self, session: Session, info: ModelInfo) -> None:
        self.model_id: types.ModelID = info.model_id
        self._session = session
        self._model = info
        self._stream = Stream(session.host)
        self._training = session.host.service.training

    def get_info(self) -> types.GetInfoResponse:
        """The model's base and its LoRA rank, known since the client was made."""
        settings, base = self._model.settings, self._model.base
        return types.GetInfoResponse(
            type="get_info",
            model_id=self.model_id,
            model_name=base.name,
            model_data=types.ModelData(
                arch=base.architecture, model_name=base.name, tokenizer_id=base.tokenizer_folder
            ),
            is_lora=settings.lora is not None,
            lora_rank=settings.lora.rank if settings.lora else None,
        )

    def get_tokenizer(self) -> PreTrainedTokenizer:
        """That of the base model."""
        return tokenizer_of(self._model.base.tokenizer_folder)

    def get_console_url(self) -> str:
        """What names this run; there is no console."""
        return f"tinker://{self.model_id}"

    def get_telemetry(self) -> Telemetry | None:
        """None: nothing is reported to anybody."""
        return None

    def _gradient(self, data: list[Datum], loss: LossCall, *, backward: bool) -> Submit:
        return lambda seq_id: self._training.forward_backward(
            self.model_id, seq_id, data, loss, backward=backward, owner=LOCAL_OWNER
        )

    def _save(self, method: Callable[..., Any], name: str | None, **options: Any) -> Submit:
        return lambda seq_id: method(self.model_id, seq_id, name, **options, owner=LOCAL_OWNER)

    def _load(
        self, path: str, weights_access_token: str | None, *, optimizer: bool
    ) -> APIFuture[types.LoadWeightsResponse]:
        refuse("weights_access_token", weights_access_token, only=None, why="all weights here are yours")
        return self._request(
            "load_state",
            lambda seq_id: self._training.load_state(
                self.model_id, seq_id, path, optimizer=optimizer, owner=LOCAL_OWNER
            ),
            lambda loaded: types.LoadWeightsResponse(
                path=loaded.path, model_id=loaded.model_id, type="load_weights"
            ),
        )

    def _request(self, title: str, submit: Submit, convert: Callable[[Any], Any]) -> ClientFuture[Any]:
        number = self._stream.draw_number()

        async def run() -> Any:
            return convert(await self._stream.request(number, submit))

        return self._session.host.submit(run(), title=title)

    def __repr__(self) -> str:
        return f"<TrainingClient {self.model_id} of {self._model.base.name}>"
