"""An example of a broken config for each rule between options."""

import math
import re
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from actors.agents import AgentEndpoint
from configs.sum_digits import tiny, tiny_moe
from losses.policy import GRPOLoss
from rl.agents.task import AgentTask
from rl.config.rules import (
    Rule,
    above,
    at_most,
    check_rules,
    find_faults,
    find_values,
    none_of,
    one_of,
    same_as,
    select_rules,
)
from rl.config.tree import ConfigError, rebuild
from rl.models.float8 import Float8
from rl.models.lora import LoRA
from rl.run_rules import RULES
from rl.tasks.sum_digits import SumDigits

PP = {"trainer.parallelism.pipeline_parallel_degree": 2}
FOLDED = {**PP, "trainer.parallelism.pipeline_parallel_schedule": "ZBVZeroBubble"}
EARLY = {
    "trainer.optimizer.early_step_in_backward": True,
    "trainer.loss": GRPOLoss(normalization="none"),
    "trainer.training.max_norm": math.inf,
    "warmup": None,
}
FREE = {"batch_invariant": False}
TP = {"trainer.parallelism.tensor_parallel_degree": 2, "generator.tensor_parallel_degree": 2}

AGENTS = {
    "task": AgentTask.Config(problems=SumDigits.Config(), command=("{python}",)),
    "agents": AgentEndpoint.Config(honours_sampling=True),
}

