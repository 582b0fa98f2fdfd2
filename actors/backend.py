"""The protocols of `rl.protocols`, implemented by calls to actors."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from actors.calls import ActorCallError, ActorGroup, ActorLostError, Group
from actors.pool import GeneratorPool
from actors.replaceable import Replaceable
from actors.sync_check import SyncCheck, give_up
from losses.types import Loss
from rl.errors import RunError
from rl.training.checkpoint_files import DamagedCheckpointError
from rl.training.config import Dtype
from rl.types import (
    Completion,
    ForwardBackwardResult,
    LoopPosition,
    OptimParams,
    OptimStepResult,
    Rollout,
    SamplingParams,
    Score,
    ServeResult,
    TrainingSample,
)
from rl.weights.store import WeightStore

logger = logging.getLogger(__name__)

MAX_SCORED_AT_ONCE = 256
"""Rollouts that one reward process is asked for and has not scored: more than it calls functions at once."""
PARTS_AT_ONCE = 4
"""They are asked for in parts, so that there is work while the last rollouts of a part are scored."""


class ActorLearner:
    """A `Learner` over the ranks of a `PolicyTrainer`."""

    def __init__(self, trainer: Group) -> None:
        self.trainer = trainer

    async def forward_backward(
        self,
        samples: Sequence[TrainingSample],
        *,
        loss: Loss | None = None,
        return_logprobs: bool | Sequence[int] = False,
    ) -> ForwardBackwardResult:
        return await self._rank0("forward_backward", samples, loss, return_logprobs, limit="train_s")

    async def forward(
        self, samples: Sequence[TrainingSample], *, loss: Loss | None = None
    ) -> ForwardBackwardResult:
        """What `forward_backward` with logprobs would return; the gradient stays as it is."""
        return await self._rank0("forward", samples, loss, limit="train_s")

    async def drop_gradient(self) -> None:
        """Forget what was accumulated since the last step."""
        await self._rank0("drop_gradient", limit="train_s")

    async def optim_step(
        self, params: OptimParams | None = None, *, allow_empty: bool = False
    ) -> OptimStepResult:
        """As `Learner.optim_step`; `allow_empty`: with nothing accumulated the gradient is zero."""
        return await self._rank0("optim_step", params, allow_empty, limit="train_s")

    async def compute_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        return await self._rank0("compute_logprobs", samples, limit="train_s")

    async def compute_reference_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        return await self._rank0("compute_reference_logprobs", samples, limit="train_s")

    async def save_checkpoint(
        self,
        folder: str,
        *,
        position: LoopPosition | None = None,
        model_only: bool = False,
        wait: bool = True,
        attachments: Mapping[str, bytes] | None = None,
    ) -> None:
        await self._rank0(
            "save_checkpoint", folder, position, model_only, wait, attachments, limit="checkpoint_s"
        )

    async def load_checkpoint(
        self, folder: str, *, model_only: bool = False, exclude: Sequence[str] | None = None
    ) -> int:
        """As `Learner.load_checkpoint`; `exclude` None takes `checkpoint.exclude_from_loading`.

        Raises:
            DamagedCheckpointError: names the file; the trainer is as it was.
        """
        try:
            return await self._rank0("load_checkpoint", folder, model_only, exclude, limit="checkpoint_s")
        except ActorCallError as error:
            remote = getattr(error.__cause__, "exception", None)
            if isinstance(remote, DamagedCheckpointError):
                raise remote from error
            raise

    async def export_hf(self, folder: str, *, dtype: Dtype | None = None) -> None:
        """Write the weights as a Hugging Face folder, in `checkpoint.export_dtype` when None."""
        await self._rank0("export_hf", folder, dtype, limit="checkpoint_s")

    async def save_adapter(self, folder: str) -> None:
        """Write LoRA's adapters as a folder that PEFT opens."""
        await self._rank0("save_adapter", folder, limit="checkpoint_s")

    async def _rank0(self, endpoint: str, *args: Any, limit: str) -> Any:
        return (await self.trainer.call(endpoint, *args, limit=limit))[0]


