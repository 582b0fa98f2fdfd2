"""The ledger of a training run: sessions close, and what was edited afterwards is found."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tinker import types as wire
from tinker.proto import tinker_public_pb2 as pb

from rl.ledger import files
from rl.ledger.__main__ import describe, main
from rl.ledger.check import check_run
from rl.ledger.compare import compare_ledgers
from rl.ledger.config import LedgerConfig
from rl.ledger.findings import Checked
from rl.tinker.http_server import TinkerServer
from rl.tinker.local import LocalTinkerBackend
from rl.tinker.service.ledger import CALL_BYTES, DATUM_BYTES, TOKEN_BYTES
from rl.tinker.service.sequences import SampledSequences, hash_prefixes
from rl.tinker.service.service import Service
from rl.types import Completion
from rl.utils.files import TMP_SUFFIX
from tests.support.fake_tinker import Client, prompt
from tests.tinker.parts import NAME, local_backend

PROMPT = [5, 6, 7]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Tokens of a datum in the order of the conversation; None: no advantage."""

    tokens: Sequence[int]
    logprobs: Sequence[float] = ()
    advantage: float | None = None


def make_message(
    model: str, seq_id: int, data: Sequence[Sequence[Part]], loss: str
) -> pb.ForwardBackwardRequest:
    """Return a forward_backward of data, each of several parts."""
    made = pb.ForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn=loss)
    for parts in data:
        whole: list[int] = []
        logprobs: list[float] = []
        weights: list[float] = []
        for part in parts:
            zeros = [0.0] * len(part.tokens)
            whole += part.tokens
            logprobs += part.logprobs or zeros
            weights += [part.advantage or 0.0] * len(part.tokens)
        datum = made.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(whole[:-1], "<i4").tobytes()
        inputs: dict[str, tuple[Any, str, Any]] = {
            "target_tokens": (whole, "<i8", pb.DTYPE_INT64),
            "logprobs": (logprobs, "<f4", pb.DTYPE_FLOAT32),
            "advantages": (weights, "<f4", pb.DTYPE_FLOAT32),
        }
        if loss == "cross_entropy":
            del inputs["logprobs"]
            inputs["weights"] = inputs.pop("advantages")
        for name, (values, dtype, code) in inputs.items():
            array = np.array(values[1:], dtype)
            tensor = pb.Tensor(dense=array.tobytes(), dtype=code, shape=[len(array)])
            datum.loss_fn_inputs[name].CopyFrom(tensor)
    return made


class Trainer:
    """A client with a model, which counts its seq ids."""

    def __init__(self, client: Client, model: str) -> None:
        self.client = client
        self.model = model
        self.seq_id = 0
        self.num_samplers = 0
        self.lr = 1.0

    @property
    def run(self) -> Path:
        return self.client.folder / self.model.replace(":", ".")

    @property
    def session(self) -> str:
        return self.model.partition(":")[0]

    def count(self) -> int:
        self.seq_id += 1
        return self.seq_id

    async def draw(
        self, tokens: Sequence[int], *, num_samples: int = 1, sampler: str = "", seed: int = 3
    ) -> list[Part]:
        """Sample from the weights as they are now, or from a sampler."""
        if not sampler:
            self.num_samplers += 1
            sampler = await self.client.opened(self.model, self.count(), self.num_samplers)
        body = prompt(*tokens, max_tokens=6, seed=seed, num_samples=num_samples, stop=[])
        output = await self.client.result(self.client.sample(sampler, len(tokens) + seed, body))
        parts = []
        for number, sequence in enumerate(output.sequences):
            ids = np.frombuffer(sequence.tokens, "<i4").tolist()
            logprobs = np.frombuffer(sequence.logprobs, "<f4").tolist()
            parts.append(Part(tokens=ids, logprobs=logprobs, advantage=0.5 - number))
        return parts

    async def add(self, data: Sequence[Sequence[Part]], loss: str = "ppo") -> Any:
        training = self.client.service.training
        body = make_message(self.model, self.count(), data, loss).SerializeToString()
        accepted = self.client.now(training.forward_backward, training.decode(body))
        return await self.client.result(accepted.request_id)

    async def step(self) -> Any:
        adam = wire.AdamParams(learning_rate=self.lr)
        step = self.client.submit(
            "optim_step", model_id=self.model, seq_id=self.count(), adam_params=adam
        )
        return await self.client.result(step)


