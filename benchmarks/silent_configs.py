"""Short runs for `benchmarks.silent_faults`: `python -m rl.train --module
benchmarks.silent_configs --config ahead`.

Each is `tiny` for two steps with a ledger, a checkpoint after each step, and one setting by which
it differs. The model comes from `hf_assets_path`, so that no run warms up.
"""

from __future__ import annotations

from collections.abc import Callable

from actors.controller import Controller
from configs import agents as of_agents
from configs import algorithms, alphabet_sort, sum_digits
from rl.models.lora import LoRA
from rl.tasks.sum_digits import INSTRUCTION, SumDigits

NUM_STEPS = 2
MANY_STEPS = 100
"""Steps of a run that is stopped, more than it comes to."""


def shorten(config: Controller.Config) -> Controller.Config:
    """Make a config's run as short as it can be, and keep what is checked afterwards."""
    config.warmup = None
    config.loop.num_steps = NUM_STEPS
    config.loop.groups_per_batch = config.loop.group_size = 8
    config.loop.eval_every = 0
    config.limits.enable = False  # Nobody asks how fast the machine is.
    config.ledger.enable = True
    config.trainer.checkpoint.interval = 1
    config.trainer.checkpoint.create_seed_checkpoint = True
    config.trainer.checkpoint.keep_latest_k = 0
    config.trainer.checkpoint.last_save_in_hf = False
    return config


def tiny() -> Controller.Config:
    """On-policy steps of the warmed-up tiny model."""
    return shorten(sum_digits.tiny())


def resumed() -> Controller.Config:
    """The same, to be stopped and resumed."""
    config = tiny()
    config.loop.num_steps = MANY_STEPS
    return config


def ahead() -> Controller.Config:
    """Generation one step ahead of training."""
    return shorten(sum_digits.tiny_async())


def ahead_resumed() -> Controller.Config:
    """The same, to be stopped and resumed."""
    config = ahead()
    config.loop.num_steps = MANY_STEPS
    return config


def prefix() -> Controller.Config:
    """Long prompts that begin alike, so that their keys and values are found in the cache, and so
    few at a time that some begin while others go on over an update.
    """
    config = sum_digits.tiny_async()
    config.batch_invariant = False
    config.task = SumDigits.Config(num_integers=2, instruction=INSTRUCTION, reward="noise")
    config.generator.max_model_len = 512
    config.generator.max_num_seqs = 8
    config.trainer.lr_scheduler.warmup_steps = 0
    config = shorten(config)
    config.loop.group_size = 4
    config.loop.max_off_policy_steps = 2
    # The fourth step is the first whose prompts begin under the second version.
    config.loop.num_steps = 4
    return config


def lora() -> Controller.Config:
    """Adapters of rank 16, with the larger learning rate that they need."""
    config = tiny()
    config.trainer.converters = (LoRA.Config(rank=16, alpha=32.0),)
    config.trainer.optimizer.lr *= 20
    return config


def warm() -> Controller.Config:
    """Sampling at another temperature than 1."""
    config = tiny()
    config.loop.sampling.temperature = 0.8
    return config


def kl() -> Controller.Config:
    """A KL term in the loss, with a reference policy."""
    return algorithms.with_kl(tiny(), coef=0.1)


def minibatches() -> Controller.Config:
    """Two optimizer steps for each batch."""
    config = tiny()
    config.loop.num_minibatches = 2
    return config


def microbatches() -> Controller.Config:
    """Gradients that are summed over several micro-batches."""
    config = tiny()
    config.trainer.training.max_tokens_per_microbatch = 512
    return config


def turns() -> Controller.Config:
    """Three turns, on random rewards."""
    return shorten(alphabet_sort.tiny_noise())


def agent() -> Controller.Config:
    """An agent behind the endpoint, on random rewards."""
    return shorten(of_agents.noise())


def two_generators() -> Controller.Config:
    """Two generators that share the prompts."""
    config = tiny()
    config.generator.num_replicas = 2
    config.generator.num_threads = 1
    return config


def _on(algorithm: Callable[[], Controller.Config]) -> Callable[[], Controller.Config]:
    def config() -> Controller.Config:
        return shorten(algorithm())

    return config


gspo = _on(algorithms.tiny_gspo)
cispo = _on(algorithms.tiny_cispo)
rloo = _on(algorithms.tiny_rloo)
dr_grpo = _on(algorithms.tiny_dr_grpo)
reinforce_plus_plus = _on(algorithms.tiny_reinforce_plus_plus)
importance_sampling = _on(algorithms.tiny_importance_sampling)
dro = _on(algorithms.tiny_dro)

CLEAN = (
    "tiny", "lora", "ahead", "minibatches", "turns", "gspo", "warm", "agent", "microbatches", "kl",
    "cispo", "two_generators", "rloo", "prefix", "dr_grpo", "resumed", "reinforce_plus_plus",
    "importance_sampling", "dro", "ahead_resumed",
)  # fmt: skip
"""Configs of the clean runs, in turn."""
STOPPED = ("resumed", "ahead_resumed")
"""Configs whose run is stopped after two steps, and resumed."""
