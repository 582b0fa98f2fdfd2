"""Names of other trainers: their page, and the error of someone who types one."""

import re
from pathlib import Path

import pytest

from rl.config.cli import parse_cli
from rl.config.help import SOURCE_OPTIONS

DOCS = Path(__file__).resolve().parents[2] / "docs"
TITAN_TRAINER = {
    "": """
        loss state_dict_key use_dcp dcp_path
    """,
    "job": """
        config_file dump_folder description print_config custom_config_module
    """,
    "model": """
        name flavor hf_assets_path tokenizer_path converters print_after_conversion
    """,
    "optimizer": """
        name lr beta1 beta2 eps weight_decay implementation early_step_in_backward
    """,
    "lr_scheduler": """
        warmup_steps decay_ratio decay_type min_lr_factor
    """,
    "training": """
        dataset dataset_path local_batch_size global_batch_size seq_len max_norm steps
        enable_cpu_offload dtype mixed_precision_param mixed_precision_reduce gc_freq gc_debug seed
        deterministic debug_moe_force_load_balance
    """,
    "parallelism": """
        data_parallel_replicate_degree enable_compiled_autograd data_parallel_shard_degree
        fsdp_reshard_after_forward tensor_parallel_degree disable_loss_parallel
        enable_async_tensor_parallel pipeline_parallel_degree module_fqns_per_model_part
        pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers
        pipeline_parallel_layers_per_stage pipeline_parallel_schedule pipeline_parallel_schedule_csv
        pipeline_parallel_microbatch_size context_parallel_degree context_parallel_rotate_method
        expert_parallel_degree expert_tensor_parallel_degree
    """,
    "checkpoint": """
        enable enable_ft_dataloader_checkpoints folder interval initial_load_path
        initial_load_model_only initial_load_in_hf initial_load_in_hf_quantized last_save_model_only
        last_save_in_hf export_dtype async_mode keep_latest_k load_step exclude_from_loading
        enable_first_step_checkpoint create_seed_checkpoint load_only
    """,
    "activation_checkpoint": """
        mode selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns early_stop
        memory_budget visualize_memory_budget_pareto
    """,
    "compile": """
        enable components backend
    """,
    "quantize": """
        linear.float8.enable_fsdp_float8_all_gather
        linear.float8.precompute_float8_dynamic_scale_for_fsdp linear.float8.recipe_name
        linear.float8.filter_fqns linear.float8.emulate grouped_mm.float8.fqns
        linear.mx.mxfp8_dim1_cast_kernel_choice linear.mx.recipe_name linear.mx.filter_fqns
        grouped_mm.mx.recipe_name grouped_mm.mx.fqns
    """,
    "comm": """
        init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder
        save_traces_file_prefix
    """,
    "memory_estimation": """
        enable disable_fake_mode
    """,
}
"""Fields of TorchForge's TitanTrainer, and of the sections of torchtitan 0.2.0 that it has."""


def rows():
    """Return the page's rows by name: status, our options, remark."""
    lines = re.findall(
        r"^\| `(.+?)` \| (\w+) \| (.*?) \| (.*) \|$",
        (DOCS / "known_names.md").read_text(),
        re.MULTILINE,
    )
    return {
        name: (status, re.findall(r"`(.+?)`", ours), remark) for name, status, ours, remark in lines
    }


def own_options():
    """Return the options of docs/options.md."""
    found, section = set(), ""
    for line in (DOCS / "options.md").read_text().splitlines():
        if heading := re.match(r"## (?:`(.+?)`)?", line):
            section = f"{heading[1]}." if heading[1] else ""
        elif row := re.match(r"\| `(\w+)` \|", line):
            found.add(f"--{section}{row[1]}")
    return found | {f"--{name}" for name in SOURCE_OPTIONS}


def test_every_field_of_titan_trainer_is_the_same_renamed_or_refused_with_the_reason():
    page = rows()
    for section, names in TITAN_TRAINER.items():
        for name in names.split():
            full = f"{section}.{name}" if section else name
            status, ours, remark = page[full]
            assert status in ("same", "renamed", "refused"), full
            assert ours or status == "refused", full
            assert remark or status != "refused", full
            assert status != "same" or ours[0] == f"--trainer.{full}", full


def test_every_option_of_the_page_exists():
    known = own_options()
    for name, (_, ours, _) in rows().items():
        for option in ours:
            assert option in known or option.startswith("config."), f"{name}: {option}"


def error_of(capsys, *argv):
    with pytest.raises(SystemExit) as stopped:
        parse_cli(argv, default_module="sum_digits", default_config="tiny")
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("training.steps", "no such option; training.steps is called --loop.num_steps here"),
        ("training.stpes", "no such option; training.steps is called --loop.num_steps here"),
        ("trainer.training.steps", "training.steps is called --loop.num_steps here"),
        ("training.local_batch_size", "or --trainer.training.max_tokens_per_microbatch here"),
        ("training.seq_len", "is called --trainer.training.max_sequence_length or"),
        ("training.gc_freq", "is called --trainer.training.gc_every_steps here"),
        ("training.mixed_precision_param", "is called --trainer.training.param_dtype here"),
        ("model.flavor", "is no option here: .*config.model in a config function"),
        ("optimizer.lr", "is called --trainer.optimizer.lr here"),
        (
            "activation_checkpoint.memory_budget",
            "is no option here: blocks are compiled one by one",
        ),
        ("trainer.optimizer.lrr", "did you mean --trainer.optimizer.lr"),
    ],
)
def test_a_name_that_people_know_is_answered_with_ours(capsys, option, message):
    assert re.search(message, error_of(capsys, f"--{option}", "1"))