@asynccontextmanager
async def serve(
    storage: Path, assets: Path, ledger: LedgerConfig | None = None
) -> AsyncIterator[Client]:
    """Run a service over the local backend."""
    backend: Any = local_backend(assets)
    ledger = ledger or LedgerConfig(enable=True)
    service = Service(backend=backend, storage_folder=storage, ledger=ledger)
    await service.start()
    try:
        yield Client(service, backend, storage)
    finally:
        await service.close()


async def create(client: Client) -> Trainer:
    model = client.model(base_model=NAME)
    await client.result(f"{model}:0")
    return Trainer(client, model)


def given(*tokens: int, advantage: float | None = None) -> Part:
    return Part(tokens=tokens, advantage=advantage)


QUESTION = given(*PROMPT)


async def train(trainer: Trainer) -> None:
    """Train on a conversation of two turns, on samples of a group and on a text."""
    first, other = await trainer.draw(PROMPT, num_samples=2)
    answer = given(8, 9)
    context = [*PROMPT, *first.tokens, 8, 9]
    (second,) = await trainer.draw(context)
    await trainer.add([[QUESTION, first, answer, second], [QUESTION, other]])
    await trainer.add([[given(1, 2), given(3, 4, advantage=1.0)]], "cross_entropy")
    await trainer.step()
    # A step later, with the weights of the step before.
    (late,) = await trainer.draw(PROMPT, seed=4)
    await trainer.add([[QUESTION, late]], "importance_sampling")
    await trainer.step()
    await trainer.client.saved(trainer.model, trainer.count(), "kept")


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return tmp_path_factory.mktemp("base") / "tied"


@pytest.fixture(scope="module")
def closed(tmp_path_factory, assets):
    """The folder of a training run, of a session without a fault."""
    storage = tmp_path_factory.mktemp("tinker") / "storage"

    async def session() -> Path:
        async with serve(storage, assets) as client:
            trainer = await create(client)
            await train(trainer)
            return trainer.run

    return asyncio.run(session())


def test_session_closes_and_says_what_is_not_proved(closed, capsys):
    checked = check_run(closed)
    assert (checked.violation, checked.num_steps, checked.num_episodes) == (None, 2, 4)
    assert main([str(closed)]) == 0
    assert capsys.readouterr().out == (
        "2 steps, 4 data, 26 trained tokens\n"
        "sampled by this server as they are: 24; in the place of a sampled reply, but edited or "
        "cut: 0; given by the client: 2\n"
        "oldest weights that have sampled them: 0 steps before their training\n"
        "not proved: rewards, masks and advantages, which the client has computed\n"
        "every trained token is as it was sampled or given\n"
    )


# Edits of the files


def rewrite(run: Path, change: Callable[[dict[str, Any], dict[str, list[Any]]], object]) -> None:
    """Change facts and columns of the first file, and the names and digests that follow from it."""
    digest = ""
    for file in files.list_files(run / "ledger"):
        record = files.read(file)
        facts, table = json.loads(json.dumps(record.facts)), record.table
        if not digest:
            columns = table.to_pydict()
            change(facts, columns)
            table = pa.Table.from_pydict(columns, schema=table.schema)
        else:
            facts["previous"] = digest
        file.path.unlink()
        facts = {name: value for name, value in facts.items() if name not in ("version", "step")}
        digest = files.write(run / "ledger", table, step=file.step, facts=facts).digest
    record_file = run / "weights" / "kept.json"
    record = json.loads(record_file.read_text())
    record["ledger"]["digest"] = digest
    record_file.write_text(json.dumps(record))


