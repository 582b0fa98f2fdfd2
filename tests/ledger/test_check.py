"""The check of a ledger: clean runs close, and each planted fault is found and named."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from configs import agents, gsm8k, sum_digits
from losses.policy import GRPOLoss
from losses.types import Loss, LossInputs, uses_proximal_logprobs
from rl.bisect import main as bisect
from rl.config.json import name_code, to_dict
from rl.ledger import files, writer
from rl.ledger.__main__ import main
from rl.ledger.check import check_run
from rl.ledger.config import LedgerConfig
from rl.ledger.findings import Checked
from rl.ledger.rules import check_problems
from rl.ledger.sealing import seal
from rl.ledger.writer import Ledger, cut_back
from rl.loop import batch
from rl.loop.ledger import StepLedger
from rl.observability.recorder import Recorder, RecorderConfig
from rl.reporting.data import read_run
from rl.rollouts.advantage import KLReward
from rl.rollouts.staleness import WeightVersions
from rl.rollouts.trained import TOO_LONG, TRAINED
from rl.trainer_types import ForwardBackwardResult
from rl.types import Completion, TrainingSample
from tests.loop.test_rows import ALGORITHMS
from tests.support.fakes import FakePolicy
from tests.support.loops import half_right, make_loop
from tests.support.loops import problems as numbered_problems

LOSS = GRPOLoss(normalization="sequence_mean")
SETTINGS = {"num_steps": 3, "groups_per_batch": 4, "group_size": 4, "num_minibatches": 2}
Edit = Callable[[Any], Any]
PROXIMAL = "proximal_logprobs"


class Honest(FakePolicy):
    """Generator with receipts, and a trainer that computes a real loss."""

    loss: Loss = LOSS
    names = itertools.count()
    edit_completion: Edit = staticmethod(lambda completion: completion)
    """Fault between the generator and the rollouts."""
    edit_samples: Edit = staticmethod(lambda samples: samples)
    """Fault between the loop and the loss."""
    edit_result: Edit = staticmethod(lambda result: result)
    """Fault in what the trainer computes."""

    async def generate(self, prompts: Sequence[np.ndarray], **options: Any) -> Any:
        groups = await super().generate(prompts, **options)
        sealed = seal(groups, prompts, generator="generator-0", call=f"c{next(self.names)}")
        return [[self.edit_completion(c) for c in group] for group in sealed]

    async def forward_backward(self, samples: Sequence[TrainingSample], **options: Any) -> Any:
        told = await super().forward_backward(samples, **options)
        read = self.edit_samples(list(samples))
        result = compute(read, self.loss, told)
        wanted = options["return_trained"] or ()
        kept = [read[i] if i < len(read) else None for i in wanted]
        nothing = [np.full(len(samples[i].token_ids), np.nan, np.float32) for i in wanted]
        trained = tuple(
            replace(t, logprobs=none, advantages=none) if s is None else self.read_tokens(s)
            for t, s, none in zip(told.trained or (), kept, nothing, strict=True)
        )
        return self.edit_result(replace(result, trained=trained))


def compute(
    samples: Sequence[TrainingSample], loss: Loss, told: ForwardBackwardResult
) -> ForwardBackwardResult:
    """Return the sums of a loss over samples, all of them in one micro-batch."""

    def join(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(s, name) for s in samples]))

    lengths = torch.tensor([len(s.token_ids) for s in samples])
    mask = join("mask")
    generator = join("generator_logprobs")
    output = loss(
        LossInputs(
            logprobs=torch.full_like(generator, -1.0),
            generator_logprobs=generator,
            advantages=join("advantages"),
            mask=mask,
            sequence_ids=torch.arange(len(samples)).repeat_interleave(lengths),
            num_sequences=len(samples),
            reference_logprobs=torch.zeros_like(generator),
            proximal_logprobs=None if samples[0].proximal_logprobs is None else join(PROXIMAL),
        )
    )
    return replace(
        told,
        loss_sum=float(output.loss_sum),
        denominator=0.0 if output.denominator is None else float(output.denominator),
        num_samples=len(samples),
        num_trained_tokens=int(mask.sum()),
        advantage_sum=float(join("advantages")[mask].double().sum()),
    )


def train(
    folder: Path, policy: Honest, *, ledger: LedgerConfig | None = None, **settings: Any
) -> Path:
    """Train in a folder with a ledger, and return it."""
    config = SETTINGS | settings
    folder.mkdir(exist_ok=True)
    loop, sink = make_loop(
        policy,
        problems=numbered_problems(),
        proximal_logprobs=uses_proximal_logprobs(policy.loss),
        **config,
    )
    loop.ledger = StepLedger(
        ledger=Ledger(folder / "ledger", config=ledger or LedgerConfig(enable=True)),
        config=loop.config,
        loss={"class": name_code(type(policy.loss)), **to_dict(policy.loss)},
    )
    loop.recorder = Recorder(folder / "rollouts.jsonl", config=RecorderConfig(num_groups=None))
    asyncio.run(loop.run())
    lines = [json.dumps({"step": r["step"], "policy_version": 0}) + "\n" for r in sink.records]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def find(folder: Path) -> str:
    """Return the violation of a run."""
    checked = check_run(folder)
    assert checked.violation is not None
    return str(checked.violation)


@pytest.fixture(scope="module")
def closed(tmp_path_factory):
    """The folder of a run without a fault."""
    return train(tmp_path_factory.mktemp("closed"), Honest(reply=half_right))


def test_clean_run_closes(closed, capsys):
    checked = check_run(closed)
    assert (checked.violation, checked.notes) == (None, [])
    assert (checked.num_steps, checked.num_episodes) == (3, 3 * 4 * 4)
    assert main([str(closed)]) == 0
    assert "every trained token follows" in capsys.readouterr().out


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("ahead", [0, 2])
def test_runs_of_named_algorithms_close(tmp_path, name, ahead):
    config = sum_digits.tiny()
    ALGORITHMS[name](config)
    policy = Honest(reply=half_right, train_s=0.02)
    policy.loss = config.trainer.loss
    settings = {
        field: getattr(config.loop, field)
        for field in ("advantage", "kl_reward", "overlong", "mask_truncated_completions")
    }
    train(tmp_path, policy, max_off_policy_steps=ahead, **settings)
    checked = check_run(tmp_path)
    assert checked.violation is None
    assert checked.num_tokens > 0


def test_run_whose_loss_has_a_part_that_others_lack_closes(tmp_path):
    policy = Honest(reply=half_right, train_s=0.02)
    policy.loss = sum_digits.tiny_async().trainer.loss  # with an ImportanceCorrection
    train(tmp_path, policy, max_off_policy_steps=1)
    assert check_run(tmp_path).violation is None


def edit_first(change: Callable[[Completion], Completion]) -> Edit:
    """Return a fault of the sixth completion."""
    numbers = itertools.count()
    return lambda c: change(c) if next(numbers) == 5 else c


def set_token(c: Completion) -> Completion:
    ids = c.token_ids.copy()
    ids[2] += 1
    return replace(c, token_ids=ids)


def set_version(c: Completion) -> Completion:
    versions = c.policy_versions.copy()
    versions[0] = 1
    return replace(c, policy_versions=versions)


def swap_advantages(samples: list[TrainingSample]) -> list[TrainingSample]:
    first, other = samples[0], samples[3]
    value, other_value = first.advantages[first.mask][0], other.advantages[other.mask][0]
    samples[0] = replace(first, advantages=np.where(first.mask, other_value, 0).astype(np.float32))
    samples[3] = replace(other, advantages=np.where(other.mask, value, 0).astype(np.float32))
    return samples


def shift_mask(samples: list[TrainingSample]) -> list[TrainingSample]:
    return [replace(s, mask=np.roll(s.mask, -1)) for s in samples]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"edit_completion": edit_first(set_token)}, r"step 1, problem .*sample 1, turn 0: digest"),
        ({"edit_completion": edit_first(set_version)}, r"step 1, problem .*sample 1, turn 0: "),
        ({"edit_samples": lambda s: [*s, s[0]]}, "num_tokens of minibatch 0"),
        ({"edit_samples": lambda s: s[:-1]}, r"sample 3, turn 0, token 0: the token in the train"),
        ({"edit_samples": shift_mask}, r"expected (not )?trained, found (not )?trained"),
        ({"edit_samples": swap_advantages}, r"sample 0, turn 0, token 0: advantage in the train"),
        (
            {"edit_result": lambda r: replace(r, denominator=2 * r.denominator)},
            "denominator of minibatch 0, as the trainer says: expected 8, found 16",
        ),
        (
            {"edit_completion": lambda c: replace(c, receipt=None)},
            "expected one for each reply that is trained on, found none",
        ),
    ],
)
def test_fault_of_a_run_is_found_and_named(tmp_path, monkeypatch, fault, says):
    # The loop's own check would end the run at a wrong version.
    count = lambda self, groups, *, step: np.zeros(1, np.int64)  # noqa: E731
    monkeypatch.setattr(WeightVersions, "count_off_policy_steps", count)
    policy = Honest(reply=half_right)
    for name, edit in fault.items():
        setattr(policy, name, edit)
    train(tmp_path, policy)
    assert re.search(says, find(tmp_path))


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the facts of the last file, with a name that fits them."""
    last = files.list_files(folder / "ledger")[-1]
    record = files.read(last)
    facts = json.loads(json.dumps(record.facts))
    change(facts)
    last.path.unlink()
    step = facts.pop("step")
    del facts["version"]
    files.write(folder / "ledger", record.table, step=step, facts=facts)