class ActorSampler:
    """A `ResumableSampler` over one `VLLMGenerator`; rank 0 of its tensor-parallel ranks answers."""

    def __init__(self, generator: Group) -> None:
        self.generator = generator
        self._running: set[str] = set()
        self._endings: set[asyncio.Task[None]] = set()

    async def generate(
        self,
        prompts: Sequence[np.ndarray],
        *,
        sampling: SamplingParams,
        session: str | None = None,
        begun: Sequence[Sequence[Completion]] | None = None,
    ) -> list[list[Completion]]:
        """As `ResumableSampler.generate`; a generator has one place for all sessions."""
        call_id = uuid.uuid4().hex
        self._running.add(call_id)
        try:
            answers = await self.generator.call(
                "generate", list(prompts), sampling, call_id, begun, limit="generate_s"
            )
        except asyncio.CancelledError:
            # Nobody waits for this either: what it cannot end goes on for nobody, until it is done.
            ending = asyncio.create_task(self._end(call_id))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)
            raise
        finally:
            self._running.discard(call_id)
        return answers[0]

    async def abort(self) -> int:
        """As `ResumableSampler.abort`; a call that still waits for its turn (`actors.turns`) runs then."""
        call_ids = sorted(self._running)
        if not call_ids:
            return 0
        return (await self.generator.call("abort", call_ids, limit="close_s"))[0]

    async def _end(self, call_id: str) -> None:
        try:
            await self.generator.call("abort", [call_id], limit="close_s")
        except RunError as error:
            logger.debug("a cancelled call to %s was not ended: %s", self.generator.name, error)


class ActorPublisher:
    """A `WeightPublisher`: trainer ranks push, every generator pulls and is checked."""

    def __init__(
        self,
        *,
        trainer: Group,
        generators: Sequence[Group],
        store: WeightStore,
        check: SyncCheck,
        pool: GeneratorPool | None = None,
    ) -> None:
        """`pool` has the generators where they are replaced; None: a lost one is an error."""
        self.trainer = trainer
        self.generators = generators
        self.store = store
        self.check = check
        self.pool = pool

    async def push(self) -> int:
        # Both are sent here and now, so that they come before whatever the trainer is asked for next. For
        # the canary's logprobs `serve` waits: generators pull meanwhile.
        push = asyncio.ensure_future(self.trainer.call("push_model_state_dict", limit="sync_s"))
        expected = None
        if self.check.canary is not None:
            answer = self.trainer.call("compute_logprobs", [self.check.canary.sample], limit="train_s")
            expected = asyncio.ensure_future(answer)
        try:
            pushes = await push
            version: int = pushes[0].policy_version
            await self._while_trainer_lives(self.store.announce(version), f"announcing version {version}")
        except BaseException:
            if expected is not None:
                await give_up(expected)
            raise
        self.check.expect(version, sums=[s for push in pushes for s in push.sums], expected=expected)
        return version

    async def serve(self, policy_version: int) -> ServeResult:
        if self.pool is not None:
            served = await self.pool.serve(policy_version)
        else:
            served = await self.check.pull(policy_version, generators=self.generators)
        await self._while_trainer_lives(self.store.prune(), "pruning of old versions")
        return served

    async def _while_trainer_lives(self, answer: Awaitable[Any], what: str) -> None:
        """Of the store, which the trainer's processes have."""
        await (answer if self.pool is None else self.pool.trainer.while_alive(answer, what))


