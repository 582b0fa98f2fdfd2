"""Every algorithm increases the probability of rewarded samples."""

from dataclasses import replace

import numpy as np
import pytest

from configs import algorithms, sum_digits
from losses.cross_entropy import CrossEntropyLoss
from losses.policy import DAPOLoss, DrGRPOLoss, ReinforcePlusPlusLoss
from rl.config.cli import parse_cli
from rl.config.registry import list_registry_functions
from rl.rollouts.advantage import Advantage
from rl.trainer_types import OptimParams
from tests.training.parts import engine_config, make_sample, small_spec, write_assets

NAMES = (
    "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "ppo", "importance_sampling", "dro",
)  # fmt: skip


def test_every_algorithm_has_a_tiny_config():
    assert sorted(list_registry_functions(algorithms)) == sorted(f"tiny_{name}" for name in NAMES)


def test_dr_grpo_divides_by_max_tokens_and_not_by_the_standard_deviation():
    config = sum_digits.tiny()
    config.loop.sampling.max_tokens = 17
    changed = algorithms.dr_grpo(config)
    assert changed.trainer.loss == DrGRPOLoss(tokens_per_sequence=17)
    assert changed.loop.advantage == Advantage(baseline="group_mean", scale="none")


def test_dapo_samples_dynamically_and_clips_higher():
    config = sum_digits.tiny()
    config.loop.drop_zero_advantage_groups = False
    changed = algorithms.dapo(config)
    assert changed.loop.drop_zero_advantage_groups
    assert changed.loop.overlong.enable
    assert isinstance(changed.trainer.loss, DAPOLoss)
    assert changed.trainer.loss.clip_high > changed.trainer.loss.clip_low


def test_dapo_buffer_follows_max_tokens():
    argv = ["--loop.sampling.max_tokens", "8"]
    loop = parse_cli(argv, default_module="algorithms", default_config="tiny_dapo").config.loop
    assert loop.overlong(7, max_tokens=loop.sampling.max_tokens) == -0.5


def test_with_kl_enables_the_reference_policy_and_needs_a_policy_loss():
    config = algorithms.with_kl(
        algorithms.reinforce_plus_plus_baseline(sum_digits.tiny()), coef=0.1
    )
    assert config.trainer.loss == ReinforcePlusPlusLoss(kl_coef=0.1, kl_estimator="k3")
    assert config.trainer.reference.enable
    config.trainer.loss = CrossEntropyLoss()
    with pytest.raises(ValueError, match="only a policy loss has a KL term"):
        algorithms.with_kl(config, coef=0.1)


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return write_assets(tmp_path_factory.mktemp("assets") / "model")


REWARDS = ((1.0, 0.0, 0.0, 1.0), (1.0, 1.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0))
GROUPS = [
    [make_sample(length=18, seed=10 * p + g, prompt_seed=p) for g in range(4)] for p in range(3)
]


def prepared(engine, advantage, rewards_PG):
    """Return on-policy samples with the advantages of the rewards."""
    flat = [s for group in GROUPS for s in group]
    drawn = iter(engine.compute_logprobs(flat))
    advantages_PG = advantage(
        [
            [np.concatenate([np.zeros(int(s.mask.sum()) - 1), [reward]]) for s, reward in pairs]
            for pairs in (zip(*pair, strict=True) for pair in zip(GROUPS, rewards_PG, strict=True))
        ]
    )
    return [
        [
            replace(
                sample,
                generator_logprobs=np.where(sample.mask, next(drawn), np.nan).astype(np.float32),
                advantages=np.concatenate(
                    [np.zeros(int((~sample.mask).sum()), np.float32), advantages]
                ),
            )
            for sample, advantages in zip(group, advantages_G, strict=True)
        ]
        for group, advantages_G in zip(GROUPS, advantages_PG, strict=True)
    ]


def preference(engine):
    """Return the logprob of rewarded samples minus that of others, in nats a token."""
    values = [
        [p[s.mask].mean() for p, s in zip(engine.compute_logprobs(group), group, strict=True)]
        for group in GROUPS
    ]
    return sum(
        (1 if reward else -1) * value
        for value_G, reward_G in zip(values[:2], REWARDS[:2], strict=True)
        for value, reward in zip(value_G, reward_G, strict=True)
    )


@pytest.mark.parametrize("name", NAMES)
def test_equal_rewards_give_no_gradient_and_rewarded_samples_become_more_likely(assets, name):
    config = getattr(algorithms, f"tiny_{name}")()
    small = engine_config(max_tokens_per_microbatch=200)
    small.loss, small.reference = config.trainer.loss, config.trainer.reference
    engine = small.build(model_spec=small_spec(), hf_assets_path=assets, device="cpu")
    advantage = replace(config.loop.advantage)
    # Equal rewards of one group; of all groups if the baseline is the batch's.
    is_of_group = advantage.baseline in ("group_mean", "leave_one_out")
    equal = prepared(engine, advantage, REWARDS if is_of_group else ((0.1,) * 4,) * 3)[2]
    assert engine.forward_backward(equal).num_valid_tokens == sum(int(s.mask.sum()) for s in equal)
    # DRO's square pulls towards the logprobs that were recorded, whose last bits are of another
    # packing.
    assert engine.optim_step(OptimParams(lr=0.0)).grad_norm <= (1e-6 if name == "dro" else 0.0)
    before = preference(engine)
    for _ in range(4):
        groups = prepared(engine, advantage, REWARDS)
        engine.forward_backward([s for group in groups for s in group])
        engine.optim_step()
    assert preference(engine) > before + 0.5