def repeat_problem(facts: dict[str, Any]) -> None:
    facts["groups"][0]["number"] = 5


def repeat_in_step(facts: dict[str, Any]) -> None:
    facts["groups"][0]["number"] = facts["groups"][1]["number"]


def forget_minibatch(facts: dict[str, Any]) -> None:
    facts["minibatches"].pop()


def make_younger(facts: dict[str, Any]) -> None:
    facts["steps_of_versions"] |= {"2": 2}


def set_reward(facts: dict[str, Any]) -> None:
    facts["groups"][1]["members"][2]["reward"] = 0.25


def forget_version(facts: dict[str, Any]) -> None:
    facts["steps_of_versions"] = {}


def jump(facts: dict[str, Any]) -> None:
    facts["minibatches"][0]["policy_version"] = 9


def supersede(folder: Path) -> None:
    """Say of a trained turn that it was a reply which the agent did not go on with."""
    last = files.list_files(folder / "ledger")[-1]
    record = files.read(last)
    column = record.table.column_names.index("role")
    roles = record.table["role"].to_pylist()
    roles[3] = "superseded"
    field = record.table.schema.field(column)
    table = record.table.set_column(column, field, [pa.array(roles, type=field.type)])
    last.path.unlink()
    facts = {k: v for k, v in record.facts.items() if k not in ("step", "version")}
    files.write(folder / "ledger", table, step=3, facts=facts)