ROWS = [
    # Agents
    (AGENTS, "loop.num_steps=80: must be 0 with agents.honours_sampling=True, because logprobs"),
    # Hosts
    *(
        ({f"launch.{name}": value}, f"launch.{name}={value}: must be {default} with "
         "launch.hosts='this', because this machine is one host")
        for name, value, default in (("trainer_hosts", 2, 1), ("generator_hosts", 2, 1),
                                     ("replicas_per_host", 2, 1), ("reward_hosts", 1, 0))
    ),
    ({"launch.hosts": "process", "launch.gpus_per_host": 8},
     "launch.gpus_per_host=8: must be None with launch.hosts='process', because GPUs of this"),
    ({"launch.hosts": "slurm", "launch.replicas_per_host": 2, "launch.generator_hosts": 2},
     "launch.generator_hosts=2: must be 1 with launch.replicas_per_host=2, because replicas"),
    ({"launch.hosts": "slurm", "launch.isolate_network": True},
     "launch.isolate_network=True: must be None or False with launch.hosts='slurm', because the"),
    ({"launch.hosts": "kubernetes"},
     "launch.kubernetes.image=None: must be the name of an image with launch.hosts='kubernetes'"),
    # Shared GPUs
    ({"launch.share_gpus": True, "loop.max_off_policy_steps": 1},
     "loop.max_off_policy_steps=1: must be 0 with launch.share_gpus=True, because trainer and "
     "generators take turns"),
    ({"launch.share_gpus": True, "launch.hosts": "process"},
     "launch.hosts='process': must be 'this' with launch.share_gpus=True, because the generators"),
    ({"launch.share_gpus": True, "launch.generator_gpus": (1,)},
     "launch.generator_gpus=(1,): must be None with launch.share_gpus=True"),
    # Steps
    ({"loop.groups_per_batch": 3, "loop.num_minibatches": 2},
     "loop.num_minibatches=2: must be a divisor of loop.groups_per_batch=3, because each"),
    ({"loop.publish_every": 2},
     "loop.publish_every=2: must be at most one more than loop.max_off_policy_steps=0, because"),
    ({"loop.group_size": 1, "loop.advantage.scale": "batch_std"},
     "loop.advantage.baseline='group_mean': must be other than 'group_mean' or 'leave_one_out' "
     "with loop.group_size=1, because the samples of a prompt are compared: for one sample a "
     "prompt take baseline 'batch_mean' with scale 'batch_std' (REINFORCE++)"),
    ({"loop.group_size": 1, "loop.advantage.baseline": "batch_mean",
      "loop.advantage.scale": "group_std"},
     "loop.advantage.scale='group_std': must be other than 'group_std' with loop.group_size=1"),
    ({"loop.group_size": 1, "loop.drop_zero_advantage_groups": True,
      "loop.advantage.baseline": "batch_mean", "loop.advantage.scale": "batch_std"},
     "loop.drop_zero_advantage_groups=True: must be False with loop.group_size=1"),
    ({"loop.group_size": 1, "loop.groups_per_batch": 1,
      "loop.advantage.baseline": "batch_mean", "loop.advantage.scale": "batch_std"},
     "loop.advantage.baseline='batch_mean': must be other than 'batch_mean' with "
     "loop.group_size=1, loop.groups_per_batch=1, because the only sample"),
    # Lengths
    ({"loop.sampling.max_tokens": 128},
     "loop.sampling.max_tokens=128: must be below generator.max_model_len=128, because a prompt"),
    ({"trainer.training.max_tokens_per_microbatch": 100},
     "trainer.training.max_tokens_per_microbatch=100: must be at least "
     "generator.max_model_len=128, because the longest sample would not fit"),
    ({"trainer.training.max_sequence_length": 127},
     "trainer.training.max_sequence_length=127: must be at least generator.max_model_len=128"),
    ({"loop.overlong.enable": True, "loop.overlong.buffer_tokens": 33},
     "loop.overlong.buffer_tokens=33: must be at most loop.sampling.max_tokens=32 with "
     "loop.overlong.enable=True"),
    # Reference
    ({"loop.kl_reward.coef": 0.5},
     "trainer.reference.enable=False: must be True with loop.kl_reward.coef=0.5, because the KL "
     "needs a reference policy"),
    ({"trainer.loss.kl_coef": 0.1},
     "trainer.reference.enable=False: must be True with trainer.loss.kl_coef=0.1, because"),
    # Batch-invariant mode
    ({"generator.dtype": "bfloat16"},
     "generator.dtype='bfloat16': must be the same as trainer.training.param_dtype='float32' with "
     "batch_invariant=True, because trainer and generator have to compute the same bits"),
    ({"generator.tensor_parallel_degree": 2},
     "generator.tensor_parallel_degree=2: must be the same as "
     "trainer.parallelism.tensor_parallel_degree=1 with batch_invariant=True"),
    ({"trainer.converters": (Float8.Config(),)},
     "trainer.converters.0=Float8.Config: must be a converter that keeps the bits with "
     "batch_invariant=True, because the generator has the plain weights, whose products round"),
    ({"trainer.compile.enable": True},
     "trainer.compile.enable=True: must be False with batch_invariant=True, because other kernels"),
    ({"trainer.training.logits_chunk_tokens": 48},
     "trainer.training.logits_chunk_tokens=48: must be None or a multiple of 32 with "
     "batch_invariant=True"),
    ({"trainer.parallelism.tensor_parallel_degree": 4, "generator.tensor_parallel_degree": 4,
      "trainer.parallelism.loss_parallel": False},
     "trainer.parallelism.tensor_parallel_degree=4: must be at most 2 with batch_invariant=True"),
    (TP, "trainer.parallelism.loss_parallel=True: must be False with batch_invariant=True, "
     "trainer.parallelism.tensor_parallel_degree=2, because the generator normalises"),
    # Steps in the backward
    ({**EARLY, "trainer.optimizer.name": "Muon"},
     "trainer.optimizer.name='Muon': must be 'AdamW' or 'Adam' with "
     "trainer.optimizer.early_step_in_backward=True, because a parameter is stepped before"),
    ({**EARLY, "trainer.loss": GRPOLoss()},
     "trainer.loss.normalization='token_mean': must be 'none' with"),
    ({**EARLY, "trainer.training.max_norm": 1.0}, "trainer.training.max_norm=1.0: must be inf"),
    ({**EARLY, "trainer.training.cpu_offload": True},
     "trainer.training.cpu_offload=True: must be False with"),
    ({**EARLY, **PP}, "trainer.parallelism.pipeline_parallel_degree=2: must be 1 with"),
    ({**EARLY, "warmup": tiny().warmup},
     "warmup=SupervisedWarmup.Config: must be None with "
     "trainer.optimizer.early_step_in_backward=True, because the loss of a warm-up"),
    # Pipeline
    ({**PP, "trainer.training.reduce_dtype": "bfloat16"},
     "trainer.training.reduce_dtype='bfloat16': must be 'float32' with "
     "trainer.parallelism.pipeline_parallel_degree=2, because FSDP would add"),
    ({**FOLDED, "trainer.activation_checkpoint.mode": "full"},
     "trainer.activation_checkpoint.mode='full': must be 'none' with "
     "trainer.parallelism.pipeline_parallel_schedule='ZBVZeroBubble', "),
    ({**FOLDED, **FREE, "trainer.compile.enable": True},
     "trainer.compile.enable=True: must be False with "
     "trainer.parallelism.pipeline_parallel_schedule='ZBVZeroBubble'"),
    # Experts
    ({"trainer.experts.force_load_balance": True, "trainer.experts.load_balance_rate": 0.1},
     "trainer.experts.load_balance_rate=0.1: must be 0 with "
     "trainer.experts.force_load_balance=True, because scores and biases are ignored"),
    # Starting weights
    ({**FREE, "trainer.converters": (LoRA.Config(initial_adapter="adapters/mine"),)},
     "trainer.converters.0.initial_adapter='adapters/mine': must be None with "
     "warmup=SupervisedWarmup.Config, because a warm-up starts from weights without"),
    ({"trainer.checkpoint.enable": False, "trainer.checkpoint.initial_load_path": "x"},
     "trainer.checkpoint.initial_load_path='x': must be None with trainer.checkpoint.enable=False"),
    ({"trainer.checkpoint.initial_load_model_only": False},
     "trainer.checkpoint.initial_load_path=None: must be set with "
     "trainer.checkpoint.initial_load_model_only=False, because"),
    ({"trainer.checkpoint.initial_load_model_only": False,
      "trainer.checkpoint.initial_load_path": "x", "trainer.checkpoint.initial_load_in_hf": True},
     "trainer.checkpoint.initial_load_in_hf=True: must be False with "
     "trainer.checkpoint.initial_load_model_only=False, because a Hugging Face folder holds only"),
    # Times
    ({"weights.timeout_s": 601.0},
     "weights.timeout_s=601.0: must be at most timeouts.sync_s=600.0, because the run stops"),
    ({"trainer.checkpoint.timeout_s": 1801.0},
     "trainer.checkpoint.timeout_s=1801.0: must be at most timeouts.checkpoint_s=1800.0 with "
     "trainer.checkpoint.saves=True, because the run stops"),
    ({"recovery.max_pause_s": 0.5},
     "recovery.max_pause_s=0.5: must be at least recovery.pause_s=1.0, because the wait"),
]  # fmt: skip


