"""What is refused of a run before it starts, though only its end would meet it."""

import pytest

from actors.checks import check_end
from configs.sum_digits import tiny
from rl.models.converters.lora import LoRA


def fleet(*converters, **checkpoint):
    config = tiny()
    config.trainer.converters = converters
    for name, value in checkpoint.items():
        setattr(config.trainer.checkpoint, name, value)
    return config.fleet


def test_a_save_may_not_take_longer_than_the_run_waits_for_it():
    check_end(fleet(timeout_s=1800.0), warms_up=True)
    with pytest.raises(
        ValueError, match=r"checkpoint\.timeout_s=1801 is more than timeouts\.checkpoint_s=1800, after which"
    ):
        check_end(fleet(timeout_s=1801.0), warms_up=True)
    check_end(fleet(timeout_s=1801.0, enable=False), warms_up=True)


def test_an_adapter_of_an_earlier_run_is_in_the_way_only_of_a_run_that_would_save_one(tmp_path):
    (tmp_path / "adapter").mkdir()
    check_end(fleet(folder=str(tmp_path)), warms_up=True)
    check_end(fleet(LoRA.Config(), folder=str(tmp_path), load_only=True), warms_up=True)
    with pytest.raises(ValueError, match=r"folder='.*': .*/adapter is there already, of a run that ended"):
        check_end(fleet(LoRA.Config(), folder=str(tmp_path)), warms_up=True)


def test_an_adapter_to_start_from_is_refused_with_a_warm_up(tmp_path):
    lora = LoRA.Config(initial_adapter="adapters/mine")
    check_end(fleet(lora), warms_up=False)
    with pytest.raises(ValueError, match=r"converters\.0\.initial_adapter='adapters/mine' with a warm-up"):
        check_end(fleet(lora), warms_up=True)
