"""Training one model: gradients, steps of the optimizer, checkpoints and samplers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from tinker import types
from tinker.lib.public_interfaces import APIFuture
from tinker.lib.public_interfaces.custom_loss import LossHandle

from rl.tinker.client.client_futures import FutureOfClient
from rl.tinker.client.convert import adam_settings, data_of, forward_backward_output, loss_call
from rl.tinker.client.custom_loss import (
    CROSS_ENTROPY,
    CustomLoss,
    check_custom_loss,
    forward_data,
    surrogate,
    with_custom_loss,
)
from rl.tinker.client.deprecated import async_variant, awaited_variant, warn_of
from rl.tinker.client.futures import ClientFuture
from rl.tinker.client.model_requests import ModelRequests
from rl.tinker.client.sampling_client import (
    BackcompatSamplingClientFuture,
    SamplingClient,
    create_sampling_client,
)
from rl.tinker.client.session import Session
from rl.tinker.client.stream import Submit
from rl.tinker.client.unsupported import refuse
from rl.tinker.service.service import LOCAL_OWNER

if TYPE_CHECKING:
    from tinker.lib.retry_handler import RetryConfig


class TrainingClient(ModelRequests):
    """A model in training; made by `ServiceClient`.

    Every call returns at once, with a future. Calls are done in the order in which they were made, so that a
    step of the optimizer may follow a gradient that is not computed yet. Mistakes that can be seen at once
    are raised as ValueError by the call, all others by its future.
    """

    def forward(
        self,
        data: list[types.Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """The loss and each target's logprob; what was accumulated of the gradient stays as it is."""
        return self._forward_backward("forward", data, loss_fn, loss_fn_config)

    def forward_backward(
        self,
        data: list[types.Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """The same, and the gradient of the loss (a plain sum over all data) is added to the accumulated."""
        return self._forward_backward("forward_backward", data, loss_fn, loss_fn_config)

    def _forward_backward(
        self, title: str, data: list[types.Datum], loss_fn: str, config: Mapping[str, Any] | None
    ) -> ClientFuture[types.ForwardBackwardOutput]:
        submit = self._gradient(
            data_of(data), loss_call(loss_fn, config), backward=title == "forward_backward"
        )
        return self._request(title, submit, forward_backward_output)

    def forward_backward_custom(
        self,
        data: list[types.Datum],
        loss_fn: CustomLoss | LossHandle,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """`forward_backward` of a loss of your own, `(data, logprobs) -> (loss, metrics)`.

        `logprobs` are tensors, one for each datum, of the shape of its `target_tokens`; the loss is a scalar
        tensor computed of all of them. It runs in a thread of its own. If it fails, calls that were made
        before the failure is known (a step of the optimizer) are refused, later ones are not.
        """
        data = list(data)
        check_custom_loss(loss_fn, data, loss_type_input=loss_type_input, session_id=self._session.session_id)
        sent = forward_data(data)
        first = self._gradient(sent, CROSS_ENTROPY, backward=False)
        number, host = self._stream.draw_number(), self._session.host

        async def run() -> types.ForwardBackwardOutput:
            computed = None

            async def second(output: Any) -> Submit:
                nonlocal computed
                compute = functools.partial(surrogate, data, loss_fn, sent=sent, output=output)
                computed = await host.custom_losses.run(compute)
                return self._gradient(computed.data, CROSS_ENTROPY, backward=True)

            output = await self._stream.in_two_parts(number, first, second)
            assert computed is not None
            return forward_backward_output(with_custom_loss(output, computed))

        return host.submit(run(), title="forward_backward_custom")

    def optim_step(
        self,
        optim_params: types.OptimParams | None = None,
        *,
        adam_params: types.AdamParams | None = None,
    ) -> APIFuture[types.OptimStepResponse]:
        """A step of Adam with the accumulated gradient, which is cleared. `adam_params` is the older name."""
        if optim_params is not None and adam_params is not None:
            raise ValueError("optim_params and adam_params are both given: give optim_params alone")
        params = adam_settings(optim_params if optim_params is not None else adam_params)
        return self._request(
            "optim_step",
            lambda seq_id: self._training.optim_step(self.model_id, seq_id, params, owner=LOCAL_OWNER),
            lambda output: types.OptimStepResponse(metrics=dict(output.metrics)),
        )

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> APIFuture[types.SaveWeightsResponse]:
        """Save weights and optimizer state to go on from; the response has their `tinker://` path."""
        submit = self._save(
            self._training.save_state,
            name,
            overwrite=overwrite,
            ttl_seconds=ttl_seconds,
            user_metadata=user_metadata,
        )
        return self._request("save_state", submit, lambda saved: types.SaveWeightsResponse(path=saved.path))

    def load_state(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[types.LoadWeightsResponse]:
        """Deprecated: `ServiceClient.create_training_client_from_state` makes a client of a checkpoint."""
        warn_of("TrainingClient.load_state()", instead="ServiceClient.create_training_client_from_state()")
        return self._load(path, weights_access_token, optimizer=False)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[types.LoadWeightsResponse]:
        """Deprecated: `ServiceClient.create_training_client_from_state_with_optimizer`."""
        warn_of(
            "TrainingClient.load_state_with_optimizer()",
            instead="ServiceClient.create_training_client_from_state_with_optimizer()",
        )
        return self._load(path, weights_access_token, optimizer=True)

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: dict[str, str] | None = None
    ) -> APIFuture[types.SaveWeightsForSamplerResponse]:
        """Save weights to sample from; the response has their `tinker://` path."""
        submit = self._save(
            self._training.save_sampler, name, ttl_seconds=ttl_seconds, user_metadata=user_metadata
        )
        return self._request(
            "save_weights_for_sampler",
            submit,
            lambda saved: types.SaveWeightsForSamplerResponse(path=saved.path),
        )

    def save_weights_external(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: list[str] | None = None,
    ) -> APIFuture[types.SaveWeightsExternalResponse]:
        """Raises NotImplementedError: weights for elsewhere are not exported here."""
        raise NotImplementedError(
            f"save_weights_external(name={name!r}) is not supported: save_weights_for_sampler saves adapters "
            "and weights as safetensors in the storage folder"
        )

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        kind: types.SamplingClientKind = "snapshot",
    ) -> BackcompatSamplingClientFuture:
        """A client that samples from the weights as they are now; they are copied, not written.

        `name` is deprecated and without effect, `retry_config` has nothing to do here.
        """
        if name is not None:
            warn_of("save_weights_and_get_sampling_client(name=...)", instead="leave `name` out")
        refuse("record_stability_info", record_stability_info, only=False, why="nothing is recorded")
        refuse("kind", kind, only="snapshot", why="a sampler's weights never change")
        sampler_seq_id = next(self._session.sampler_seq_ids)
        submit = self._save(self._training.save_sampler, None, sampling_session_seq_id=sampler_seq_id)

        def client(saved: Any) -> SamplingClient:
            return SamplingClient(
                self._session, sampling_session_id=saved.sampling_session_id, base=self._model.base
            )

        return BackcompatSamplingClientFuture(self._request("take a snapshot", submit, client))

    def create_sampling_client(
        self,
        model_path: str,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> BackcompatSamplingClientFuture:
        """A client that samples from saved weights. `retry_config` has nothing to do here."""
        refuse("record_stability_info", record_stability_info, only=False, why="nothing is recorded")
        created = create_sampling_client(self._session, model_path=model_path)
        return BackcompatSamplingClientFuture(
            self._session.host.submit(created, title="create a sampling client")
        )

    # As in the official client

    forward_async = async_variant(forward)
    forward_backward_async = async_variant(forward_backward)
    forward_backward_custom_async = async_variant(forward_backward_custom)
    optim_step_async = async_variant(optim_step)
    save_state_async = async_variant(save_state)
    load_state_async = async_variant(load_state)
    load_state_with_optimizer_async = async_variant(load_state_with_optimizer)
    save_weights_for_sampler_async = async_variant(save_weights_for_sampler)
    save_weights_external_async = async_variant(save_weights_external)
    get_info_async = async_variant(ModelRequests.get_info)
    create_sampling_client_async = awaited_variant(create_sampling_client)
    save_weights_and_get_sampling_client_async = awaited_variant(save_weights_and_get_sampling_client)


class BackcompatTrainingClientFuture(FutureOfClient[TrainingClient]):
    """A future of a `TrainingClient`."""


async def training_client(session: Session, request_id: str, model_id: str) -> TrainingClient:
    """In the host's loop: the client of a model once it has been created."""
    host = session.host
    await host.retrieve(request_id)
    return TrainingClient(session, host.service.training.info(model_id, owner=LOCAL_OWNER))