def edit(name: str, row: int, token: int, value: Any) -> Callable[..., None]:
    """Return an edit of a token in a column."""

    def change(facts: dict[str, Any], columns: dict[str, list[Any]]) -> None:
        columns[name][row][token] = value

    return change


def double_row(facts: dict[str, Any], columns: dict[str, list[Any]]) -> None:
    for values in columns.values():
        values.append(values[2])


def call_given_sampled(facts: dict[str, Any], columns: dict[str, list[Any]]) -> None:
    columns["role"][3] = "sampled"


def double_call(facts: dict[str, Any], columns: dict[str, list[Any]]) -> None:
    facts["minibatches"][1]["seq_id"] = facts["minibatches"][0]["seq_id"]


def set_sum(name: str, value: float) -> Callable[..., None]:
    return lambda facts, columns: facts["minibatches"][0].update({name: value})


def sample_later(facts: dict[str, Any], columns: dict[str, list[Any]]) -> None:
    facts["steps_of_versions"] = dict.fromkeys(facts["steps_of_versions"], 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (edit("token_ids", 0, 2, 100), r"step 1, forward_backward 3, datum 0, span 0: digest of"),
        (edit("logprobs", 1, 0, -9.0), r"step 1, forward_backward 3, datum 0, span 1: digest of"),
        (edit("advantages", 2, 0, 3.0), r"datum 1, span 0, token 0: advantage in .* expected 3"),
        (edit("mask", 2, 1, 4), r"token 1: the token in the trainer's loss: expected not trained"),
        (double_row, "num_tokens of minibatch 0, as the trainer says: expected 24, found 18"),
        (call_given_sampled, r"step 1, forward_backward 4, datum 0, span 0: digest of"),
        (double_call, r"seq id of the call after that with 3: expected above 3, found 3 \(once\)"),
        (set_sum("denominator", 18.0), "denominator of minibatch 0, .*: expected 0, found 18"),
        (set_sum("loss_sum", 1.5), "loss_sum of minibatch 0, as the trainer says: expected -?\\d"),
        (sample_later, r"expected at most 0, found 1 \(staleness\)"),
        (lambda facts, _: facts["dropped"].append(3), "expected dropped, found part of the step"),
        (
            lambda facts, _: facts["optim_step"].update(policy_version=7),
            r"step 2: policy version after the step: expected 8, found 2 \(versions\)",
        ),
    ],
)
def test_edit_of_a_ledger_is_found_and_named(closed, tmp_path, change, says):
    run = tmp_path / closed.name
    shutil.copytree(closed, run)
    rewrite(run, change)
    found = str(check_run(run).violation)
    assert re.search(says, found), found


def test_edited_removed_and_cut_files_are_found(closed, tmp_path):
    run = tmp_path / closed.name
    shutil.copytree(closed, run)
    first, last = files.list_files(run / "ledger")
    content = first.path.read_bytes()
    first.path.write_bytes(content[:-100])
    assert "it was edited or cut off" in str(check_run(run).violation)
    first.path.write_bytes(content)
    assert check_run(run).violation is None
    last.path.unlink()
    assert "the step after which weights/kept was saved" in str(check_run(run).violation)


def test_fault_between_the_call_and_the_loss_is_found(tmp_path, assets, monkeypatch):
    async def session() -> Path:
        async with serve(tmp_path / "storage", assets) as client:
            backend: Any = client.backend
            forward_backward = backend._workers.forward_backward

            async def shift(samples: Any, **options: Any) -> Any:
                shifted = [replace(s, mask=np.roll(s.mask, -1)) for s in samples]
                return await forward_backward(shifted, **options)

            monkeypatch.setattr(backend._workers, "forward_backward", shift)
            trainer = await create(client)
            await train(trainer)
            return trainer.run

    found = str(check_run(asyncio.run(session())).violation)
    assert "the token in the trainer's loss: expected trained, found not trained" in found


