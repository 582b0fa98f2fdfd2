"""Values that a config leaves to the devices at hand."""

import pytest

from actors.launch.placement import fit_to_devices
from configs.sum_digits import qwen3_0_6b, qwen3_8b, tiny, tiny_async, tiny_fsdp2


@pytest.mark.parametrize(
    ("base", "num_gpus", "batch_invariant", "shares"),
    [
        (tiny, 0, True, False),
        (tiny, 1, False, True),
        (tiny, 2, False, False),
        (tiny, 8, False, False),
        (tiny_fsdp2, 1, False, False),  # its two ranks cannot share one GPU, so it is refused
        (tiny_fsdp2, 2, False, True),
        (tiny_async, 1, False, False),
        (qwen3_0_6b, 1, False, True),
        (qwen3_8b, 4, False, False),
        (qwen3_8b, 8, False, False),
    ],
)
def test_mode_and_sharing_fit_the_devices(base, num_gpus, batch_invariant, shares):
    config = base()
    found = fit_to_devices(config, num_gpus=num_gpus)
    assert (found.batch_invariant, found.launch.share_gpus) == (batch_invariant, shares)
    assert found.generator.can_sleep == shares
    assert config == base()


def test_values_of_the_config_are_kept():
    config = tiny()
    config.batch_invariant, config.launch.share_gpus = True, False
    assert fit_to_devices(config, num_gpus=1) == config
    config = tiny()
    config.launch.generator_gpus = (0,)  # whoever names devices says who has them
    assert fit_to_devices(config, num_gpus=1).launch.share_gpus is False
    config = tiny()
    config.launch.trainer_gpus = (1,)
    assert fit_to_devices(config, num_gpus=2).launch.share_gpus is False
