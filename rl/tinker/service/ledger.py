"""The ledger of a model that a client trains: a file for each optimizer step, as those of runs.

    forward_backward    `ModelLedger.add`: data as spans, and what the loss has read of them
    optim_step          `ModelLedger.step`: the calls since the last step become a file
    save, load          `ModelLedger.mark`, `note_load`: ledgers of one training name each other

Rewards, masks and advantages are the client's, so that nothing is known of where they come from. A
file has what the server knows: `role` of a span is "sampled" if the server has sampled it as it is,
"edited" if it has logprobs and begins where the reply to a request of the server would, and "given"
otherwise.

Shape legend: T tokens of a sample, K targets of each.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from losses.types import Loss
from rl.config.json import name_code, to_dict
from rl.ledger.config import LedgerConfig
from rl.ledger.files import GIVEN, TINKER
from rl.ledger.writer import NO_RECEIPT, Ledger, LedgerColumns
from rl.rollouts.trained import TRAINED, UNWEIGHTED
from rl.tinker.service.sequences import SampledSequence, SampledSequences
from rl.tinker.service.storage import RunRecord
from rl.tinker.types import LedgerMark
from rl.trainer_types import ForwardBackwardResult, OptimParams, OptimStepResult, TrainedTokens
from rl.types import TrainingSample

SAMPLED, EDITED, GIVEN_ROLE = "sampled", "edited", "given"
MAX_WAITING_BYTES = 2**29
"""Most bytes of the calls of all models that wait for an optimizer step; of further calls only the
numbers are recorded."""
CALL_BYTES, DATUM_BYTES, TOKEN_BYTES = 4096, 4096, 64
"""Bytes of what waits, at most: of a token its columns, and its place in the prompt of a span."""


async def import_pyarrow() -> None:
    """Import what the first file would wait for."""
    await asyncio.to_thread(import_module, "pyarrow.parquet")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A span of a datum."""

    values: dict[str, Any]
    arrays: dict[str, np.ndarray]
    sequence: SampledSequence | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """A `forward_backward` whose gradient waits for its optimizer step."""

    seq_id: int
    facts: dict[str, Any]
    num_bytes: int
    """Reserved bytes."""
    rows: list[_Row] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Ledgers:
    """Ledgers of all models of a server, and the sequences by which they know sampled tokens."""

    config: LedgerConfig
    sequences: SampledSequences = field(default_factory=SampledSequences)
    max_waiting_bytes: int = MAX_WAITING_BYTES
    waiting_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes by owner."""

    def open(self, folder: Path, record: RunRecord) -> ModelLedger:
        """Return the ledger of a new model, in a folder that may not exist yet."""
        return ModelLedger(Ledger(folder, config=self.config), ledgers=self, record=record)

    def reserve(self, owner: str, num_bytes: int) -> bool:
        """Return whether there is room for so many more bytes, and take it."""
        # An owner may have as much as it leaves free, so that the next one gets something.
        free = self.max_waiting_bytes - self.waiting_bytes.total() - num_bytes
        if self.waiting_bytes[owner] + num_bytes > free:
            return False
        self.waiting_bytes[owner] += num_bytes
        return True

    def release(self, owner: str, num_bytes: int) -> None:
        """Give back what was reserved."""
        self.waiting_bytes[owner] -= num_bytes
        if not self.waiting_bytes[owner]:
            del self.waiting_bytes[owner]


class ModelLedger:
    """The ledger of a model: what its calls have added to the gradient, and what its steps used.

    Its methods are called in the turns of the model's stream, one after another.
    """

    def __init__(self, ledger: Ledger, *, ledgers: Ledgers, record: RunRecord) -> None:
        self._ledger = ledger
        self._ledgers = ledgers
        self._model_id = record.model_id
        self._owner = record.owner_hash
        lora = record.settings.lora
        self._settings = {
            "base_model": record.settings.base_model,
            "lora": None if lora is None else lora.model_dump(),
        }
        self._num_steps = 0
        self._calls: list[_Call] = []
        """Calls since the last optimizer step."""
        self._unrecorded: list[int] = []
        """Seq ids of calls since then for which there was no room."""
        self._dropped: list[int] = []
        """Seq ids of calls since then whose gradient was dropped."""
        self._loads: list[dict[str, Any]] = []

    @property
    def mark(self) -> LedgerMark:
        """Place in the ledger after the latest step."""
        last = self._ledger.last
        digest = "" if last is None else last.digest
        return LedgerMark(model_id=self._model_id, step=self._num_steps, digest=digest)

    def note_load(self, path: str, mark: LedgerMark | None) -> None:
        """Note that weights were loaded, which drops the gradient.

        Args:
            mark: step after which the weights were saved.
        """
        self.drop()
        self._loads.append({"path": path, "mark": None if mark is None else asdict(mark)})

    def drop(self) -> None:
        """Note that the gradient of all calls since the last step was dropped. Idempotent."""
        self._dropped += sorted([*(call.seq_id for call in self._calls), *self._unrecorded])
        self._clear()

    def _clear(self) -> None:
        for call in self._calls:
            self._ledgers.release(self._owner, call.num_bytes)
        self._calls, self._unrecorded = [], []

    async def add(
        self,
        seq_id: int,
        samples: Sequence[TrainingSample],
        *,
        loss: Loss,
        result: ForwardBackwardResult,
    ) -> None:
        """Take a call, with what its loss has read (`return_trained`)."""
        num_tokens = sum(sample.mask.size for sample in samples)
        num_bytes = CALL_BYTES + DATUM_BYTES * len(samples) + TOKEN_BYTES * num_tokens
        if not self._ledgers.reserve(self._owner, num_bytes):
            self._unrecorded.append(seq_id)
            return
        facts = _describe_call(seq_id, samples, loss=loss, result=result)
        call = _Call(seq_id=seq_id, facts=facts, num_bytes=num_bytes)
        self._calls.append(call)
        assert result.trained is not None
        # Looking up a million tokens takes a second, in which others are answered.
        call.rows.extend(await asyncio.to_thread(self._make_rows, samples, result.trained))

    async def step(self, seq_id: int, params: OptimParams, result: OptimStepResult) -> None:
        """Write the file of an optimizer step, which ends the list of its calls."""
        self._num_steps += 1
        columns, steps = LedgerColumns(), dict[str, int]()
        rows = [(number, row) for number, call in enumerate(self._calls) for row in call.rows]
        optional = (GIVEN,) if any(GIVEN in row.arrays for _, row in rows) else ()
        for number, row in rows:
            # Where others differ from what was sampled, these do not.
            given = dict.fromkeys(optional, row.arrays["logprobs"])
            columns.add({"group": number, "minibatch": number, **row.values}, given | row.arrays)
            steps |= self._find_steps(row.sequence)
        facts = {
            "kind": TINKER,
            "model": self._model_id,
            "settings": self._settings,
            "loads": self._loads,
            "dropped": self._dropped,
            "unrecorded": self._unrecorded,
            "groups": [call.facts.pop("group") for call in self._calls],
            "minibatches": [call.facts for call in self._calls],
            "optim_step": {
                "seq_id": seq_id,
                "policy_version": result.policy_version,
                "grad_norm": result.grad_norm,
                "lr": result.lr,
                "betas": params.betas,
                "eps": params.eps,
                "weight_decay": params.weight_decay,
                # JSON has no infinity, which clips nothing.
                "max_norm": params.max_norm if np.isfinite(params.max_norm or np.inf) else None,
            },
            "steps_of_versions": steps,
        }
        self._clear()
        self._dropped, self._loads = [], []
        # Before the client has its answer: a step that it knows of is in the ledger.
        await asyncio.to_thread(
            self._ledger.write, self._num_steps, columns, optional=optional, facts=facts
        )

    def _find_steps(self, sequence: SampledSequence | None) -> dict[str, int]:
        """Return the step after which this model had the weights that have sampled a sequence."""
        mark = None if sequence is None else sequence.mark
        if sequence is None or mark is None or mark.model_id != self._model_id:
            return {}
        versions = np.unique(sequence.completion.policy_versions)
        return {str(version): mark.step for version in versions}

    def _make_rows(
        self, samples: Sequence[TrainingSample], trained: Sequence[TrainedTokens]
    ) -> list[_Row]:
        rows: list[_Row] = []
        for number, (sample, read) in enumerate(zip(samples, trained, strict=True)):
            spans = (
                self._list_spans(sample)
                if sample.mask.ndim == 1
                else [_Span(start=0, end=len(sample.mask), role=GIVEN_ROLE)]
            )
            rows += _make_rows(sample, read, spans, member=number)
        return rows

    def _list_spans(self, sample: TrainingSample) -> list[_Span]:
        """Divide a datum's trained tokens into spans, in their order."""
        whole_T = get_targets(sample)
        # Where a target is another token than the one that follows, the context of the rest is
        # not what was sampled.
        is_plain = np.array_equal(whole_T[1:-1], sample.token_ids[1:-1])
        found, is_context_T = self._ledgers.sequences.find_spans(
            whole_T, sample.generator_logprobs, owner=self._owner
        )
        spans = []
        is_left_T = sample.mask.copy()
        if is_plain:
            for one in found:
                if is_left_T[one.start : one.end].any():
                    is_left_T[one.start : one.end] = False
                    spans.append(
                        _Span(start=one.start, end=one.end, role=SAMPLED, sequence=one.sequence)
                    )
        edges = np.flatnonzero(np.diff(is_left_T, prepend=False, append=False))
        for start, end in edges.reshape(-1, 2).tolist():
            # A text of supervised learning may follow any prompt; with logprobs it claims to be
            # sampled.
            is_claimed = not np.isnan(sample.generator_logprobs[start])
            is_edited = is_plain and is_claimed and bool(is_context_T[start])
            spans.append(_Span(start=start, end=end, role=EDITED if is_edited else GIVEN_ROLE))
        return sorted(spans, key=lambda span: span.start)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Span:
    """Tokens of a datum of one origin."""

    start: int
    end: int
    role: str
    sequence: SampledSequence | None = None


