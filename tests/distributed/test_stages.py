"""Division of a model into the stages of a pipeline. Numbers are compared in
tests/training/test_layouts.py.
"""

import os
import re

import pytest

from rl.distributed.mesh import ParallelismConfig
from rl.distributed.stages import plan_stages


def modules(num_layers, *, tied=False):
    return [
        "embed_tokens",
        *(f"layers.{n}" for n in range(num_layers)),
        "norm",
        *([] if tied else ["lm_head"]),
    ]


def plan(num_layers, *, tied=False, **settings):
    prefixed = {
        name if name.startswith("module") else f"pipeline_parallel_{name}": v
        for name, v in settings.items()
    }
    return plan_stages(ParallelismConfig(**prefixed), modules(num_layers, tied=tied))


SPLIT = ("embed_tokens, layers.0", "layers.1", "norm", "lm_head")


def layers(of_plan):
    return [sum(name.startswith("layers.") for name in stage) for stage in of_plan.modules]


def test_first_and_last_stage_have_fewer_layers_and_the_ends_of_the_model():
    found = plan(2, degree=2)
    assert found.modules == (("embed_tokens", "layers.0"), ("layers.1", "norm", "lm_head"))
    assert found.ranks == (0, 1)
    assert layers(plan(30, degree=4)) == [7, 8, 8, 7]
    assert layers(plan(30, degree=4, first_stage_less_layers=0, last_stage_less_layers=4)) == [
        9,
        9,
        8,
        4,
    ]
    # Every module is in one stage, in the model's order.
    assert [name for stage in plan(30, degree=4).modules for name in stage] == modules(30)


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [("Interleaved1F1B", (0, 1, 2, 0, 1, 2)), ("ZBVZeroBubble", (0, 1, 2, 2, 1, 0))],
)
def test_a_rank_has_two_stages_where_the_schedule_uses_them(schedule, ranks):
    found = plan(10, degree=3, schedule=schedule)
    assert found.ranks == ranks
    assert layers(found) == [1, 2, 2, 2, 2, 1]
    assert found.of_rank(0) == [stage for stage, rank in enumerate(ranks) if rank == 0]


@pytest.mark.parametrize(
    ("schedule", "held"),
    [
        ("1F1B", [3, 2, 1]),
        # A rank begins with 2 (3 - rank - 1) + 3 of the half micro-batches that its two stages see.
        ("Interleaved1F1B", [4.0, 3.0, 2.0]),
        ("GPipe", [3, 3, 3]),
    ],
)
def test_earlier_ranks_keep_the_activations_of_more_micro_batches(schedule, held):
    found = plan(10, degree=3, schedule=schedule)
    assert [found.count_held(rank, schedule=schedule) for rank in range(3)] == held


def test_layers_of_a_stage_or_names_of_modules_divide_the_model():
    found = plan(10, degree=2, schedule="Interleaved1F1B", layers_per_stage=2)
    assert (layers(found), found.ranks) == ([1, 2, 2, 2, 2, 1], (0, 1, 0, 1, 0, 1))
    parts = ("embed_tokens", "layers.0, layers.1", "norm")
    with pytest.raises(ValueError, match=r"divided into 3 stages: must be 1 for each rank"):
        plan(2, tied=True, degree=2, module_fqns_per_model_part=parts)
    found = plan(2, tied=True, degree=3, module_fqns_per_model_part=parts)
    assert found.modules == (("embed_tokens",), ("layers.0", "layers.1"), ("norm",))
    with pytest.raises(ValueError, match="norm and lm_head must be in one stage, the last"):
        plan(2, degree=2, schedule="Interleaved1F1B", module_fqns_per_model_part=SPLIT)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"degree": 4},
            "pipeline_parallel_degree=4: 2 layers cannot be divided into 4 stages with "
            ".*first_stage_less_layers=1 and",
        ),
        (
            {"degree": 3, "layers_per_stage": 2},
            "'1F1B' on .*degree=3 ranks: .* 2 stages: must be 1 for each rank",
        ),
        (
            {"degree": 2, "schedule": "Interleaved1F1B", "layers_per_stage": 2},
            "2 stages: must be 2 or more",
        ),
        (
            {"degree": 2, "module_fqns_per_model_part": ("layers.0,layers.1", "norm")},
            "must have, .* embed_tokens",
        ),
        (
            {"degree": 2, "schedule_csv": "/nowhere/plan.csv"},
            "schedule_csv='/nowhere/plan.csv': .*No such file",
        ),
    ],
)
def test_an_impossible_division_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        plan(2, **settings)


GPIPE = "0F0,0F1,,,0B0,0B1\n,1F0,1F1,1B0,1B1,\n"


def test_a_file_sets_ranks_and_number_of_micro_batches(tmp_path):
    file = tmp_path / "plan.csv"
    file.write_text(GPIPE)
    found = plan(4, degree=2, schedule_csv=str(file))
    assert (found.ranks, found.file.num_micro_batches) == ((0, 1), 2)
    # GPipe: both micro-batches are forward before the first is backward.
    assert [found.count_held(rank, schedule="1F1B") for rank in range(2)] == [2, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 rows: must have one for each of 2 ranks"),
        (GPIPE.replace("1B1", ""), "expected 2 total backwards"),
        (GPIPE.replace("0F1", "forward"), "Invalid action string"),
        (GPIPE + GPIPE, "4 rows"),
        (
            GPIPE.replace("1F0,1F1", "1F1,1F0"),
            "stage 1, the last, must take the micro-batches forward in order",
        ),
        (GPIPE.replace("1F1", "1F1,1F1"), "an entry is there twice"),
        (GPIPE.replace("0F1", "0SEND_F0,0F1"), "has 0SEND_F0: must have no transfers"),
        ("0F0,1F0,1B0,0B0\n\n", "row 2 has no entry: every rank must have a stage"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "Malformed compute schedule"),
        ("0F0," + "x" * 200_000, "field larger than field limit"),
        ("0F0,0B" + "9" * 100_000, "has a cell '0B99.*'... of 100002 characters"),
        (
            "0F0,0B999999999\n1F0,1B0",
            "names micro-batch 999999999: with 4 entries there are at most 4",
        ),
        ("0F0,0B0\n999999999F0,1B0", "names stage 999999999: with 4 entries there are at most 4"),
        ("(0F0;0B0)OVERLAP_F_B\n1F0,1B0", "Malformed compute schedule"),
        ("0F0,\0,0B0", "Invalid action string|NUL"),
        ("0F0," * 300_000, "has 1200000 bytes: must have at most 1048576"),
    ],
)
def test_a_file_that_is_no_schedule_is_refused_in_one_line(tmp_path, text, message):
    file = tmp_path / "plan.csv"
    file.write_text(text)
    with pytest.raises(
        ValueError, match=f"schedule_csv={re.escape(repr(str(file)))}.*({message})"
    ) as refused:
        plan(4, degree=2, schedule_csv=str(file))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 600


def test_a_pipe_in_place_of_a_schedule_is_refused(tmp_path):
    os.mkfifo(tmp_path / "plan.csv")
    with pytest.raises(ValueError, match=r"plan.csv': is no file"):
        plan(4, degree=2, schedule_csv=str(tmp_path / "plan.csv"))


def test_every_stage_needs_something_that_is_trained():
    stages = plan(4, degree=2)
    head = ("layers.0.attention.qkv_proj.lora_a", "lm_head_lora.lora_a")
    stages.check_trained(head)
    with pytest.raises(
        ValueError,
        match=r"stage 1 of the pipeline \(layers.2, .*\) has no parameter that is trained",
    ):
        stages.check_trained(head[:1])
