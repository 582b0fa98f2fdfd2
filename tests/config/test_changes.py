from rl.config.changes import changed_fields
from rl.config.cli import parse_cli
from rl.config.registry import ResolvedRun
from rl.config.serialize import write_json

MODULE = "tests.config.example_configs"


def parse(*argv: str) -> ResolvedRun:
    return parse_cli(argv, default_module=MODULE, default_config="large")


def test_each_field_that_differs_is_told_with_both_values_and_a_new_place_is_not(tmp_path):
    write_json(parse("--name", "first", "--dump_folder", "x"), tmp_path / "config.json")
    same = parse("--name", "other", "--dump_folder", "y")
    assert changed_fields(tmp_path / "config.json", same.config) == []
    changed = parse("--trainer.optimizer.lr", "0.25", "--trainer.optimizer.betas", "0.5", "0.9")
    assert changed_fields(tmp_path / "config.json", changed.config) == [
        "trainer.optimizer.lr: 0.0003 -> 0.25",
        "trainer.optimizer.betas: [0.9, 0.95] -> [0.5, 0.9]",
    ]


def test_a_part_that_is_turned_off_is_told_of_by_its_fields(tmp_path):
    write_json(parse(), tmp_path / "config.json")
    said = changed_fields(tmp_path / "config.json", parse("--warmup", "None").config)
    assert "warmup: absent -> null" in said
    assert any(line.startswith("warmup.num_steps: ") and line.endswith(" -> absent") for line in said)