def continue_itself(folder: Path) -> None:
    """Say of a turn that it goes on after itself, which would have no end."""
    last = files.list_files(folder / "ledger")[-1]
    record = files.read(last)
    column = record.table.column_names.index("parent")
    field = record.table.schema.field(column)
    parents = pa.array([0] * len(record.table), type=field.type)
    last.path.unlink()
    facts = {k: v for k, v in record.facts.items() if k not in ("step", "version")}
    table = record.table.set_column(column, field, [parents])
    files.write(folder / "ledger", table, step=3, facts=facts)


def edit_byte(folder: Path) -> None:
    file = files.list_files(folder / "ledger")[1].path
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def cut_file(folder: Path) -> None:
    file = files.list_files(folder / "ledger")[1].path
    file.write_bytes(file.read_bytes()[:-100])


def remove(number: int) -> Callable[[Path], None]:
    return lambda folder: files.list_files(folder / "ledger")[number].path.unlink()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (edit_byte, r"step 2: 000002-\w+.parquet: .*it was edited or cut off"),
        (cut_file, r"step 2: 000002-\w+.parquet: .*it was edited or cut off"),
        (remove(1), "step 3: the file after .*: expected step 2, found step 3"),
        (remove(0), "step 1: the ledger begins later than its last file says: expected step 1, "),
        (remove(2), "step 3: the ledger ends before metrics.jsonl"),
        (
            lambda folder: rewrite(folder, set_reward),
            r"step 3, problem .*, turn 0, token 0: advantage of a reward of \S+: expected 0.01",
        ),
        (
            lambda folder: rewrite(folder, forget_version),
            "age of policy version 4, which has sampled it: expected 0 to 0 steps, found unknown",
        ),
        (
            supersede,
            "sample 3, turn 0: role of the branch of a trained turn: expected main, found supersed",
        ),
        (
            lambda folder: rewrite(folder, lambda facts: facts.pop("groups")),
            "as a run writes it, found KeyError: 'groups'",
        ),
        (
            lambda folder: rewrite(folder, repeat_problem),
            "step 3: problem number 5: expected in one step, once, found again",
        ),
        (
            lambda folder: rewrite(folder, repeat_in_step),
            "step 3: problem number 9: expected in one step, once, found again",
        ),
        (
            lambda folder: rewrite(folder, forget_minibatch),
            "step 3: number of minibatches of which the trainer says sums: expected 2, found 1",
        ),
        (
            lambda folder: rewrite(folder, make_younger),
            "step 3: step after which .* of policy version 2: expected 1, found 2",
        ),
        (
            continue_itself,
            "as a run writes it, found ValueError: row 0: turn 0 goes on after turn 0",
        ),
        (lambda folder: rewrite(folder, jump), "after minibatch 0: expected 5, found 9"),
        (
            lambda folder: rewrite(folder, lambda facts: facts.update(previous="0" * 32)),
            "digest of the file before",
        ),
    ],
)
def test_edit_of_a_ledger_is_found_and_named(closed, tmp_path, change, says):
    folder = tmp_path / "run"
    shutil.copytree(closed, folder)
    change(folder)
    found = find(folder)
    assert re.search(says, found), found
    assert main([str(folder)]) == 1


