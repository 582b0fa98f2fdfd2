"""Runs without an option for their devices, on machines of one, two and eight GPUs, and configs for
GPUs.
"""

import json
import re

import pytest

from rl.models.files.hf import write_random_model
from rl.models.spec import model_spec
from tests.support.rehearsal import ONE_ALL_REDUCE

pytestmark = pytest.mark.rehearsal

SHORT = (
    "--loop.num_steps", "1", "--warmup.num_steps", "1", "--loop.eval_every", "0",
    "--task.num_eval", "4",
    "--loop.groups_per_batch", "2", "--loop.group_size", "2", "--generator.max_num_seqs", "8",
)  # fmt: skip
OURS = re.compile(
    r"run folder: |the actors have a network|trainer and generators take turns|starting the "
    r"actors|warm-up: |   step   reward|      1 |finished: |  [a-zA-Z ]{14}  ?\S|$"
)


def check_console(run):
    """Check that nothing but relay's own lines were printed."""
    assert run.errors == ""
    assert [line for line in run.output.splitlines() if not OURS.match(line)] == []


def num_graph_launches(run):
    return sum(one.calls.get("cudaGraphLaunch", 0) for one in run.of_role("generator"))


@pytest.mark.parametrize(
    ("machine", "shares", "generator"),
    [({"DEVICES": 1}, True, "0"), ({"DEVICES": 2}, False, "1"),
        ({"DEVICES": 8, "CAPABILITY": "8.0"}, False, "1")],
)  # fmt: skip
def test_default_command_takes_the_gpus_at_hand(rehearsal, machine, shares, generator):
    run = rehearsal.train(*SHORT, settings=machine)
    assert run.status == 0, run.describe()
    check_console(run)
    values = json.loads((run.folder / "config.json").read_text())["values"]
    assert (values["batch_invariant"], values["launch"]["share_gpus"]) == (False, shares)
    assert run.output.count("take turns on the same GPUs") == shares
    # A process sees its own device from its first call on, whatever it imports, and the controller
    # holds none.
    used = {one.role: (one.visible, one.physical_contexts) for one in run.counters if one.contexts}
    assert used == {"trainer": ("0", (0,)), "generator": (generator, (int(generator),))}
    assert all(one.visible == generator for one in run.of_role("generator"))
    # CUDA graphs are the default, in float32 too.
    assert num_graph_launches(run) > 0
    assert run.violations == []


def test_gpus_that_are_too_old_for_a_mode_are_refused_with_what_to_do(rehearsal):
    settings = {"DEVICES": 2, "CAPABILITY": "8.0"}
    run = rehearsal.train("--batch_invariant", "true", settings=settings)
    says = (
        "error: batch_invariant=True: must be False on a GPU of compute capability 8.0, for which"
    )
    assert (run.status, run.errors[: len(says)]) == (2, says)


def test_batch_invariant_kernels_are_captured_and_not_rounded_to_tf32(rehearsal, tmp_path):
    """Triton's language shows the precision; kernels are compiled anew, as the default is TF32."""
    cache = tmp_path / "triton"
    run = rehearsal.train(
        *SHORT,
        "--batch_invariant",
        "true",
        settings={"DEVICES": 2},
        env={"TRITON_CACHE_DIR": str(cache)},
    )
    assert run.status == 0, run.describe()
    check_console(run)
    assert run.violations == []
    assert num_graph_launches(run) > 0
    products = [line for file in cache.rglob("*.ttir") for line in file.open() if "tt.dot" in line]
    assert len(products) >= 2  # queries with keys, and weights with values
    assert [line for line in products if "tf32" in line] == []


ONE, TWO = (0,), (0, 1)
SMALLER = (
    "--trainer.num_procs", "2", "--trainer.parallelism.data_parallel_shard_degree", "2",
    "--generator.num_replicas", "1",
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "family", "trainer_gpus", "generator_gpus", "options"),
    [
        *(
            (config, "qwen3", ONE, ONE, ())
            for config in ("qwen3_0_6b_lora_24gb", "qwen3_0_6b_24gb", "qwen3_0_6b", "qwen3_1_7b",
                "qwen3_4b_lora")
        ),
        *((config, "qwen3", TWO, (2,), SMALLER) for config in ("qwen3_4b", "qwen3_8b",
            "qwen3_14b")),
        ("qwen3_30b_a3b", "qwen3_moe", TWO, TWO,
         (*SMALLER, "--trainer.parallelism.expert_parallel_degree", "2")),
    ],
)  # fmt: skip
def test_config_for_gpus_runs(
    rehearsal, tmp_path, config, family, trainer_gpus, generator_gpus, options
):
    """A tiny model in place of the checkpoint, and of eight GPUs two or three."""
    folder = write_random_model(tmp_path / "model", spec=model_spec(family, "tiny"), seed=0)
    model = (
        "--hf_assets_path",
        str(folder),
        "--any_model_size",
        "true",
        "--loop.sampling.max_tokens",
        "8",
    )
    run = rehearsal.train(
        "--module", "reverse_text", "--config", config, *SHORT[:2], *SHORT[4:], *model, *options,
        settings={"DEVICES": len({*trainer_gpus, *generator_gpus}), "MEMORY_GIB": 24},
        env=ONE_ALL_REDUCE,
    )  # fmt: skip
    assert run.status == 0, run.describe()
    assert run.violations == []
    assert num_graph_launches(run) > 0
    contexts: dict[str, set[int]] = {one.role: set() for one in run.counters}
    for one in run.counters:
        contexts[one.role].update(one.physical_contexts)
    assert contexts == {"trainer": {*trainer_gpus}, "generator": {*generator_gpus}}