class ScoringRoom:
    """Lets in so many rollouts at once, in the order in which they come; more than that go in alone."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._num_in = 0
        self._turn = asyncio.Lock()
        self._left = asyncio.Event()

    @asynccontextmanager
    async def of(self, num_rollouts: int) -> AsyncIterator[None]:
        async with self._turn:
            while self._num_in and self._num_in + num_rollouts > self.limit:
                self._left.clear()
                await self._left.wait()
            self._num_in += num_rollouts
        try:
            yield
        finally:
            self._num_in -= num_rollouts
            self._left.set()


class ActorScorer:
    """A `Scorer` over the processes of a `RewardActor`; calls overlap.

    Each process is asked for its share alone, so that a slow one holds up nobody who does not wait for it.
    It is asked for a few rollouts at a time, and has few to do at any time, however many an evaluation has.
    Past `timeouts.score_s`, and what the reward functions of these few may take, the run stops.

    Args:
        num_procs: of the actor's mesh.
        keep_groups: whether the rollouts of a problem go to one process, as functions of a group need it.
            Without such functions to divide them is more even (`Rubric.has_group_functions`).
        longest_s: of a number of rollouts, what their reward functions may take in one process
            (`rl.rollouts.scoring.longest_s`). None: `timeouts.score_s` is for these too.
    """

    def __init__(
        self,
        reward: ActorGroup | Replaceable,
        *,
        num_procs: int,
        keep_groups: bool = True,
        longest_s: Callable[[int], float] | None = None,
    ) -> None:
        self.keep_groups = keep_groups
        self._longest_s = longest_s
        self._reward = reward if isinstance(reward, Replaceable) else Replaceable(reward)
        self._num_asked = [0] * num_procs
        """Rollouts that each process has yet to score."""
        self._room = ScoringRoom(MAX_SCORED_AT_ONCE * num_procs)
        self._most_of_part = MAX_SCORED_AT_ONCE * num_procs // PARTS_AT_ONCE

    async def score(self, groups: Sequence[Sequence[Rollout]], *, alone: bool = False) -> list[list[Score]]:
        parts = _parts(groups, most=self._most_of_part)
        if len(parts) == 1:
            return await self._score(parts[0], alone=alone)
        asking = [asyncio.ensure_future(self._score(part, alone=alone)) for part in parts]
        try:
            return list(chain.from_iterable(await asyncio.gather(*asking)))
        finally:
            for task in asking:
                task.cancel()

    async def _score(self, groups: Sequence[Sequence[Rollout]], *, alone: bool) -> list[list[Score]]:
        async with self._room.of(sum(map(len, groups))):
            return await self._score_now(groups, alone=alone)

    async def _score_now(self, groups: Sequence[Sequence[Rollout]], *, alone: bool) -> list[list[Score]]:
        shares = self._divide([len(group) for group in groups])
        asking = []
        for rank, share in shares.items():
            asked = [[groups[number][i] for i in members] for number, members in share.items()]
            task = asyncio.create_task(self._ask(rank, asked, alone=alone))
            task.add_done_callback(partial(self._answered, rank, sum(map(len, asked))))
            asking.append(task)
        scores: list[list[Score | None]] = [[None] * len(group) for group in groups]
        for share, (answers,) in zip(shares.values(), await asyncio.gather(*asking), strict=True):
            for (number, members), answer in zip(share.items(), answers, strict=True):
                for i, score in zip(members, answer, strict=True):
                    scores[number][i] = score
        complete = [[score for score in group if score is not None] for group in scores]
        assert list(map(len, complete)) == list(map(len, groups)), "a rollout was asked of nobody"
        return complete

    async def _ask(self, rank: int, asked: list[list[Rollout]], *, alone: bool) -> list[Any]:
        """The rank's answer; it is asked once more where its processes, or others of the role, are lost."""
        while True:
            group = await self._reward.group()
            # It has these, and before them what it was asked for and has not answered.
            more_s = 0.0 if self._longest_s is None else self._longest_s(self._num_asked[rank])
            try:
                return await group.at_rank(rank).call(
                    "score", asked, self.keep_groups, alone, limit="score_s", more_s=more_s
                )
            except ActorLostError as error:
                with _naming_problems(asked):
                    await self._reward.replace(group, error)

    def _answered(self, rank: int, num_rollouts: int, task: asyncio.Task[Any]) -> None:
        self._num_asked[rank] -= num_rollouts

    def _divide(self, sizes: Sequence[int]) -> dict[int, _Share]:
        """Each group, or each rollout, to the process that has the fewest rollouts to score."""
        shares: dict[int, _Share] = {}
        for number, size in enumerate(sizes):
            members = list(range(size))
            for piece in [members] if self.keep_groups else [[i] for i in members]:
                rank = self._num_asked.index(min(self._num_asked))
                self._num_asked[rank] += len(piece)
                shares.setdefault(rank, {}).setdefault(number, []).extend(piece)
        return shares


@contextmanager
def _naming_problems(groups: Sequence[Sequence[Rollout]]) -> Iterator[None]:
    """The error after which nobody scores any more says what was being scored."""
    try:
        yield
    except ActorLostError:
        raise
    except RunError as error:
        ids = dict.fromkeys(rollout.prompt.problem.id for group in groups for rollout in group)
        raise RunError(f"{error}; rollouts of these problems were being scored: {', '.join(ids)}") from error


_Share = dict[int, list[int]]
"""Rollouts of one process: their places in their groups, by the group's number."""


def _parts(groups: Sequence[Sequence[Rollout]], *, most: int) -> list[list[Sequence[Rollout]]]:
    """Consecutive groups with as many rollouts together; a group is in one part, however long it is."""
    parts: list[list[Sequence[Rollout]]] = [[]]
    for group in groups:
        if parts[-1] and sum(map(len, parts[-1])) + len(group) > most:
            parts.append([])
        parts[-1].append(group)
    return parts
