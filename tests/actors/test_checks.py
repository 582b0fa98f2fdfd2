"""Configs that are refused before a run starts, although only its end would fail."""

import re
import resource
import shutil
import socket
from dataclasses import replace

import pytest

from actors.launch.placement import fit_to_devices
from actors.preflight.checks import (
    Machine,
    check_run,
    find_config_faults,
    find_machine_faults,
)
from configs.agents import calculator_agent
from configs.sum_digits import qwen3_8b, qwen3_32b, tiny, tiny_moe
from rl.config.tree import rebuild
from rl.models.lora import LoRA
from rl.training.memory import estimate_memory


def faults(base=tiny, num_gpus=0, resumes=False, **edits):
    """Return all faults of an edited config; `__` in a keyword stands for a dot."""
    config = rebuild(base(), {path.replace("__", "."): value for path, value in edits.items()})
    config = fit_to_devices(config, num_gpus=num_gpus)
    assert config.model is not None
    spec = replace(config.model, batch_invariant=bool(config.batch_invariant))
    return list(find_config_faults(config, spec=spec, num_gpus=num_gpus, resumes=resumes))


LORA = {"batch_invariant": False, "trainer__converters": (LoRA.Config(),)}


@pytest.mark.parametrize(
    "edits",
    [
        {},
        {"trainer__checkpoint__timeout_s": 1801.0, "trainer__checkpoint__enable": False},
        {"generator__num_replicas": 3, "num_gpus": 4},
        {"launch__share_gpus": True, "num_gpus": 1},
        {"base": tiny_moe, "num_gpus": 2},
        {"loop__overlong__enable": True, "loop__overlong__buffer_tokens": 32},
        {"base": qwen3_32b, "launch__hosts": "slurm", "launch__trainer_hosts": 2,
         "trainer__checkpoint__async_mode": "async_with_pinned_mem"},
    ],
)  # fmt: skip
def test_config_without_contradictions_has_no_faults(edits):
    assert faults(**edits) == []


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        ({"generator__num_replicas": 3, "num_gpus": 3, "loop__max_off_policy_steps": 1},
         "need 4 GPUs on this machine, which has 3: set launch.share_gpus to True and "
         "loop.max_off_policy_steps"),
        ({"generator__num_replicas": 2, "num_gpus": 1}, "need 3 GPUs on this machine, which has 1"),
        ({"base": tiny_moe, "num_gpus": 2, "generator__enforce_eager": False},
         "generator.enforce_eager=False with generator.dtype=float32: must be True for a mixture "
         "of experts"),
        ({"base": qwen3_32b, "launch__hosts": "slurm", "launch__trainer_hosts": 2,
            "launch__gpus_per_host": 0,
          "trainer__checkpoint__async_mode": "async_with_pinned_mem"}, "async_with_pinned_mem"),
        ({"base": tiny_moe, "batch_invariant": True}, "batch_invariant=True: must be False for a "
                                                      "mixture of"),
        # Errors name the options of the run, those of rules too (tests/config/test_rules.py).
        ({"trainer__compile__enable": True}, "trainer.compile.enable=True: must be False with "
                                             "batch_invariant=True"),
        ({"trainer__num_procs": 3, "trainer__parallelism__data_parallel_shard_degree": 1},
         "does not multiply to the world size of 3"),
        ({"generator__tensor_parallel_degree": 3},
         "generator.tensor_parallel_degree=3 does not divide num_kv_heads=4 and vocab_size=320: "
         "must be one of"),
        ({"trainer__parallelism__expert_tensor_parallel_degree": 2},
         "trainer.parallelism.expert_tensor_parallel_degree=2: must be 1: a dense model has no "
         "experts"),
        ({"trainer__training__max_sequence_length": 2000},
         "max_sequence_length=2000: must be at most 1024, the positions of qwen3 tiny"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_and_name_their_options(edits, says):
    assert any(says in fault for fault in faults(**edits)), faults(**edits)


def test_existing_adapter_is_refused_only_if_the_run_would_save_one(tmp_path):
    (tmp_path / "adapter").mkdir()
    folder = {"trainer__checkpoint__folder": str(tmp_path)}
    assert faults(**folder) == faults(**LORA, **folder, trainer__checkpoint__load_only=True) == []
    assert faults(**LORA, **folder, resumes=True) == []
    (fault,) = faults(**LORA, **folder)
    assert "/adapter is there already, of a run that ended" in fault


@pytest.mark.parametrize(
    ("num_cores", "gib", "says"),
    [
        (3, 16, None),
        (2, 16, "generator.num_replicas=3: must be at most 2, the cores of"),
        (3, 2, "of 3 generator processes, 0.75 GiB each, are more than the 2 GiB of"),
    ],
)
def test_generators_need_cores_and_memory_of_a_machine_without_gpus(num_cores, gib, says):
    config = tiny()
    config.generator.num_replicas, config.generator.max_num_seqs = 3, 1024
    machine = Machine(num_gpus=0, gpu_bytes=None, num_cores=num_cores, memory_bytes=gib * 2**30)
    assert config.model is not None
    found = list(find_machine_faults(config, spec=config.model, machine=machine))
    assert [says in fault for fault in found] == [True] * (says is not None)


@pytest.mark.parametrize(
    ("lora", "edits", "says"),
    [
        ({}, {}, None),
        ({}, {"num_gpus": 2}, "generator.enforce_eager=False with LoRA: must be True on a GPU"),
        ({}, {"num_gpus": 2, "generator__enforce_eager": True}, None),
        ({"merge": True}, {"num_gpus": 2}, None),
        ({"rank": 65}, {}, "LoRA has rank=65, more than generator.max_lora_rank=64"),
        ({"rank": 65}, {"generator__max_lora_rank": 65}, None),
        (
            {},
            {"generator__adapter_memory_gib": 1e-4},
            "generator.adapter_memory_gib=0.0001: 2 versions of the adapter of rank 16 take",
        ),
        (
            {"rank": 1},
            {"generator__adapter_memory_gib": 4e-4, "loop__max_off_policy_steps": 3},
            "generator.adapter_memory_gib=0.0004: 5 versions of the adapter of rank 1 take",
        ),
        ({"rank": 65, "merge": True}, {"batch_invariant": False}, None),
        ({"merge": True}, {}, "trainer.converters.0=LoRA.Config: must be a converter that keeps"),
    ],
)
def test_adapters_that_generators_cannot_serve_are_refused(lora, edits, says):
    found = faults(trainer__converters=(LoRA.Config(**lora),), **edits)
    assert [says in fault for fault in found] == [True] * (says is not None)


def test_disk_that_holds_no_checkpoint_is_found_before_the_start(tmp_path, monkeypatch):
    config = tiny()
    config.dump_folder = str(tmp_path / "outputs")
    machine = Machine(num_gpus=0, gpu_bytes=None, num_cores=8, memory_bytes=2**34)
    config = fit_to_devices(config, num_gpus=0)
    assert config.model is not None
    check_run(config, spec=config.model, machine=machine)
    full = shutil.disk_usage(tmp_path)._replace(free=10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(ValueError, match=r"^dump_folder='.*/outputs': its disk has 1\.0 MB "):
        check_run(config, spec=config.model, machine=machine)
    config.trainer.checkpoint.enable = False
    check_run(config, spec=config.model, machine=machine)


@pytest.mark.parametrize(
    ("base", "edits", "capability", "says"),
    [
        (tiny, {}, (8, 0), None),
        (tiny, {"batch_invariant": True}, (9, 0), None),
        (tiny, {"batch_invariant": True}, (8, 0),
         "batch_invariant=True: must be False on a GPU of compute capability 8.0, for"),
        (tiny, {}, (7, 5), None),
        (qwen3_8b, {}, (8, 0), None),
        (qwen3_8b, {"trainer.training.param_dtype": "float32"}, (7, 5),
         "generator.dtype=bfloat16: must be float32 on a GPU of compute capability 7.5, because "
         "flash attention"),
        (tiny, {}, (7, 0), "a GPU of this machine has compute capability 7.0: CUDA 13 has kernels "
                           "from 7.5 on"),
    ],
)  # fmt: skip
def test_old_gpus_are_refused_only_for_what_they_lack(base, edits, capability, says):
    machine = Machine(
        num_gpus=8,
        gpu_bytes=80 * 10**9,
        gpu_capability=capability,
        num_cores=8,
        memory_bytes=10**12,
    )
    config = fit_to_devices(rebuild(base(), edits), num_gpus=8)
    assert config.model is not None
    found = list(find_machine_faults(config, spec=config.model, machine=machine))
    assert [fault.startswith(says) for fault in found] == [True] * (says is not None)


def memory_faults(config, *, memory_bytes):
    config.trainer.parallelism.data_parallel_shard_degree = 4
    machine = Machine(num_gpus=0, gpu_bytes=None, num_cores=8, memory_bytes=memory_bytes)
    return list(find_machine_faults(config, spec=config.model, machine=machine))


def test_a_model_larger_than_memory_is_refused_with_both_sizes(caplog):
    config = qwen3_8b()
    config.trainer.compile.enable = False
    # 8.19 billion parameters in float32, as many gradients, twice as many optimizer values: 131 GB.
    (fault,) = memory_faults(config, memory_bytes=130 * 10**9)
    assert re.search(
        r"qwen3 8B needs \d+ GB on 4 ranks .*parameters 8\.19.*has 130 GB and no GPU", fault
    )
    assert config.model is not None
    need = estimate_memory(
        config.trainer,
        spec=config.model,
        degrees=config.trainer.parallelism.resolve_degrees(4),
        on_gpu=False,
    )
    assert 4 * need.held == pytest.approx(131e9, rel=0.01)
    assert memory_faults(config, memory_bytes=4 * need.total) == []
    assert caplog.records == []
    # Within the estimate's error of 30% the run starts with a warning; what is held for sure must
    # fit.
    assert memory_faults(config, memory_bytes=4 * need.total - 1) == []
    (record,) = caplog.records
    assert (record.levelname, record.name) == ("WARNING", "rl.training.memory")
    assert memory_faults(config, memory_bytes=4 * need.held - 1) != []
    least = int(4 * need.total / 1.3)
    assert least > 4 * need.held
    assert memory_faults(config, memory_bytes=least - 1) != []
    # A compiled model may need less.
    config.trainer.compile.enable = True
    assert memory_faults(config, memory_bytes=least - 1) == []


@pytest.mark.parametrize(
    ("name", "limit", "says"),
    [
        ("RLIMIT_NOFILE", 1024, "must be at most 256, as agents hold 2 connections each, and the"),
        ("RLIMIT_NPROC", 600, "must be less than 300, as agents have 2 processes each, and a user"),
        ("RLIMIT_NOFILE", 1 << 20, None),
    ],
)
def test_more_agents_than_the_system_has_files_or_processes_for_are_refused(
    monkeypatch, name, limit, says
):
    limits = {resource.RLIMIT_NOFILE: 1 << 20, resource.RLIMIT_NPROC: 1 << 20}
    limits[getattr(resource, name)] = limit
    monkeypatch.setattr("resource.getrlimit", lambda which: (limits[which],) * 2)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    config = calculator_agent()
    assert config.agents is not None
    assert config.model is not None
    config.agents.max_running = 300
    machine = Machine(num_gpus=0, gpu_bytes=None, num_cores=8, memory_bytes=64 << 30)
    found = list(find_machine_faults(config, spec=config.model, machine=machine))
    assert [f"agents.max_running=300: {says}" in fault for fault in found] == [True] * bool(says)


def test_address_where_agents_could_not_reach_the_endpoint_is_refused():
    config = calculator_agent()
    machine = Machine(num_gpus=0, gpu_bytes=None, num_cores=8, memory_bytes=64 << 30)

    def find_agent_faults(listen, *, isolate_network=None):
        assert config.agents is not None
        assert config.model is not None
        config.agents.listen, config.launch.isolate_network = listen, isolate_network
        return list(find_machine_faults(config, spec=config.model, machine=machine))

    # An address for documentation, which no machine has.
    assert find_agent_faults("192.0.2.1:0") == [
        "agents.listen='192.0.2.1:0': cannot listen there: Cannot assign requested address; give "
        "an address of this machine and a free port"
    ]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        (fault,) = find_agent_faults(listen, isolate_network=False)
        assert "Address already in use" in fault
        # Free in a network of their own.
        assert find_agent_faults(listen) == []
