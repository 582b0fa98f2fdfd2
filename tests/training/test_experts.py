"""Load balance of experts, and their refused settings. Numbers are compared in test_layouts.py."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from rl.models.decoder import find_persistent_buffers
from rl.models.files.hf import HFFolder
from rl.models.layers.moe import ExpertRouter, MoE
from rl.models.lora import LoRA
from rl.training.checks import check_experts
from rl.training.config import ExpertBalanceConfig
from rl.training.experts import ExpertBalance
from tests.training.layouts import make
from tests.training.parts import make_engine, make_sample, make_samples, moe_spec, small_spec


def balance(*, num_layers=1, **settings):
    """Return the balance of routers with four experts, whose choices the test writes in."""
    config = MoE.Config(num_experts=4, num_experts_per_token=2, hidden_dim=4)
    routers = [ExpertRouter(config=config, dim=2) for _ in range(num_layers)]
    part = nn.ModuleList(routers)
    real: list[bool] = []
    made = ExpertBalance(
        config=ExpertBalanceConfig(**settings),
        parts=[part],
        num_layers=num_layers,
        num_experts=4,
        mesh=None,
        device=torch.device("cpu"),
        mask_real_tokens=lambda: torch.tensor(real),
    )

    def count(*, padding=0):
        chosen = routers[0].last_chosen_TK
        assert chosen is not None
        num_tokens = len(chosen)
        real[:] = [True] * (num_tokens - padding) + [False] * padding
        made.count(part)

    return made, routers, count


def test_load_is_the_busiest_expert_over_the_mean_by_layer_without_padding():
    made, (first, second), count = balance(num_layers=2)
    # Three tokens choose two of four experts: a mean of 1.5.
    first.last_chosen_TK = torch.tensor([[0, 1], [0, 2], [0, 3], [0, 1]])
    second.last_chosen_TK = torch.tensor([[0, 1], [1, 2], [3, 2], [0, 1]])
    count(padding=1)
    load = made.reduce()
    assert load is not None
    assert (load.busiest_mean, load.busiest_max) == (pytest.approx((2 + 4 / 3) / 2), 2.0)
    # Tokens are counted once, and then forgotten.
    assert first.last_chosen_TK is None


def test_bias_moves_against_the_load_of_all_calls_of_a_step():
    made, (router,), count = balance(load_balance_rate=0.25)
    for chosen in ([[0, 1], [0, 1]], [[0, 2], [0, 1], [3, 1], [2, 1]]):
        router.last_chosen_TK = torch.tensor(chosen)
        count()
        made.reduce()
    # 4, 5, 2 and 1 tokens: a mean of 3.
    made.step()
    assert router.load_balance_bias.tolist() == [-0.25, -0.25, 0.25, 0.25]
    made.forget()
    router.last_chosen_TK = torch.tensor([[0, 1], [0, 2]])
    count()
    made.reduce()
    # 2, 1, 1 and 0 tokens: experts at the mean keep their bias.
    made.step()
    assert router.load_balance_bias.tolist() == [-0.5, -0.25, 0.25, 0.5]


def test_logprobs_and_a_failed_call_leave_no_count(moe_assets):
    engine = make("moe", "one", {"moe": moe_assets})
    biases = list(find_persistent_buffers(engine.policy.model).values())

    def biases_of_a_step():
        engine.forward_backward([make_sample(length=9, seed=0)])
        engine.optim_step()
        return [bias.tolist() for bias in biases]

    expected = biases_of_a_step()
    engine.load_checkpoint(moe_assets)
    engine.compute_logprobs(make_samples())
    assert biases_of_a_step() == expected
    engine.load_checkpoint(moe_assets)
    with pytest.raises(ArithmeticError):
        engine.forward_backward(
            [
                replace(one, advantages=np.full_like(one.advantages, np.nan))
                for one in make_samples()
            ]
        )
    assert biases_of_a_step() == expected


def test_zero_bias_is_not_exported_and_missing_bias_is_zero(moe_assets, tmp_path):
    engine = make("moe", "one", {"moe": moe_assets})
    engine.export_hf(str(tmp_path / "biased"))
    buffers = find_persistent_buffers(engine.policy.model)
    for bias in buffers.values():
        assert bias.any()
        bias.zero_()
    engine.export_hf(str(tmp_path / "plain"))
    biases = [
        {name for name in HFFolder(tmp_path / kind).shapes if "e_score_correction_bias" in name}
        for kind in ("biased", "plain")
    ]
    assert [len(names) for names in biases] == [2, 0]
    engine.load_checkpoint(str(tmp_path / "biased"))
    assert all(bias.any() for bias in buffers.values())
    engine.load_checkpoint(str(tmp_path / "plain"))
    assert not any(bias.any() for bias in buffers.values())


def test_settings_without_effect_are_refused():
    dense = small_spec().model
    with pytest.raises(
        ValueError, match=r"experts\.force_load_balance=True: must be False for a model w"
    ):
        check_experts(dense, balance=ExpertBalanceConfig(force_load_balance=True))


def test_biases_that_generators_never_get_are_refused():
    rate = ExpertBalanceConfig(load_balance_rate=0.01)
    with pytest.raises(ValueError, match=r"experts\.load_balance_rate=0\.01: must be 0 with LoRA"):
        make_engine(None, spec=moe_spec(), experts=rate, converters=(LoRA.Config(),))
    make_engine(None, spec=moe_spec(), experts=rate, converters=(LoRA.Config(merge=True),))
