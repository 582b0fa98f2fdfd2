"""Two runs are compared up to the first thing that differs, which is named with its place."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from rl.bisect import main
from rl.ledger.compare import compare_ledgers
from rl.types import Completion, TrainingSample
from tests.ledger.test_check import Honest, cut_file, edit_first, train
from tests.support.loops import half_right


def set_token(c: Completion) -> Completion:
    ids = c.token_ids.copy()
    ids[-1] += 1
    return replace(c, token_ids=ids)


def flip_bit(c: Completion) -> Completion:
    bits = c.logprobs.copy().view(np.uint32)
    bits[1] ^= 1
    return replace(c, logprobs=bits.view(np.float32))


def scale(samples: list[TrainingSample]) -> list[TrainingSample]:
    samples[1] = replace(samples[1], advantages=samples[1].advantages * 2)
    return samples


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train(tmp_path_factory.mktemp("plain"), Honest(reply=half_right))


def test_equal_runs_are_equal(plain, tmp_path, capsys):
    train(tmp_path, Honest(reply=half_right))
    assert main([str(plain), str(tmp_path)]) == 0
    assert "3 steps are equal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fault", "settings", "where", "what"),
    [
        ({"edit_completion": edit_first(set_token)}, {}, "sample 1, turn 0, token 2", "sampled"),
        (
            {"edit_completion": edit_first(flip_bit)},
            {},
            "sample 1, turn 0, token 1",
            "logprob at sampling",
        ),
        (
            {"edit_samples": scale},
            {},
            "minibatch 0, problem 'sum-digits/10-1000', sample 1, turn 0, token 0",
            "advantage that the loss has read",
        ),
        (
            {"edit_result": lambda r: replace(r, loss_sum=r.loss_sum * 1.001)},
            {},
            "minibatch 0",
            "loss_sum",
        ),
        ({}, {"group_size": 2}, "problem", "number of scored rollouts"),
        ({}, {"num_steps": 2}, "", "next step"),
        ({"logprob_diff": 0.5}, {}, "minibatch 0, problem", "logprob of the trainer"),
    ],
)
def test_first_difference_is_named(plain, tmp_path, fault, settings, where, what):
    policy = Honest(reply=half_right)
    for name, value in fault.items():
        setattr(policy, name, value)
    train(tmp_path, policy, **settings)
    compared = compare_ledgers(plain / "ledger", tmp_path / "ledger")
    assert compared.parting is not None
    assert compared.parting.what.startswith(what), compared.parting
    assert where in compared.parting.where
    assert compared.num_steps == (2 if "num_steps" in settings else 0)
    assert main([str(plain), str(tmp_path)]) == 1


def test_damaged_file_is_named_with_its_run(plain, tmp_path, capsys):
    folder = shutil.copytree(plain, tmp_path / "other")
    cut_file(folder)
    assert main([str(plain), str(folder)]) == 2
    assert re.search(rf"{folder}/ledger: 000002-\w+.parquet: .* cut off", capsys.readouterr().err)