# What a client may do, which is counted


def check_session(
    tmp_path: Path, assets: Path, play: Callable[[Trainer], Any], **options: Any
) -> Checked:
    """Return what is found of a session."""

    async def session() -> Path:
        async with serve(tmp_path / "storage", assets, **options) as client:
            trainer = await create(client)
            await play(trainer)
            return trainer.run

    checked = check_run(asyncio.run(session()))
    assert checked.violation is None
    return checked


def test_data_that_are_not_as_they_were_sampled_are_counted(tmp_path, assets):
    async def play(trainer: Trainer) -> None:
        (drawn,) = await trainer.draw(PROMPT)
        base_sampler = trainer.client.create_sampler(trainer.session, 9, base_model=NAME)
        base = await trainer.draw(PROMPT, sampler=base_sampler, seed=8)
        await trainer.add([[QUESTION, drawn], [QUESTION, base[0]]])
        await trainer.add([[QUESTION, drawn]])
        other = replace(drawn, logprobs=[p - 0.5 for p in drawn.logprobs])
        cut = replace(drawn, tokens=drawn.tokens[:-2], logprobs=drawn.logprobs[:-2])
        edited = replace(drawn, tokens=[*drawn.tokens[:3], 1, *drawn.tokens[4:]])
        await trainer.add([[QUESTION, other], [QUESTION, cut], [QUESTION, edited]])
        await trainer.add([[given(*PROMPT, 1), drawn]])
        await trainer.add([[QUESTION, replace(drawn, advantage=None)], [QUESTION]])
        # Supervised learning of a text after the same prompt.
        await trainer.add([[QUESTION, given(9, 9, 9, advantage=1.0)]], "cross_entropy")
        await trainer.step()

    checked = check_session(tmp_path, assets, play)
    counts = checked.counts
    assert (counts["sampled"], counts["edited"], counts["given"]) == (24, 10, 9)
    assert counts["other weights"] == 6
    assert (counts["trained again"], counts["other logprobs"]) == (12, 6)
    text = describe(checked)
    assert "trained with other logprobs than were sampled: 6, first at step 1, forward_" in text
    assert "sampled with weights that this training has not made: 6" in text


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_sums_of_each_loss_are_computed_again(tmp_path, assets, loss):
    async def play(trainer: Trainer) -> None:
        first, other = await trainer.draw(PROMPT, num_samples=2)
        await trainer.add([[QUESTION, first], [QUESTION, other]], loss)
        await trainer.step()
        await trainer.add([[QUESTION, first], [QUESTION, other]], loss)
        await trainer.step()

    checked = check_session(tmp_path, assets, play)
    assert checked.counts["oldest"] == 1


def test_loss_with_a_mean_over_other_tokens_is_not_computed_again(tmp_path, assets):
    async def play(trainer: Trainer) -> None:
        (drawn,) = await trainer.draw(PROMPT)
        made = make_message(trainer.model, trainer.count(), [[QUESTION, drawn]], "gspo")
        inputs = made.data[0].loss_fn_inputs
        inputs["sequence_ratio_mask"].CopyFrom(inputs["advantages"])
        ones = np.ones(len(PROMPT) - 1 + len(drawn.tokens), "<f4")
        inputs["sequence_ratio_mask"].dense = ones.tobytes()
        training = trainer.client.service.training
        body = training.decode(made.SerializeToString())
        accepted = trainer.client.now(training.forward_backward, body)
        await trainer.client.result(accepted.request_id)
        await trainer.step()

    text = describe(check_session(tmp_path, assets, play))
    assert "not proved: losses with a sequence_ratio_mask, which is not recorded" in text


