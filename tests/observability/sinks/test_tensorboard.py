import math

import pytest

from rl.observability.metrics import MetricsWriter, read_metrics
from rl.observability.sinks.delivery import Delivery
from rl.observability.sinks.place import place_of
from rl.observability.sinks.tensorboard import TensorBoard
from tests.support.event_files import points


def delivery(folder):
    return Delivery(
        TensorBoard(folder / "tensorboard"), metrics=folder / "metrics.jsonl", sent=folder / "sent.json"
    )


def begin(made, folder):
    file = folder / "metrics.jsonl"
    records = read_metrics(file) if file.exists() else []
    made.restart(place_of(records[-1], records[-1]["step"]) if records else None)


def write(folder, *records):
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for record in records:
            writer.write(record)


def cut(folder, num_lines):
    file = folder / "metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:num_lines]))


def expected(folder):
    """What is in metrics.jsonl, by tag."""
    shown: dict[str, list] = {}
    for record in read_metrics(folder / "metrics.jsonl"):
        for name, value in record.items():
            if name != "step":
                shown.setdefault(name, []).append((record["step"], pytest.approx(value, nan_ok=True)))
    return shown


RECORDS = [
    {"step": 0, "eval/correct": 0.25, "time/eval_s": 0.5},
    {"step": 1, "reward/mean": 0.5, "loss/mean": -1e-3, "policy_version": 1},
    {"step": 2, "reward/mean": math.nan, "loss/mean": math.inf, "policy_version": 2},
    {"step": 2, "eval/correct": 0.75, "time/eval_s": 0.75},
]


def test_each_number_of_each_record_is_a_point_at_its_step(tmp_path):
    write(tmp_path, *RECORDS)
    made = delivery(tmp_path)
    begin(made, tmp_path)
    made.close(failed=False)
    assert made.num_failures == 0
    assert points(tmp_path / "tensorboard") == expected(tmp_path)
    assert points(tmp_path / "tensorboard")["eval/correct"] == [(0, 0.25), (2, 0.75)]


def test_points_are_there_as_soon_as_the_record_is_given(tmp_path):
    made = delivery(tmp_path)
    begin(made, tmp_path)
    for num, record in enumerate(RECORDS, 1):
        write(tmp_path, record)
        made.look()
        assert sum(map(len, points(tmp_path / "tensorboard").values())) == sum(
            len(r) - 1 for r in RECORDS[:num]
        )
    made.close(failed=False)


@pytest.mark.parametrize("num_kept", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("same_process", [True, False])
def test_a_run_that_goes_back_has_each_point_once_those_of_its_second_way(tmp_path, num_kept, same_process):
    write(tmp_path, *RECORDS)
    made = delivery(tmp_path)
    begin(made, tmp_path)
    if not same_process:
        made.close(failed=True)
        made = delivery(tmp_path)
    cut(tmp_path, num_kept)
    begin(made, tmp_path)
    for record in [*RECORDS, {"step": 3, "reward/mean": 0.5}][num_kept:]:
        write(tmp_path, {name: value + 0.125 * (name != "step") for name, value in record.items()})
        made.look()
    made.close(failed=False)
    assert points(tmp_path / "tensorboard") == expected(tmp_path)


def test_a_folder_whose_record_of_what_was_sent_is_lost_is_written_anew(tmp_path):
    write(tmp_path, *RECORDS)
    for _ in range(2):
        made = delivery(tmp_path)
        begin(made, tmp_path)
        made.close(failed=False)
        (tmp_path / "sent.json").unlink()
    assert points(tmp_path / "tensorboard") == expected(tmp_path)
