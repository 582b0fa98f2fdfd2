"""Names of other trainers: their page, and the error of someone who types one."""

import importlib.util
import re
from pathlib import Path

import pytest

from rl.config.cli import parse_cli
from rl.config.common_options import ALIASES
from rl.config.help import SOURCE_OPTIONS
from rl.config.known_names import find_exact, read_known_names
from rl.config.tree import walk

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


TITAN_SOURCES = ("torchtitan", "TorchForge")


def rows():
    """Return the page's rows by trainer and name: status, our options, remark."""
    by_name, source = {}, ""
    for line in (DOCS / "known_names.md").read_text().splitlines():
        if heading := re.match(r"## (.+)", line):
            source = heading[1]
        elif row := re.match(r"\| `(.+?)` \| (\w+) \| (.*?) \| (.*) \|$", line):
            by_name[source, row[1]] = (row[2], re.findall(r"`(.+?)`", row[3]), row[4])
    return by_name


def own_options():
    """Return the options of docs/options.md."""
    found, section = set(), ""
    for line in (DOCS / "options.md").read_text().splitlines():
        if heading := re.match(r"## (?:`(.+?)`)?", line):
            section = f"{heading[1]}." if heading[1] else ""
        elif row := re.match(r"\| `(\w+)` \|", line):
            found.add(f"--{section}{row[1]}")
    # Options of a task are in its class, of which the page has none.
    own = parse_cli([], default_module="own", default_config="grpo").config
    found |= {f"--{entry.path}" for entry in walk(own) if entry.kind == "leaf"}
    return found | {f"--{name}" for name in (*SOURCE_OPTIONS, *ALIASES)}


def test_every_field_of_titan_trainer_is_the_same_renamed_or_refused_with_the_reason():
    page = {name: row for (source, name), row in rows().items() if source in TITAN_SOURCES}
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


def test_page_is_the_file():
    names = {(row.source, row.theirs) for known in read_known_names().values() for row in known}
    assert set(rows()) == names
    for source in ("TRL", "verl", "OpenRLHF", "Tinker cookbook"):
        assert sum(name[0] == source for name in names) >= 30


def test_names_of_trl_are_fields_of_its_config():
    fields: set[str] = set()
    # Read, as importing them takes 20 s.
    for package, file in (
        ("trl", "trainer/grpo_config.py"),
        ("trl", "trainer/base_config.py"),
        ("transformers", "training_args.py"),
    ):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            pytest.skip(f"{package} is not installed")
        text = (Path(spec.origin).parent / file).read_text()
        fields.update(re.findall(r"^    (\w+): .+", text, re.MULTILINE))
    missing = {name for source, name in rows() if source == "TRL"} - fields
    # Of the script and the model, of older versions, and of `transformers` before 5.
    assert missing <= NO_FIELDS_OF_TRL


NO_FIELDS_OF_TRL = {
    "model_name_or_path", "model_revision", "dataset_name", "dataset_config",
    "dataset_train_split", "dataset_test_split", "reward_funcs", "dtype", "torch_dtype",
    "attn_implementation", "use_peft", "lora_r", "lora_alpha", "lora_target_modules",
    "lora_dropout", "load_in_4bit", "load_in_8bit", "max_prompt_length", "warmup_ratio",
    "overwrite_output_dir",
}  # fmt: skip


def error_of(capsys, *argv, module="sum_digits"):
    with pytest.raises(SystemExit) as stopped:
        parse_cli(argv, default_module=module, default_config="tiny")
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "training.steps",
            "no such option; torchtitan's training.steps is called --loop.num_steps here",
        ),
        (
            "training.stpes",
            "no such option; torchtitan's training.steps is called --loop.num_steps here",
        ),
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
        ("num_generations", "TRL's num_generations is called --loop.group_size here"),
        ("num-generations", "TRL's num_generations is called --loop.group_size here"),
        ("num_generation", "TRL's num_generations is called --loop.group_size here"),
        ("args.num_generations", "TRL's num_generations is called --loop.group_size here"),
        (
            "grpo_config.beta",
            "TRL's beta is called --trainer.loss.kl_coef or --trainer.reference.enable here",
        ),
        ("per_device_train_batch_size", "TRL's .* --loop.groups_per_batch or --loop.group_size or"),
        ("max_completion_length", r"is called --loop.sampling.max_tokens here \(short"),
        (
            "learning_rate",
            "TRL's and the Tinker cookbook's learning_rate is called --trainer.optimizer.lr here",
        ),
        (
            "max_steps",
            r"TRL's max_steps is called --loop.num_steps here \(optimizer .*; the Tinker "
            "cookbook's max_steps is called",
        ),
        ("data.train_batch_size", "verl's data.train_batch_size is called --loop.groups_per_batch"),
        ("actor_rollout_ref.actor.optim.lr", "verl's .* is called --trainer.optimizer.lr here"),
        ("actor.optim.lr", "verl's actor_rollout_ref.actor.optim.lr is called --trainer.optim"),
        ("adv_estimator", "verl's algorithm.adv_estimator is called --loop.advantage.baseline or"),
        ("trainer.n_gpus_per_node", "verl's trainer.n_gpus_per_node is called --trainer.num_procs"),
        ("n_samples_per_prompt", "OpenRLHF's n_samples_per_prompt is called --loop.group_size"),
        ("init_kl_coef", "OpenRLHF's init_kl_coef is called --loop.kl_reward.coef or"),
        ("max_epochs", "OpenRLHF's max_epochs is no option here: a batch is trained on once"),
        ("loss_fn", "the Tinker cookbook's loss_fn is called config.trainer.loss in a config"),
        ("trainer.num_proc", "did you mean --trainer.num_procs"),
        ("loop.group_sizes", "did you mean --loop.group_size"),
    ],
)
def test_a_name_that_people_know_is_answered_with_ours(capsys, option, message):
    assert re.search(message, error_of(capsys, f"--{option}", "1"))


@pytest.mark.parametrize(
    "argv",
    [
        ["data.train_batch_size=256"],
        ["+data.train_batch_size=256"],
        ["--lr", "1e-5", "data.train_batch_size=256"],
    ],
)
def test_option_written_as_an_assignment_is_answered_too(capsys, argv):
    says = (
        f"error: {argv[-1]!r} belongs to no option; options are written --name value; verl's "
        "data.train_batch_size is called --loop.groups_per_batch here (prompts of a step)\n"
    )
    assert error_of(capsys, *argv) == says


def test_value_with_an_equals_sign_stays_a_value():
    argv = ["--launch.slurm.sbatch_args", "--constraint=x=y", "--description", "answer=3"]
    with pytest.raises(SystemExit):
        parse_cli(argv[:2], default_module="sum_digits", default_config="tiny")
    config = parse_cli(argv[2:], default_module="sum_digits", default_config="tiny").config
    assert config.description == "answer=3"
    named = ["--name", "learning_rate=1e-5"]
    config = parse_cli(named, default_module="sum_digits", default_config="tiny").config
    assert config.name == "learning_rate=1e-5"


def test_program_without_a_trainer_is_not_told_of_one(capsys):
    error = error_of(capsys, "--learning_rate", "1", module="tinker")
    assert "trainer" not in error


def test_name_that_ends_several_names_is_answered_with_none():
    assert find_exact("n") == ()
    assert [row.source for row in find_exact("rollout.n")] == ["verl"]
