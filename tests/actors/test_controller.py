from actors.controller import warmup_arithmetic
from configs.sum_digits import tiny, tiny_fsdp2_tp2
from examples.custom_trainer import tiny_annealed_clip
from rl.training.optimizer import Optimizer


def test_every_layout_and_learning_rate_shares_the_warm_up():
    config = tiny_fsdp2_tp2()
    config.trainer.optimizer = Optimizer.Config(lr=1.0)
    assert warmup_arithmetic(config.trainer) == warmup_arithmetic(tiny().trainer)
    assert "added" not in warmup_arithmetic(tiny().trainer)


def test_a_trainer_of_ones_own_has_a_warm_up_for_every_setting_that_it_adds():
    first, second = tiny_annealed_clip().trainer, tiny_annealed_clip().trainer
    assert warmup_arithmetic(first) == warmup_arithmetic(second)
    second.final_max_norm = 0.05  # type: ignore[attr-defined]
    assert warmup_arithmetic(first)["added"]["final_max_norm"] == 0.2
    assert warmup_arithmetic(second)["added"]["final_max_norm"] == 0.05
