"""Values that the configs of a run's actors refuse, and the config that a run shows."""

import json
from typing import Any

import pytest

from actors.config import (
    KubernetesConfig,
    LaunchConfig,
    ParityConfig,
    RecoveryConfig,
    SlurmConfig,
    Timeouts,
)
from actors.generator import VLLMGenerator
from actors.prepare import prepare_run
from rl.config.json import to_dict
from rl.config.registry import resolve


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        (Timeouts, {"train_s": 0}, "train_s=0: must be above 0"),
        (Timeouts, {"train_s": float("nan")}, "train_s=nan: must be above 0"),
        (RecoveryConfig, {"max_restarts": -1}, "max_restarts=-1: must be at least 0"),
        (RecoveryConfig, {"window_s": 0.0}, r"window_s=0\.0: must be above 0"),
        (RecoveryConfig, {"pause_s": float("nan")}, "pause_s=nan: must be at least 0"),
        (ParityConfig, {"num_tokens": 1}, "num_tokens=1"),
        (ParityConfig, {"max_logprob_diff": -1}, "max_logprob_diff=-1"),
        (VLLMGenerator.Config, {"tensor_parallel_degree": 0}, "tensor_parallel_degree=0: must be "
                                                              "at least 1"),
        (VLLMGenerator.Config, {"max_num_seqs": -1}, "max_num_seqs=-1: must be at least 1"),
        (VLLMGenerator.Config, {"cpu_kv_cache_gib": 0.0}, "cpu_kv_cache_gib=0.0: must be above 0"),
        (VLLMGenerator.Config, {"rank_timeout_s": float("nan")}, "rank_timeout_s=nan: must be "
                                                                 "above 0"),
        (VLLMGenerator.Config, {"max_model_len": 1}, "max_model_len=1: must be at least 2"),
        (VLLMGenerator.Config, {"max_num_seqs": 128, "max_num_batched_tokens": 127},
         "generator.max_num_batched_tokens=127: must be at least max_num_seqs=128"),
        (VLLMGenerator.Config, {"gpu_memory_utilization": 1.2},
         "gpu_memory_utilization=1.2: must be above 0 and at most 1"),
        (LaunchConfig, {"hosts": "process", "trainer_hosts": 0}, "trainer_hosts=0: must be at "
                                                                 "least 1"),
        (LaunchConfig, {"trainer_gpus": (1, 1)}, r"trainer_gpus=\(1, 1\): must name devices from 0 "
                                                 r"on, each once"),
        (LaunchConfig, {"trainer_gpus": (-1,)}, r"trainer_gpus=\(-1,\): must name devices from 0 "
                                                r"on"),
        (LaunchConfig, {"trainer_gpus": ()},
            r"trainer_gpus=\(\): must name devices .*, or be None"),
        (LaunchConfig, {"job_name": "My-job"}, "job_name='My-job': must be at most 30 lowercase "
                                               "letters and digits"),
        (LaunchConfig, {"start_timeout_s": 0.0}, r"start_timeout_s=0\.0: must be above 0"),
        (SlurmConfig, {"time_limit": "2 days"}, "time_limit='2 days': must be such as 90, 12:00:00 "
                                                "or 2-00:00"),
        (SlurmConfig, {"memory_per_host": "512GB"}, "memory_per_host='512GB': must be such as 512G "
                                                    "or 64000M"),
        (SlurmConfig, {"partition": "a b"}, "partition='a b': must be a name without spaces, or "
                                            "None"),
        (SlurmConfig, {"account": ""}, "account='': must be a name without spaces, or None"),
        (SlurmConfig, {"cpus_per_host": 0}, "cpus_per_host=0: must be at least 1"),
        (SlurmConfig, {"sbatch_args": ("constraint=x",)}, "sbatch_args has 'constraint=x': each "
                                                          "must be one option"),
        (SlurmConfig, {"sbatch_args": ("-a 0-1",)}, "sbatch_args has '-a 0-1': must leave one job "
                                                    "that sbatch submits"),
        (SlurmConfig, {"sbatch_args": ("--comment='a",)}, "sbatch_args has .*: No closing "
                                                          "quotation"),
        (SlurmConfig, {"sbatch_args": ("--quiet",)}, "sbatch_args has '--quiet': must leave one "
                                                     "job"),
        (SlurmConfig, {"port": 70000}, "port=70000: must be at least 1024 and at most 65535"),
        (KubernetesConfig, {"namespace": "My_Space"}, "namespace='My_Space': must be a name of "
                                                      "lowercase letters"),
        (KubernetesConfig, {"memory": "64 GB"}, "memory='64 GB': must be a quantity such as 16, "
                                                "500m or 64Gi"),
        (KubernetesConfig, {"shared_memory": "all"}, "shared_memory='all': must be a quantity"),
        (KubernetesConfig, {"port": 80}, "port=80: must be at least 1024 and at most 65535"),
        (KubernetesConfig, {"volume_path": "runs"}, "volume_path='runs': must be an absolute path"),
        (KubernetesConfig, {"volume_path": "/dev/shm"}, "volume_path='/dev/shm': must be .* not "
                                                        "/dev/shm"),
        (KubernetesConfig, {"volume_claim": "My_Runs"}, "volume_claim='My_Runs': must be a name of "
                                                        "lowercase"),
        (KubernetesConfig, {"gpu_resource": "gpu"}, "gpu_resource='gpu': must be a name with its "
                                                    "domain"),
    ],
)  # fmt: skip
def test_invalid_value_is_refused_by_field_with_what_is_valid(kind, fields, says):
    with pytest.raises(ValueError, match=says):
        kind(**fields)


def test_resolved_config_is_printed_if_asked_for(tmp_path, capsys):
    for asked in (True, False):
        request = resolve("tests.support.faulty_configs", "short")
        config: Any = request.config
        config.dump_folder, config.name, config.print_config = (
            str(tmp_path),
            f"printed-{asked}",
            asked,
        )
        with prepare_run(request):
            pass
        before, _, _ = capsys.readouterr().out.partition("run folder: ")
        assert before == (json.dumps(to_dict(config), indent=2) + "\n" if asked else "")
