"""What is refused of a run before it starts, though only its end would meet it."""

from dataclasses import replace
from functools import reduce

import pytest

from actors.checks import check_end, check_replicas, check_waits
from actors.launch_config import LaunchConfig
from actors.layout_checks import check_layout
from actors.plan import starting_point
from configs.sum_digits import qwen3_32b, tiny, tiny_moe
from rl.config.tree import rebuild
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


def test_more_generators_than_devices_are_refused_before_the_start():
    config = tiny()
    config.generator.num_replicas = 3
    check_layout(config.fleet, model_spec=config.model, loop=config.loop, num_gpus=4)
    with pytest.raises(ValueError, match=r"generator\.num_replicas=3 of .* need 4 GPUs, this machine has 3"):
        check_layout(config.fleet, model_spec=config.model, loop=config.loop, num_gpus=3)
    config.launch.trainer_hosts = 2
    with pytest.raises(ValueError, match="launch: trainer_hosts=2 with hosts='this'"):
        check_layout(config.fleet, model_spec=config.model, loop=config.loop, num_gpus=4)


def test_more_generators_than_cores_are_refused_where_these_are_the_devices():
    config = tiny()
    config.generator.num_replicas = 3
    check_replicas(config.fleet, num_cores=3, memory_bytes=3 * 2**30)
    with pytest.raises(ValueError, match=r"generator\.num_replicas=3: must be at most 2, the cores of"):
        check_replicas(config.fleet, num_cores=2, memory_bytes=3 * 2**30)
    with pytest.raises(
        ValueError, match=r"cpu_kv_cache_gib=1 of each of 3 generator processes is more than the 2 GiB of"
    ):
        check_replicas(config.fleet, num_cores=3, memory_bytes=2 * 2**30)


def test_a_transfer_may_not_take_longer_than_the_run_waits_for_it():
    config = tiny()
    config.weights.timeout_s = config.timeouts.sync_s
    check_waits(config.fleet, store=config.weights)
    config.weights.timeout_s += 1
    with pytest.raises(ValueError, match=r"weights\.timeout_s=601 is more than timeouts\.sync_s=600, after"):
        check_waits(config.fleet, store=config.weights)


def test_a_machine_without_gpus_may_start_a_run_that_has_them_elsewhere():
    config = qwen3_32b()
    config.trainer.checkpoint.async_mode = "async_with_pinned_mem"
    config.launch.hosts = "slurm"
    config.launch.trainer_hosts = 2
    check_layout(config.fleet, model_spec=config.model, loop=config.loop, num_gpus=0)
    config.launch.gpus_per_host = 0
    with pytest.raises(ValueError, match="async_with_pinned_mem"):
        check_layout(config.fleet, model_spec=config.model, loop=config.loop, num_gpus=0)


def test_who_shares_devices_can_sleep_and_does_not_work_at_the_same_time():
    config = tiny()
    config.launch.share_gpus = config.generator.can_sleep = True
    check_layout(config.fleet, model_spec=config.model, loop=config.loop, num_gpus=1)
    config.loop.max_policy_age = 1
    with pytest.raises(ValueError, match=r"share_gpus=True with loop\.max_policy_age=1: must be 0"):
        check_layout(config.fleet, model_spec=config.model, loop=config.loop, num_gpus=1)
    config.loop.max_policy_age, config.generator.can_sleep = 0, False
    with pytest.raises(ValueError, match=r"share_gpus=True with generator\.can_sleep=False: must be True"):
        check_layout(config.fleet, model_spec=config.model, loop=config.loop, num_gpus=1)


@pytest.mark.parametrize(
    ("launch", "says"),
    [
        ({"hosts": "process"}, r"spare_generators=2 with launch\.hosts='process': spares are made with"),
        ({"share_gpus": True}, r"spare_generators=2 with launch\.share_gpus=True: .*, so it must be 0"),
    ],
)
def test_spare_generators_are_refused_where_none_can_be_made(launch, says):
    config = tiny()
    config.recovery.spare_generators = 2
    check_layout(config.fleet, model_spec=config.model, loop=config.loop, num_gpus=0)
    config.launch = LaunchConfig(**launch)
    with pytest.raises(ValueError, match=says):
        check_layout(config.fleet, model_spec=config.model, loop=config.loop, num_gpus=0)


