from actors.explain.drawing import drawn
from actors.explain.explanation import Unknown
from actors.explain.layout import role_places
from actors.explain.numbers import size, steps_text
from configs.sum_digits import tiny
from rl.config.tree import rebuild


def drawing(*, num_gpus=0, **edits):
    config = rebuild(tiny(), {path.replace("__", "."): value for path, value in edits.items()})
    degrees = config.trainer.parallelism.degrees(config.trainer.num_procs)
    return list(drawn(role_places(config.fleet, degrees=degrees, num_gpus=num_gpus), here="this machine"))


def test_a_machine_is_a_box_with_its_roles():
    assert drawing() == [
        "+ this machine -----------------------+",
        "| controller                          |",
        "| trainer      1 process of 2 threads |",
        "| generator    1 process of 2 threads |",
        "| reward       1 process of 1 thread  |",
        "+-------------------------------------+",
    ]


def test_ranks_that_share_a_sample_are_a_row_with_their_devices():
    assert drawing(
        num_gpus=12,
        trainer__num_procs=8,
        trainer__num_threads=1,
        trainer__parallelism__data_parallel_replicate_degree=2,
        trainer__parallelism__data_parallel_shard_degree=2,
        trainer__parallelism__tensor_parallel_degree=2,
        generator__num_replicas=2,
        launch__trainer_gpus=(0, 1, 2, 3, 4, 5, 6, 8),
    )[2:8] == [
        "| trainer      8 processes of 1 thread: 2 replicas x 2 shards x 2 tensor parallel |",
        "|              replica 0, shard 0  ranks 0-1 on GPUs 0-1                          |",
        "|              replica 0, shard 1  ranks 2-3 on GPUs 2-3                          |",
        "|              replica 1, shard 0  ranks 4-5 on GPUs 4-5                          |",
        "|              replica 1, shard 1  ranks 6-7 on GPUs 6 8                          |",
        "| generator_0  1 process of 2 threads                                             |",
    ]


def test_every_host_is_a_box():
    lines = drawing(
        launch__hosts="process",
        launch__trainer_hosts=2,
        trainer__num_procs=4,
        trainer__parallelism__data_parallel_shard_degree=4,
    )
    assert [line.strip("+- ") for line in lines if line.startswith("+ ")] == [
        "this machine",
        "host 0 of trainer",
        "host 1 of trainer",
        "host of generator0",
    ]
    assert [line.strip("| ") for line in lines if "ranks" in line] == ["ranks 0-1", "ranks 2-3"]
    assert len({len(line) for line in lines}) == 1


def test_more_ranks_than_a_line_holds_go_on_in_the_next():
    lines = drawing(num_gpus=33, trainer__num_procs=32, trainer__parallelism__data_parallel_shard_degree=32)
    assert [line.strip("| ") for line in lines if " on GPU" in line] == [
        "ranks 0-15 on GPUs 0-15",
        "ranks 16-31 on GPUs 16-31",
        "rank 0 on GPU 32",
    ]


def test_a_layout_that_there_cannot_be_is_not_drawn():
    assert list(drawn(Unknown(why="no"), here="this machine")) == ["not known: no"]


def test_sizes_have_three_digits_and_steps_are_few():
    assert [size(n) for n in (0, 999, 1000, 12_345, 3_117_312, 123_456_789_012)] == [
        "0 bytes", "999 bytes", "1.00 kB", "12.3 kB", "3.12 MB", "123 GB",
    ]  # fmt: skip
    assert steps_text([80]) == "step 80"
    assert steps_text(range(0, 101, 20)) == "steps 0, 20, 40, 60, 80, 100"
    assert steps_text(range(0, 1001, 20)) == "steps 0, 20, 40, ... 1000"