def edited(edits):
    return rebuild(tiny(), {"batch_invariant": True, **edits})


def faults_of(edits):
    return list(find_faults(edited(edits), RULES))


@pytest.mark.parametrize(("edits", "says"), ROWS)
def test_broken_rule_is_one_message_with_option_value_and_reason(edits, says):
    (fault,) = faults_of(edits)
    assert fault.startswith(says)


def test_every_rule_has_a_row_for_each_of_its_options():
    configs = [edited(edits) for edits, _ in ROWS]
    for rule in RULES:
        faults = [fault for config in configs for fault in rule.find_faults(config)]
        for option in rule.must:
            path = re.escape(option).replace(r"\*", r"\d+")
            assert any(re.match(f"{path}=", fault) for fault in faults), f"{option}: {rule}"


@pytest.mark.parametrize(
    "edits",
    [
        {},
        {"trainer.checkpoint.timeout_s": 1801.0, "trainer.checkpoint.enable": False},
        {"loop.overlong.enable": True, "loop.overlong.buffer_tokens": None},
        {"loop.overlong.buffer_tokens": 33},
        {**TP, "trainer.parallelism.loss_parallel": False},
        {**EARLY},
        {**FOLDED, "trainer.parallelism.pipeline_parallel_schedule_csv": "a.csv",
         "trainer.activation_checkpoint.mode": "full"},
        {**FOLDED, **FREE, "trainer.compile.enable": True, "trainer.compile.components": ("loss",)},
        {"trainer.loss": lambda inputs: None, "trainer.optimizer.early_step_in_backward": True,
         "trainer.training.max_norm": math.inf, "warmup": None},
        {"launch.hosts": "slurm", "launch.gpus_per_host": 0, "launch.trainer_hosts": 2},
        {"loop.publish_every": 3, "loop.max_off_policy_steps": 2},
    ],
)  # fmt: skip
def test_config_that_breaks_no_rule(edits):
    assert faults_of(edits) == []
    assert list(find_faults(tiny_moe(), RULES)) == []