def test_last_step_of_a_run_that_was_killed_may_be_missing_and_is_told(closed, tmp_path):
    folder = shutil.copytree(closed, tmp_path / "killed")
    (folder / "status.json").write_text('{"status": "running"}')
    remove(2)(folder)
    checked = check_run(folder)
    assert checked.violation is None
    assert checked.notes[0].startswith("step 3, the last one in metrics.jsonl: its file is not")
    remove(1)(folder)
    assert "step 2: the ledger ends before" in str(check_run(folder).violation)
    (folder / "config.json").write_text('{"values": {"ledger": {"enable": false}}}')
    checked = check_run(folder)
    assert (checked.violation, checked.notes[0][:14]) == (None, "steps after 1:")


def test_reading_a_file_starts_no_thread_that_could_abort_the_end_of_the_process(closed):
    program = """if True:
        import os, sys
        from pathlib import Path
        import pyarrow.parquet
        from rl.ledger.files import list_files, read, read_columns
        before = len(os.listdir("/proc/self/task"))
        for file in list_files(Path(sys.argv[1])):
            read(file)
            read_columns(file, ("group", "token_ids"))
        print(len(os.listdir("/proc/self/task")) - before)
    """
    command = [sys.executable, "-c", program, str(closed / "ledger")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "0\n"


def test_replay_and_show_are_not_asked_at_once(closed, capsys):
    with pytest.raises(SystemExit):
        main([str(closed), "--replay", "2", "--show", "1", "p", "0"])
    assert "--show: not allowed with argument --replay" in capsys.readouterr().err


def test_tiny_configs_write_a_whole_ledger():
    tinies = [sum_digits.tiny(), sum_digits.tiny_fsdp2(), gsm8k.tiny(), agents.calculator_agent()]
    assert {(c.ledger.enable, c.ledger.share) for c in tinies} == {(True, 1.0)}


def test_loss_that_is_not_finite_does_not_end_the_run(tmp_path):
    policy = Honest(reply=half_right)
    policy.edit_result = lambda result: replace(result, loss_sum=math.inf)
    assert "found inf" in find(train(tmp_path, policy))


def swap_for_folder(folder: Path) -> None:
    file = files.list_files(folder / "ledger")[1].path
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    ("change", "num_left", "num_violations"),
    [(edit_byte, 2, 1), (swap_for_folder, 2, 1), (remove(0), 2, 1), (remove(1), 2, 1)],
)
def test_what_a_damaged_file_leaves_is_checked(
    closed, tmp_path, capsys, change, num_left, num_violations
):
    folder = tmp_path / "run"
    shutil.copytree(closed, folder)
    change(folder)
    assert not check_run(folder).notes
    assert main([str(folder)]) == 1
    *violations, last = capsys.readouterr().out.splitlines()[-num_violations - 1 :]
    assert all(line.startswith("violation: ") for line in violations)
    assert last.startswith(f"of the other {num_left} steps every trained token follows")

    # A fault of a step after the damage is found too, and ends the check.
    rewrite(folder, set_reward)
    assert main([str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert re.match("violation: step 3, problem .*: advantage of a reward", lines[-1])


def test_step_that_the_disk_had_no_room_for_is_a_gap_of_the_run(tmp_path, monkeypatch, caplog):
    write = files.write

    def fail(folder, table, *, step, facts):
        if step in (2, 3):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(folder, table, step=step, facts=facts)

    monkeypatch.setattr(files, "write", fail)
    train(tmp_path, Honest(reply=half_right), num_steps=5)
    assert caplog.text.count("ledger was not written: No space left on device; the run goes") == 1
    checked = check_run(tmp_path)
    (violation,) = checked.violations
    assert str(violation).endswith(
        ": expected step 2, found step 4, as the run has written them (order)"
    )
    assert checked.num_steps == 3


def test_problems_of_unknown_steps_are_not_missing():
    def step(number, *numbers):
        groups = [{"number": n} for n in numbers]
        facts: dict[str, Any] = {"dropped": []}
        settings = {"max_off_policy_steps": 1}
        return SimpleNamespace(number=number, groups=groups, facts=facts, settings=settings)

    # Step 4 had problems 8 and 11, and is not in the ledger.
    steps: list[Any] = [step(5, 7, 9), step(6, 10, 12), step(7, 13, 14), step(8, 15, 17)]
    steps += [step(n, 2 * n + 2, 2 * n + 3) for n in (9, 10, 11)]
    checked = Checked()
    found = [str(f.what) for s in steps for f in check_problems(s, checked)]
    assert found == ["problem number 16, which step 8 has passed over"]


def test_report_links_each_rollout_to_its_rows(closed, tmp_path):
    rollouts = read_run(closed).rollouts
    assert len(rollouts) == 3 * 4 * 4
    for rollout in rollouts:
        number = rollout["step"] - 1
        file = files.list_files(closed / "ledger")[number]
        assert rollout["ledger"]["file"] == f"ledger/{file.path.name}"
        (turn,) = rollout["turns"]
        row = int(turn["ledger"].split()[1])
        table = files.read(file).table
        assert table["token_ids"][row].as_py() == turn["token_ids"]
        assert f"request {table['request'][row]} of generator-0" in turn["ledger"]
        num_tokens = len(turn["token_ids"])
        minibatch = rollout["group"] // 2
        assert turn["ledger"].endswith(f"minibatch {minibatch} · tokens: {num_tokens} trained")

    # What the ledger has of others stays; a run without a ledger shows nothing new.
    folder = tmp_path / "run"
    shutil.copytree(closed, folder)
    cut_file(folder)
    (problem,) = (text for text in read_run(folder).problems if "ledger" in text)
    assert re.match(r"1 files of the ledger cannot be read \(.*\): 000002-", problem)
    linked = [rollout["step"] for rollout in read_run(folder).rollouts if "ledger" in rollout]
    assert set(linked) == {1, 3}
    shutil.rmtree(folder / "ledger")
    assert not any("ledger" in json.dumps(rollout) for rollout in read_run(folder).rollouts)


def test_command_of_a_linked_rollout_prints_its_tokens(closed, capsys):
    rollout = read_run(closed).rollouts[-1]
    command = shlex.split(rollout["ledger"]["command"])
    assert command[:4] == ["python", "-m", "rl.ledger", str(closed)]
    assert main(command[3:]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == rollout["ledger"]["file"]
    assert printed[1] == f"problem {rollout['problem']!r}, sample 3: reward 0, end done"
    assert re.match(r"row \d+: turn 0, role main, minibatch 1, request c\d+.3 of", printed[2])
    (turn,) = rollout["turns"]
    shown = [line.split() for line in printed[4:]]
    assert [int(values[1]) for values in shown] == turn["token_ids"]
    assert {values[5] for values in shown} == {"trained"}
    assert [float(v[6]) for v in shown] == pytest.approx([turn["advantages"]] * len(shown))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["9", "p", "0"], "the ledger has no such step; it has 1 to 3"),
        (["1", "p", "0"], "step 1 has no problem 'p'; it has 4: "),
        (["1", "sum-digits/10-1000", "7"], "step 1 has no sample 7; it has 0, 1, 2, 3"),
        (["first", "p", "0"], "STEP and SAMPLE must be numbers"),
    ],
)
def test_episode_that_is_not_there_is_named(closed, capsys, words, says):
    assert main([str(closed), "--show", *words]) == 2
    assert says in capsys.readouterr().err