def test_trainer_and_generator_have_the_same_arithmetic_in_the_batch_invariant_mode():
    def check(**edits):
        config = rebuild(tiny(), edits)
        spec = replace(config.model, batch_invariant=True)
        check_layout(config.fleet, model_spec=spec, loop=config.loop, num_gpus=0)

    check()
    with pytest.raises(
        ValueError,
        match=r"trainer\.training\.param_dtype=float32, generator\.dtype=bfloat16: must be the same",
    ):
        check(**{"generator.dtype": "bfloat16"})
    with pytest.raises(
        ValueError, match=r"tensor_parallel_degree=1, generator\.tensor_parallel_degree=2: must be the same"
    ):
        check(**{"generator.tensor_parallel_degree": 2})


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        ({"trainer.compile.enable": True}, r"^trainer\.compile\.enable=True: must be False with batch_inv"),
        (
            {"trainer.parallelism.tensor_parallel_degree": 2, "trainer.num_procs": 2},
            r"^trainer\.parallelism\.loss_parallel=True: must be False with batch_invariant=True",
        ),
        (
            {"trainer.training.logits_chunk_tokens": 48},
            r"^trainer\.training\.logits_chunk_tokens=48: must be",
        ),
        ({"trainer.converters": (LoRA.Config(),)}, r"^trainer\.converters\.0=LoRA: must not be there"),
    ],
)
def test_what_the_engine_refuses_is_named_as_the_option_that_it_is(edit, says):
    config = tiny()
    for path, value in edit.items():
        *path_to, name = path.split(".")
        setattr(reduce(getattr, path_to, config), name, value)
    spec = replace(config.model, batch_invariant=True)
    with pytest.raises(ValueError, match=says):
        check_layout(config.fleet, model_spec=spec, loop=config.loop, num_gpus=0)


def test_a_model_that_cannot_be_batch_invariant_is_no_option_of_the_trainers():
    config = tiny_moe()
    spec = replace(config.model, batch_invariant=True)
    with pytest.raises(ValueError, match=r"^batch_invariant=True: must be False for a mixture of experts"):
        check_layout(config.fleet, model_spec=spec, loop=config.loop, num_gpus=0)


def test_the_switch_reaches_the_model_of_trainer_and_generator(tmp_path):
    for on in (True, False):
        config = rebuild(tiny(), {"batch_invariant": on, "dump_folder": str(tmp_path)})
        assert starting_point(config, task=config.task.build(), source=None).spec.batch_invariant is on


def test_a_warm_up_in_other_kernels_is_another_one(tmp_path):
    folders = {
        starting_point(config, task=config.task.build(), source=None).warmed_up
        for config in (
            rebuild(tiny(), {"batch_invariant": on, "dump_folder": str(tmp_path)}) for on in (True, False)
        )
    }
    assert len(folders) == 2


def check_loop(config):
    check_layout(config.fleet, model_spec=config.model, loop=config.loop, num_gpus=0)


def test_settings_of_the_loop_that_do_not_fit_others_are_named_as_the_options_that_they_are():
    config = tiny()
    config.loop.overlong.enable = True
    config.loop.overlong.buffer_tokens = config.loop.sampling.max_tokens + 1
    with pytest.raises(ValueError, match=r"^loop\.overlong\.buffer_tokens=\d+: .*loop\.sampling\.max_tokens"):
        check_loop(config)
    config.loop.overlong.buffer_tokens -= 1
    check_loop(config)
    config.loop.kl_reward.coef = 0.5
    with pytest.raises(
        ValueError, match=r"^loop\.kl_reward\.coef=0\.5 needs .*: must be 0, or trainer\.reference\.enable"
    ):
        check_loop(config)