@dataclass(kw_only=True)
class Part:
    rate: float | None = 1.0
    kind: str = "a"


@dataclass(kw_only=True)
class Root:
    size: int = 2
    part: Part | None = field(default_factory=Part)
    parts: tuple[Part, ...] = ()


ALWAYS = Rule(must={"size": at_most(2)}, because="more do not fit")
BESIDE = Rule(
    when={"part.kind": one_of("b", "c")},
    must={"part.rate": above("size"), "size": same_as("part.rate")},
    because="of a reason",
)
EACH = Rule(must={"parts.*.kind": none_of("c")}, because="c is no part")


def test_rules_are_judged_one_by_one():
    rules = (ALWAYS, BESIDE, EACH)
    assert [rule.judge(Root()) for rule in rules] == ["held", "not applying", "held"]
    broken = Root(size=3, part=Part(kind="b"), parts=(Part(), Part(kind="c")))
    assert [rule.judge(broken) for rule in rules] == ["broken"] * 3
    assert list(find_faults(broken, rules)) == [
        "size=3: must be at most 2, because more do not fit",
        "part.rate=1.0: must be above size=3 with part.kind='b', because of a reason",
        "size=3: must be the same as part.rate=1.0 with part.kind='b', because of a reason",
        "parts.1.kind='c': must be other than 'c', because c is no part",
    ]
    with pytest.raises(ConfigError, match=r"^size=3: must be at most 2, because"):
        check_rules(broken, rules)
    assert str(BESIDE) == (
        "part.rate above size and size the same as part.rate with part.kind 'b' or 'c'"
    )


def test_option_that_a_component_lacks_breaks_no_rule():
    assert BESIDE.judge(Root(part=None)) == "not applying"
    assert find_values(Root(part=None), "part.kind") == []
    assert Rule(must={"part.kind": "b"}, because="x").judge(Root(part=None)) == "held"
    assert above(0).is_met(None, Root())


def test_rules_of_a_part_are_those_that_no_other_part_decides():
    assert select_rules((ALWAYS, BESIDE, EACH), "size", "parts") == (ALWAYS, EACH)
    for rule in select_rules(RULES, "launch"):
        assert all(option.startswith("launch.") for option in rule.options)
    assert len(select_rules(RULES, "trainer", "batch_invariant")) > 10


def test_none_asks_for_nothing():
    rule = Rule(when={"loop.kl_reward.coef": above(0)}, must={"seed": 1}, because="x")
    for coef, is_applicable in ((None, False), (0.0, False), (0.5, True)):
        config = SimpleNamespace(loop=SimpleNamespace(kl_reward=SimpleNamespace(coef=coef)), seed=0)
        assert rule.is_applicable(config) == is_applicable