def get_targets(sample: TrainingSample) -> np.ndarray:
    """Return [T] or [T, K] targets; entry 0 is the first token, which is none."""
    if sample.targets is None:
        return sample.token_ids
    targets = sample.targets.copy()
    targets[0] = sample.token_ids[0]
    return targets


def _make_rows(
    sample: TrainingSample, read: TrainedTokens, spans: Sequence[_Span], *, member: int
) -> Iterator[_Row]:
    """Yield the spans of a datum as turns; a datum without a trained token has an empty one."""
    whole = get_targets(sample)
    spans = spans or [_Span(start=0, end=0, role=GIVEN_ROLE)]
    ends = [0, *(span.end for span in spans)]
    for turn, (span, before) in enumerate(zip(spans, ends, strict=False)):
        part = slice(span.start, span.end)
        given = sample.generator_logprobs[part].ravel()
        c = None if span.sequence is None else span.sequence.completion
        receipt = None if c is None else c.receipt
        mask = sample.mask[part].ravel()
        arrays = {
            "token_ids": whole[part].ravel(),
            "logprobs": given if c is None else c.logprobs,
            "versions": np.full(mask.size, -1) if c is None else c.policy_versions,
            "mask": np.where(mask, TRAINED, UNWEIGHTED),
            "advantages": sample.advantages[part].ravel(),
            "trainer_logprobs": read.logprobs[part].ravel(),
            "trainer_advantages": read.advantages[part].ravel(),
        }
        if c is not None and _differs(given, c.logprobs, mask):
            arrays[GIVEN] = given
        values = {
            "member": member,
            "turn": turn,
            "parent": turn - 1,
            "role": span.role,
            "trained": bool(mask.any()),
            "cut_off": c is not None and c.is_cut_off,
            "row": 0,
            "generator": "" if receipt is None else receipt.generator,
            "request": "" if receipt is None else receipt.request,
            "receipt": NO_RECEIPT if receipt is None else receipt.digest,
            "reward": 0.0,
            "prompt_ids": sample.token_ids[before : span.start].astype("<i4").tobytes(),
        }
        yield _Row(values=values, arrays=arrays, sequence=span.sequence)


def _differs(given: np.ndarray, sampled: np.ndarray, mask: np.ndarray) -> bool:
    """Return whether the loss was given other logprobs of trained tokens than were sampled."""
    # Cross entropy is given none.
    is_given = mask & ~np.isnan(given)
    return bool((given != sampled)[is_given].any())


def _describe_call(
    seq_id: int,
    samples: Sequence[TrainingSample],
    *,
    loss: Loss,
    result: ForwardBackwardResult,
) -> dict[str, Any]:
    """Return what the trainer says of a call, and how many data it had."""
    has_ratio_mask = any(
        sample.ratio_mask is not None and not np.array_equal(sample.ratio_mask, sample.mask)
        for sample in samples
    )
    return {
        "seq_id": seq_id,
        "loss": {"class": name_code(type(loss)), **to_dict(loss)},
        # A mean over other tokens than the trained ones, of which nothing is recorded.
        "has_ratio_mask": has_ratio_mask,
        "loss_sum": result.loss_sum,
        "denominator": result.denominator,
        "num_episodes": result.num_samples,
        "num_tokens": result.num_trained_tokens,
        "advantage_sum": result.advantage_sum,
        "group": {"number": seq_id, "members": [{"sample": i} for i in range(len(samples))]},
    }
