"""Writer of a run's ledger: what a step has trained, as a file.

Sampled tokens are those of the rollouts, with the receipts of their generator. Trained tokens are
those that the trainer says its loss has read. The check compares the two (`rl.ledger.check`).

Shape legend: C tokens that the model produced in the trained turns of a rollout.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from rl.branches import find_predecessors, split_rows
from rl.ledger import files
from rl.ledger.config import LedgerConfig
from rl.ledger.files import FLOATS, OPTIONAL, LedgerFile
from rl.observability.metrics import OLD_SUFFIX
from rl.rollouts.group import Group, RolloutId, ScoredRollout
from rl.rollouts.samples import find_places
from rl.rollouts.trained import ROLE, TrainedRollout
from rl.types import Rollout
from rl.utils.errors import warn_unwritten

NO_RECEIPT = bytes(8)


@dataclass(kw_only=True, slots=True)
class LedgerColumns:
    """Columns of the turns of a step."""

    values: dict[str, list[Any]] = field(default_factory=dict)
    arrays: dict[str, list[np.ndarray]] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    """Sampled tokens of each turn."""

    def add(self, values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        for name, value in values.items():
            self.values.setdefault(name, []).append(value)
        for name, array in arrays.items():
            self.arrays.setdefault(name, []).append(array)
        self.lengths.append(len(arrays["token_ids"]))

    def make_table(self, *, optional: tuple[str, ...]) -> Any:
        import pyarrow as pa

        schema = files.make_schema(optional=optional)
        ends = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int32)]).astype(np.int32)
        columns = []
        for column in schema:
            if column.name in self.values or not pa.types.is_list(column.type):
                columns.append(pa.array(self.values.get(column.name, []), type=column.type))
                continue
            arrays = self.arrays.get(column.name, [])
            # One array for all turns: Arrow takes as long for a short list as for a long one.
            joined = np.concatenate([np.zeros(0), *arrays])
            values = pa.array(joined.astype(column.type.value_type.to_pandas_dtype()))
            columns.append(pa.ListArray.from_arrays(pa.array(ends), values))
        return pa.Table.from_arrays(columns, schema=schema)


class Ledger:
    """The ledger of a run that goes on.

    Example:
        ledger = Ledger(folder / "ledger", config=config.ledger)
        ledger.append(3, groups, trained_PG, facts={"minibatches": [...]})
    """

    def __init__(self, folder: Path, *, config: LedgerConfig) -> None:
        """Go on with the files in the folder."""
        self.folder = folder
        self.config = config
        self.last: LedgerFile | None = None
        """The file of the latest step."""
        self._kept: dict[LedgerFile, int] = {}
        """Bytes of the kept files, the oldest first."""
        for file in files.list_files(folder):
            self.last = file
            self._kept[file] = file.path.stat().st_size

    def choose_ids(self, groups: Sequence[Group]) -> list[RolloutId]:
        """Return the scored rollouts whose tokens are recorded."""
        ids = []
        for p, group in enumerate(groups):
            if is_chosen(group.number, share=self.config.share):
                ids += [(p, g) for g in range(len(group.scored))]
        return ids

    def append(
        self,
        step: int,
        groups: Sequence[Group],
        trained_PG: Sequence[Sequence[TrainedRollout]],
        *,
        facts: Mapping[str, Any],
    ) -> None:
        """Write the file of a step; a full disk is a warning, and the ledger has a gap."""
        optional = _list_optional(trained_PG)
        columns = LedgerColumns()
        for p, group in enumerate(groups):
            if is_chosen(group.number, share=self.config.share):
                for g, member in enumerate(group.scored):
                    trained = trained_PG[p][g]
                    for values, arrays in _describe_turns(member.rollout, trained, optional):
                        columns.add({"group": p, "member": g, **values}, arrays)
        described = [describe_group(group) for group in groups]
        self.write(step, columns, optional=optional, facts={**facts, "groups": described})

    def write(
        self,
        step: int,
        columns: LedgerColumns,
        *,
        optional: tuple[str, ...] = (),
        facts: Mapping[str, Any],
    ) -> None:
        """Write the file of a step, of which the turns are known, as `append` does."""
        # A run goes on without its proof rather than ending for a full disk.
        with warn_unwritten(self.folder):
            too_old = self._choose_oldest()
            kept = (file.step for file in self._kept if file not in too_old)
            first = min([step, *kept])
            facts = {
                **facts,
                "previous": "" if self.last is None else self.last.digest,
                "first": first,
                "share": self.config.share,
            }
            table = columns.make_table(optional=optional)
            self.last = files.write(self.folder, table, step=step, facts=facts)
            self._kept[self.last] = self.last.path.stat().st_size
            # After the file that says what the first one is: a run may be killed between the two,
            # and only then the ledger begins earlier than its last file says.
            for file in too_old:
                file.path.unlink(missing_ok=True)
                del self._kept[file]

    def _choose_oldest(self) -> list[LedgerFile]:
        """Return the files that there is no room for, the newest apart."""
        size, most = sum(self._kept.values()), self.config.max_gigabytes * 1e9
        too_old: list[LedgerFile] = []
        # The newest stays in any case: the next one has its digest.
        for file in [*self._kept][:-1]:
            if size <= most:
                break
            size -= self._kept[file]
            too_old.append(file)
        return too_old


def cut_back(folder: Path, *, step: int | None) -> None:
    """Remove the files of steps after `step`, which are repeated.

    None: the run starts from the beginning, and an earlier ledger gets another name.
    """
    if step is None:
        if folder.is_dir() and any(folder.iterdir()):
            old = folder.with_name(f"{folder.name}{OLD_SUFFIX}")
            if old.is_dir():
                shutil.rmtree(old)
            folder.replace(old)
        return
    for file in files.list_files(folder):
        if file.step > step:
            file.path.unlink()


def is_chosen(number: int, *, share: float) -> bool:
    """Return whether the tokens of the group of a problem are recorded."""
    # Multiples of an irrational number are spread evenly, whatever the order of the problems.
    return share >= 1 or (number * 0.6180339887498949) % 1 < share


def describe_group(group: Group) -> dict[str, Any]:
    """Return what is recorded of a group, tokens apart."""
    return {
        "number": group.number,
        "problem": group.rollouts[0].prompt.problem.id if group.rollouts else "",
        "num_failed": len(group.rollouts) - len(group.scored),
        "members": [_describe_member(member) for member in group.scored],
    }


def _describe_member(member: ScoredRollout) -> dict[str, Any]:
    rollout, score = member.rollout, member.score
    return {
        "sample": rollout.sample,
        "reward": float(score.reward),
        "overlong": float(score.overlong),
        "correct": bool(score.correct),
        "end": rollout.end,
        "truncated": rollout.is_truncated,
        "num_tokens": rollout.num_completion_tokens,
    }


def _list_optional(trained_PG: Sequence[Sequence[TrainedRollout]]) -> tuple[str, ...]:
    """Return the optional columns that are known of any rollout."""
    trained = [*chain(*trained_PG)]
    return tuple(name for name in OPTIONAL if any(getattr(t, name) is not None for t in trained))


def _describe_turns(
    rollout: Rollout, trained: TrainedRollout, optional: Sequence[str]
) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """Yield values and arrays of each turn of a scored rollout."""
    places = find_places(rollout)
    parents = find_predecessors(rollout.branches)
    rows: dict[int, int] = {}
    for number, row in enumerate(split_rows(rollout.branches)):
        for i, is_new in zip(row.turns, row.is_new, strict=True):
            if is_new:
                rows[i] = number
    # Of several branches that have a turn the first counts, as it does for the rows.
    roles = {i: branch.role for branch in reversed(rollout.branches) for i in branch.turns}
    by_token = trained.by_token
    for i, turn in enumerate(rollout.turns):
        c = turn.completion
        receipt = c.receipt
        parent = parents[i]
        values = {
            "turn": i,
            "parent": -1 if parent is None else parent,
            "role": roles[i],
            "trained": i in places,
            "cut_off": c.is_cut_off,
            "minibatch": trained.minibatch if i in places else -1,
            "row": rows.get(i, -1),
            "generator": "" if receipt is None else receipt.generator,
            "request": "" if receipt is None else receipt.request,
            "receipt": NO_RECEIPT if receipt is None else receipt.digest,
            "reward": turn.observation.reward,
            "prompt_ids": turn.prompt_ids.astype("<i4").tobytes(),
        }
        arrays = _make_untrained(len(c.token_ids), optional=optional)
        arrays |= {
            "token_ids": c.token_ids,
            "logprobs": c.logprobs,
            "versions": c.policy_versions,
        }
        if i in places:
            # Of a sample that was left out, being too long, the trainer says nothing.
            arrays |= {name: values_C[places[i]] for name, values_C in by_token.items()}
        yield values, arrays


def _make_untrained(num: int, *, optional: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the arrays of a turn that was not trained on, of no trained branch."""
    unread = np.full(num, np.nan, dtype=np.float32)
    arrays = dict.fromkeys((*FLOATS, *optional), unread)
    arrays["mask"] = np.full(num, ROLE, dtype=np.int8)
    arrays["advantages"] = np.zeros(num, dtype=np.float32)
    return arrays