def test_dropped_gradients_are_no_part_of_a_step(tmp_path, assets):
    async def play(trainer: Trainer) -> None:
        client = trainer.client
        (drawn,) = await trainer.draw(PROMPT)
        data = [[QUESTION, drawn]]
        await trainer.add(data)
        training = client.service.training
        wrong = make_message(trainer.model, trainer.count(), data, "ppo")
        wrong.loss_fn = "none"
        with pytest.raises(ValueError, match="loss_fn='none'"):
            client.now(training.forward_backward, training.decode(wrong.SerializeToString()))
        refused = await client.failure(client.step(trainer.model, trainer.count()))
        assert "the gradient would be that of part of a batch" in refused.error
        await trainer.add(data)
        await trainer.step()
        (file,) = files.list_files(trainer.run / "ledger")
        facts = files.read(file).facts
        assert facts["dropped"] == [2]
        assert [call["seq_id"] for call in facts["minibatches"]] == [5]

    assert check_session(tmp_path, assets, play).counts["sampled"] == 6


def test_calls_without_room_are_recorded_by_their_numbers(tmp_path, assets):
    async def play(trainer: Trainer) -> None:
        (drawn,) = await trainer.draw(PROMPT)
        ledgers: Any = trainer.client.service.training._ledgers
        one = CALL_BYTES + DATUM_BYTES + TOKEN_BYTES * 9
        ledgers.max_waiting_bytes = 3 * one
        for _ in range(3):
            await trainer.add([[QUESTION, drawn]])
        assert ledgers.waiting_bytes.total() == one
        await trainer.step()
        assert ledgers.waiting_bytes.total() == 0

    checked = check_session(tmp_path, assets, play)
    assert "not proved: calls for which there was no room" in describe(checked)
    assert (checked.num_tokens, checked.counts["sampled"]) == (6, 6)


# Restarts


def test_training_that_is_resumed_after_a_kill_names_the_ledger_before(tmp_path, assets):
    storage = tmp_path / "storage"

    async def session() -> tuple[Path, Path, Path]:
        async with serve(storage, assets) as client:
            trainer = await create(client)
            await train(trainer)
            path = f"tinker://{trainer.model}/weights/kept"
            # A step that was not saved, and a file that a kill has left.
            await trainer.add([[QUESTION, given(1, advantage=1.0)]])
            await trainer.step()
        (trainer.run / "ledger" / f"000004{TMP_SUFFIX}").touch()
        async with serve(storage, assets) as client:
            loaded = client.load(path, session_id=client.session(), model_seq_id=0)
            resumed = Trainer(client, (await client.result(loaded)).model_id)
            (drawn,) = await resumed.draw(PROMPT)
            await resumed.add([[QUESTION, drawn]])
            await resumed.step()
            await client.saved(resumed.model, resumed.count(), "kept")
            unsaved = await create(client)
            await unsaved.add([[QUESTION, given(1, advantage=1.0)]])
            await unsaved.step()
        async with serve(storage, assets):
            return trainer.run, resumed.run, unsaved.run

    first, resumed, unsaved = asyncio.run(session())
    # A ledger goes with its run, of which nothing is left without a checkpoint.
    assert not unsaved.exists()
    kept = files.list_files(first / "ledger")
    assert {path.name for path in (first / "ledger").iterdir()} == {f.path.name for f in kept}
    assert (check_run(first).violation, check_run(first).num_steps) == (None, 3)
    checked = check_run(resumed)
    assert (checked.violation, checked.num_steps, checked.counts["oldest"]) == (None, 1, 0)
    model = first.name.replace(".", ":")
    assert f"this training goes on after step 2 of {model}\n" in describe(checked)

    kept[1].path.rename(kept[1].path.with_name(f"000002-{'0' * 32}.parquet"))
    assert f"in the ledger of tinker://{model}/weights/kept" in str(check_run(resumed).violation)
    shutil.rmtree(first)
    checked = check_run(resumed)
    assert checked.violation is None
    assert "the ledger of its run is not there" in checked.notes[0]


