"""Models in training on several ranks compute what one process does, and leave the same files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rl.distributed.mesh import ParallelismConfig
from rl.tinker.local.saved import OPTIMIZER, WEIGHTS, read_saved
from tests.support.distributed import run_ranks
from tests.tinker.local.layout_ranks import life, two_steps
from tests.tinker.local.local_parts import base_config, make_model, open_base

LAYOUTS = {
    "fsdp": ParallelismConfig(data_parallel_shard_degree=2),
    "ddp": ParallelismConfig(data_parallel_replicate_degree=2, data_parallel_shard_degree=1),
    "tp": ParallelismConfig(tensor_parallel_degree=2),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[np.ndarray]]]:
    """A base model's folder, and the logprobs of a LoRA model of rank 4, of rank 2, of all parameters, and
    of the first one going on, each in this process."""
    assets = tmp_path_factory.mktemp("layout") / "base"
    base = open_base(assets)
    models = [make_model(base, rank) for rank in (4, 2, 0)]
    found = [two_steps(model) for model in models]
    return assets, [*found, two_steps(models[0])]


@pytest.mark.medium
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_trains_saves_and_loads_as_one_process_does(alone, tmp_path, name):
    assets, expected = alone
    ranks = run_ranks(life, 2, assets, tmp_path, LAYOUTS[name], timeout_s=90)
    for found in ranks:
        assert found.group_is_left
        assert found.num_frozen > 10
        assert found.num_shared == found.num_frozen
        for mine, theirs in zip(found.logprobs, expected, strict=True):
            for one, other in zip(mine, theirs, strict=True):
                np.testing.assert_allclose(one, other, atol=1e-5, rtol=0)


@pytest.mark.medium
def test_what_ranks_save_one_process_loads_and_the_other_way(tmp_path):
    assets = tmp_path / "base"
    base_config(assets)
    run_ranks(life, 2, assets, tmp_path, LAYOUTS["fsdp"], timeout_s=90)
    base = open_base(assets)
    for name, rank in (("lora", 4), ("full", 0)):
        trained, loaded = make_model(base, rank), make_model(base, rank, **({"seed": 9} if rank else {}))
        two_steps(trained)
        loaded.load_state(tmp_path / name, optimizer=True)
        (tmp_path / "here" / name).mkdir(parents=True)
        trained.save_state(tmp_path / "here" / name)
        _, theirs = read_saved(tmp_path / name, WEIGHTS, OPTIMIZER)
        _, ours = read_saved(tmp_path / "here" / name, WEIGHTS, OPTIMIZER)
        for there, here in zip(theirs, ours, strict=True):
            assert {key: (t.shape, t.dtype) for key, t in there.items()} == {
                key: (t.shape, t.dtype) for key, t in here.items()
            }
        for one, other in zip(two_steps(loaded), two_steps(trained), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5, rtol=0)
