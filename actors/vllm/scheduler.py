"""vLLM's scheduler with a short way through the steps that nearly all steps are.

In most steps every running request gets one more token, and nothing is admitted, interrupted or
read. vLLM's scheduler goes through all its cases for each request in each of them, which takes
longer than a small model's forward. Here such a step is recognised and does only what is left of
those cases; any other step is vLLM's own. What is scheduled, and what comes out, is the same.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop, remove_all
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request


class DecodeScheduler(Scheduler):
    """For one group of layers with full attention, without speculation, connectors or structured output."""

    running: list[Request]
    finished_req_ids: set[str]
    reset_preempted_req_ids: set[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        (group,) = self.kv_cache_config.kv_cache_groups
        assert isinstance(group.kv_cache_spec, FullAttentionSpec)
        assert self.connector is None
        self._block_tokens: int = group.kv_cache_spec.block_size
        self._short: SchedulerOutput | None = None
        """What the short way has scheduled last."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if not self._all_decode():
            return super().schedule(throttle_prefills)
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        running = self.running
        req_ids = [request.request_id for request in running]
        output = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=req_ids,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=[self._blocks_for_next(request) for request in running],
                num_computed_tokens=[request.num_computed_tokens for request in running],
                num_output_tokens=[len(request._output_token_ids) for request in running],
            ),
            num_scheduled_tokens=dict.fromkeys(req_ids, 1),
            total_num_scheduled_tokens=len(req_ids),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=[],
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
        )
        self.prev_step_scheduled_req_ids = set(req_ids)
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
        for request in running:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
        self._short = output
        return output

    def _all_decode(self) -> bool:
        """Whether each running request takes its next token now, and nothing else can happen."""
        running = self.running
        full = len(running) >= self.max_num_active_reqs
        if not running or len(running) > self.max_num_scheduled_tokens:
            return False
        if (self.waiting and not full) or self._pause_state != PauseState.UNPAUSED:
            return False
        num_new_blocks = 0
        for request in running:
            computed = request.num_computed_tokens
            if len(request._all_token_ids) - computed != 1:
                return False
            num_new_blocks += computed % self._block_tokens == 0
        if num_new_blocks > self.kv_cache_manager.block_pool.get_num_free_blocks():
            return False
        return all(request.request_id in self.prev_step_scheduled_req_ids for request in running)

    def _blocks_for_next(self, request: Request) -> tuple[list[int], ...] | None:
        """Ids of new cache blocks, None for none. Nothing is to be done within a block."""
        if 0 < request.num_computed_tokens % self._block_tokens < self._block_tokens - 1:
            return None
        blocks = self.kv_cache_manager.allocate_slots(request, 1)
        assert blocks is not None, "there were enough free blocks"
        return blocks.get_block_ids(allow_none=True)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if scheduler_output is not self._short:
            return super().update_from_output(scheduler_output, model_runner_output)
        rows, sampled = model_runner_output.req_id_to_index, model_runner_output.sampled_token_ids
        outputs, stopped = [], set()
        for request in self.running:
            request.num_in_flight_tokens -= 1
            tokens = sampled[rows[request.request_id]]
            output = EngineCoreOutput(request_id=request.request_id, new_token_ids=tokens)
            if self._append(request, tokens[0]):
                output.finish_reason = request.get_finished_reason()
                self._free_request(request)
                stopped.add(request)
            outputs.append(output)
        if stopped:
            self.running = remove_all(self.running, stopped)
        return {0: EngineCoreOutputs(outputs=outputs)}

    def _append(self, request: Request, token: int) -> bool:
        """Whether the request ends with this token."""
        made, everything = request._output_token_ids, request._all_token_ids
        made.append(token)
        everything.append(token)
        if len(everything) % self.hash_block_size == 0:
            request.update_block_hashes()
        params = request.sampling_params
        assert params is not None
        may_end = (
            token in params.stop_token_ids
            or len(made) >= request.max_tokens
            or len(everything) >= self.max_model_len
        )
        return may_end and check_stop(request, self.max_model_len)