def test_folder_of_runs_names_those_with_a_ledger(closed, capsys):
    assert main([str(closed.parent)]) == 2
    assert f"has no ledger, but those of its folders {closed.name}" in capsys.readouterr().err
    assert main([str(closed), "--replay", "1"]) == 2
    assert "not for Tinker sessions" in capsys.readouterr().err


def test_sessions_part_at_the_first_thing_that_differs(closed, tmp_path, assets):
    def play(lr: float) -> Path:
        async def session() -> Path:
            async with serve(tmp_path / str(lr), assets) as client:
                trainer = await create(client)
                trainer.lr = lr
                await train(trainer)
                return trainer.run

        return asyncio.run(session())

    folders = [run / "ledger" for run in (closed, play(1.0), play(0.5))]
    same, other = (compare_ledgers(folders[0], folder) for folder in folders[1:])
    assert (same.num_steps, same.parting) == (2, None)
    assert str(other.parting) == "step 1: lr of the optim_step: 1 and 0.5"


# Parts


def test_share_of_a_servers_ledger_is_refused():
    backend = LocalTinkerBackend.Config()
    with pytest.raises(ValueError, match=r"ledger.share=0.5: must be 1.0"):
        TinkerServer.Config(backend=backend, ledger=LedgerConfig(enable=True, share=0.5))


def make_completion(*tokens: int, logprob: float = -0.5) -> Completion:
    return Completion(
        token_ids=np.array(tokens, np.int32),
        logprobs=np.full(len(tokens), logprob, np.float32),
        policy_versions=np.ones(len(tokens), np.int32),
        finish_reason="stop",
    )


def test_sequences_are_bounded_and_those_of_the_owner_alone():
    sequences = SampledSequences(max_sequences=4)

    def remember(owner: str, *tokens: int) -> None:
        sequences.remember(
            np.array([1, 2], np.int32),
            [make_completion(*tokens)],
            owner=owner,
            request=str(tokens),
            generator="base",
            mark=None,
        )

    def find(owner: str, *tokens: int) -> list[tuple[int, int]]:
        whole = np.array(tokens, np.int32)
        given = np.zeros(len(whole), np.float32)
        spans, _ = sequences.find_spans(whole, given, owner=owner)
        return [(span.start, span.end) for span in spans]

    remember("a", 3, 4)
    assert find("a", 1, 2, 3, 4, 9) == [(2, 4)]
    assert find("a", 1, 2, 3, 5) == find("a", 2, 1, 3, 4) == find("b", 1, 2, 3, 4) == []
    for token in range(5):
        remember("b", token)
    # The one with most gives way, so that nobody pushes out what is another's.
    assert find("a", 1, 2, 3, 4) == [(2, 4)]
    assert find("b", 1, 2, 0) == []
    assert find("b", 1, 2, 4) == [(2, 3)]


def test_equal_sequences_are_told_apart_by_their_logprobs_and_then_used_once_each():
    sequences = SampledSequences()
    for request, logprob in (("a", -0.5), ("b", -0.5), ("c", -0.25)):
        sequences.remember(
            np.array([1, 2], np.int32),
            [make_completion(3, logprob=logprob)],
            owner="",
            request=request,
            generator="base",
            mark=None,
        )

    def find(logprob: float) -> str:
        logprobs = np.array([0, 0, logprob], np.float32)
        ((span,), _) = sequences.find_spans(np.array([1, 2, 3], np.int32), logprobs, owner="")
        return span.sequence.receipt.request

    assert {find(-0.5), find(-0.5)} == {"a.0", "b.0"}
    assert [find(-0.25), find(-0.25)] == ["c.0", "c.0"]


def test_hash_of_a_prefix_depends_on_the_order_of_its_tokens():
    hashes = [hash_prefixes(np.array(ids)).tolist() for ids in ([1, 2, 3], [2, 1, 3])]
    assert hashes[0][0] == hashes[1][0] == 0
    assert not set(hashes[0][1:]) & set(hashes[1][1:])