def test_file_that_is_not_as_a_run_writes_it_is_an_error_of_one_line(closed, tmp_path, capsys):
    folder = shutil.copytree(closed, tmp_path / "run")
    rewrite(folder, lambda facts: facts["settings"].update(num_minibatches=0))
    assert "as a run writes it, found ZeroDivisionError" in find(folder)
    rewrite(folder, lambda facts: facts["settings"]["loss"].update({"class": "losses.no.Loss"}))
    rewrite(folder, lambda facts: facts["settings"].update(num_minibatches=2))
    assert "as a run writes it, found ModuleNotFoundError" in find(folder)
    rewrite(folder, lambda facts: facts.pop("groups"))
    show = [str(folder), "--show", "3", "p", "0"]
    for program, words in ((main, show), (bisect, [str(closed), str(folder)])):
        assert program(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "not as a run writes it" in line


def test_folder_without_a_ledger_says_how_to_have_one(closed, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/ledger").touch()
    (tmp_path / "empty/ledger").mkdir(parents=True)
    (tmp_path / "enabled").mkdir()
    config = {"values": {"ledger": {"enable": True}}}
    (tmp_path / "enabled/config.json").write_text(json.dumps(config))
    for folder, says in {
        tmp_path: "--ledger.enable True",
        tmp_path / "nowhere": "is not a folder",
        tmp_path / "run": "run/ledger is not a folder",
        tmp_path / "empty": "the run has done none, its loop is a script",
        tmp_path / "enabled": "the run has done none, its loop is a script",
        closed / "ledger": f"give the folder of its run, {closed}",
    }.items():
        assert main([str(folder)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line


def test_end_of_a_ledger_is_not_known_without_metrics(closed, tmp_path):
    shutil.copytree(closed / "ledger", tmp_path / "ledger")
    checked = check_run(tmp_path)
    assert checked.violation is None
    assert checked.notes == [
        "metrics.jsonl has no steps: later ones than the ledger has may be missing"
    ]


def test_ledger_of_another_version_is_named(closed, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(closed, folder)
    monkeypatch.setattr(files, "VERSION", 2)
    assert "is of version 1 of the ledger: this program reads version 2" in find(folder)


def test_ledger_goes_on_after_the_step_of_a_checkpoint(closed, tmp_path):
    folder = tmp_path / "ledger"
    shutil.copytree(closed / "ledger", folder)
    cut_back(folder, step=1)
    assert [file.step for file in files.list_files(folder)] == [1]
    cut_back(folder, step=None)
    assert not folder.exists()
    assert len(files.list_files(tmp_path / "ledger.old")) == 1


def test_problem_that_was_passed_over_is_named(tmp_path, monkeypatch):
    describe = writer.describe_group

    def skip_one(group):
        told = describe(group)
        return told | {"number": told["number"] + (told["number"] >= 6)}

    monkeypatch.setattr(writer, "describe_group", skip_one)
    train(tmp_path / "now", Honest(reply=half_right), num_steps=5)
    assert find(tmp_path / "now") == (
        "step 2: problem number 6, which step 2 has passed over: expected in a step, or under way, "
        "found in neither (problems)"
    )
    # Of a ledger without that list only the bound is known by which a group may be late.
    write = files.write
    monkeypatch.setattr(
        files, "write", lambda *args, facts, **more: write(*args, facts=_forget(facts), **more)
    )
    train(tmp_path / "older", Honest(reply=half_right), num_steps=5)
    assert (
        "step 4: problem number 6, which step 2 has passed over: expected in a step up to 3, "
        "found in none (problems)" in find(tmp_path / "older")
    )


def _forget(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name != "outstanding"}


def test_samples_that_are_too_long_are_left_out_for_that_reason(tmp_path):
    settings: dict[str, Any] = {"max_sample_tokens": 20, "long_samples": "drop"}
    train(tmp_path, Honest(reply=half_right), **settings)
    checked = check_run(tmp_path)
    assert checked.violation is None
    (first, *_) = files.list_files(tmp_path / "ledger")
    masks = {m for masks in files.read(first).table["mask"].to_pylist() for m in masks}
    assert masks == {TRAINED, TOO_LONG}


@pytest.mark.parametrize("long_samples", ["drop", "truncate"])
def test_samples_that_are_too_long_have_their_part_in_the_others_advantages(tmp_path, long_samples):
    settings: dict[str, Any] = {"max_sample_tokens": 20, "long_samples": long_samples}
    train(tmp_path, Honest(reply=half_right), kl_reward=KLReward(coef=0.1), **settings)
    assert check_run(tmp_path).violation is None


def test_sample_that_ran_out_of_tokens_and_is_not_masked_may_be_too_long(tmp_path):
    policy = Honest(reply=half_right, finish_reason="length")
    train(tmp_path, policy, max_sample_tokens=20, long_samples="drop")
    assert check_run(tmp_path).violation is None
    (first, *_) = files.list_files(tmp_path / "ledger")
    masks = {m for masks in files.read(first).table["mask"].to_pylist() for m in masks}
    assert masks == {TRAINED, TOO_LONG}


def test_share_of_the_groups_proves_less_and_says_so(tmp_path):
    config = LedgerConfig(enable=True, share=0.5)
    train(tmp_path, Honest(reply=half_right), ledger=config)
    checked = check_run(tmp_path)
    assert checked.violation is None
    assert checked.notes == ["tokens of 50% of the groups are recorded: sums are not proved"]
    tables = [files.read(file).table for file in files.list_files(tmp_path / "ledger")]
    assert 8 <= sum(len(table) for table in tables) <= 40


def test_oldest_steps_are_removed_beyond_the_largest_size(tmp_path):
    config = LedgerConfig(enable=True, max_gigabytes=20_000 / 1e9)
    train(tmp_path, Honest(reply=half_right), ledger=config)
    kept = files.list_files(tmp_path / "ledger")
    assert 0 < len(kept) < 3
    checked = check_run(tmp_path)
    assert checked.violation is None
    assert "older steps were removed" in checked.notes[0]


def test_run_that_is_killed_while_old_steps_are_removed_closes(tmp_path, monkeypatch):
    config = LedgerConfig(enable=True, max_gigabytes=20_000 / 1e9)
    write = files.write

    def fail(folder, table, *, step, facts):
        if step == 3:
            raise KeyboardInterrupt
        return write(folder, table, step=step, facts=facts)

    with monkeypatch.context() as patched:
        patched.setattr(files, "write", fail)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "before", Honest(reply=half_right), ledger=config)
    assert check_run(tmp_path / "before").violation is None

    # Or when the new file is there, and the old one too.
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
    train(tmp_path / "after", Honest(reply=half_right), ledger=config)
    assert len(files.list_files(tmp_path / "after/ledger")) == 3
    assert check_run(tmp_path / "after").violation is None


def test_ledger_of_an_earlier_run_goes_with_what_else_is_in_its_folder(tmp_path):
    for _ in range(2):
        (tmp_path / "ledger/.ipynb_checkpoints").mkdir(parents=True)
        cut_back(tmp_path / "ledger", step=None)
    assert not (tmp_path / "ledger").exists()


def test_sample_that_was_left_out_without_being_too_long_is_named(tmp_path, monkeypatch):
    limit_lengths = batch._limit_lengths

    def lose_first(samples, **options):
        kept, counts = limit_lengths(samples, **options)
        return {name: sample for name, sample in kept.items() if name != (0, 0)}, counts

    monkeypatch.setattr(batch, "_limit_lengths", lose_first)
    train(tmp_path, Honest(reply=half_right), max_sample_tokens=90, long_samples="drop")
    found = find(tmp_path)
    assert "sample 0, turn 0, token 0: the token's place in the training: expected train" in found
