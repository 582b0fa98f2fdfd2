"""GGUF files: converted once into a Hugging Face folder, which everything else reads.

transformers translates names and settings; the package `gguf` dequantizes. Tensors are written in
bfloat16, in which most models are published and whose rounding, 2^-9, is below that of a file of 4
to 8 bits.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.models.adapter import DecoderAdapter
from rl.models.decoder import Decoder
from rl.models.files.gguf_header import check_gguf_header
from rl.models.files.hf import write_hf_folder
from rl.models.files.tokenizer import write_json
from rl.models.spec import spec_from_hf
from rl.utils.extras import describe_install
from rl.utils.printing import print_text

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Names in GGUF of the families that can be converted; Mistral's is "llama"."""
SMOLLM = "smollm"
"""Name in GGUF of a rule of splitting texts that transformers lacks: each digit, then GPT-2's rule.
"""
RECIPE = 4
"""Part of the folder's name; incremented when a change of the conversion changes the result."""


def convert_gguf(file: Path, *, cache: Path, writes: bool = True) -> Path | None:
    """Return the Hugging Face folder of a GGUF file in `cache`, written if it is missing.

    Args:
        writes: False returns None for a folder that is missing.

    Raises:
        ValueError: the package `gguf` is missing, or the file is damaged or holds a model that is
            not supported.
    """
    # The content names the folder, so that a file that was replaced is converted again.
    with file.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    folder = cache / f"{file.stem}-gguf-{RECIPE}-{digest[:12]}"
    if folder.exists():
        return folder
    if not writes:
        return None

    with _translate_errors(file), _hide_output():
        check_gguf_header(file)
        settings, tensor_names = _read_settings(file)
        print_text(f"converting {file}, once, to {folder}")
        config, tensors, tokenizer = _read_model(file, settings)
        if settings.get("tokenizer.ggml.pre") == SMOLLM:
            _split_digits(tokenizer)
        spec = spec_from_hf(config)

    adapter = spec.adapter(spec.model)
    with torch.device("meta"):
        names = [name for name, _ in spec.model.build().named_parameters()]
    _check_fit(file, settings, tensor_names, model=spec.model, adapter=adapter, names=names)

    # FileExistsError: another process was faster.
    with tempfile.TemporaryDirectory() as saved, suppress(FileExistsError):
        tokenizer.save_pretrained(saved)
        _name_class(Path(saved) / "tokenizer_config.json")
        write_json(Path(saved) / "generation_config.json", _collect_token_ids(settings))
        params = _read_parameters(file, names, adapter=adapter, tensors=tensors)
        write_hf_folder(folder, params, adapter, dtype=torch.bfloat16, tokenizer_from=saved)
    return folder


def read_gguf_config(file: Path) -> dict[str, Any]:
    """Return config.json of a GGUF file, without its tensors; raises as `convert_gguf`."""
    with _translate_errors(file), _hide_output(), _link_alone(file) as link:
        check_gguf_header(file)
        settings, _ = _read_settings(file)
        return _read_config(link, settings)[0]


@contextmanager
def _hide_output() -> Iterator[None]:
    """Hide what libraries print during the block: warnings of packages that nothing here uses,
    and, where nobody looks on, bars of their progress.
    """
    has_reader = sys.stderr is not None and sys.stderr.isatty()
    stream = sys.stderr if has_reader else io.StringIO()
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stderr(stream):
            yield
    finally:
        logging.disable(disabled)


def _split_digits(tokenizer: Any) -> None:
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


def _name_class(file: Path) -> None:
    """Name the tokenizer's class so that transformers 4, of other programs, opens it too."""
    config = json.loads(file.read_text(encoding="utf-8"))
    if config["tokenizer_class"] == "TokenizersBackend":
        write_json(file, config | {"tokenizer_class": "PreTrainedTokenizerFast"})


@contextmanager
def _translate_errors(file: Path) -> Iterator[None]:
    """Turn the errors of the libraries into a ValueError that names the file."""
    try:
        yield
    except ModuleNotFoundError as error:
        command = f": {describe_install('gguf')}" if error.name == "gguf" else ""
        raise ValueError(
            f"{file}: to read it, install the package {error.name!r}{command}"
        ) from error
    except (MemoryError, OSError):
        raise
    except Exception as error:  # the libraries raise all kinds, tokenizers nothing narrower
        if str(file) in str(error):
            raise
        raise ValueError(f"{file}: the GGUF file is damaged or not supported: {error}") from error


def _read_settings(file: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the settings that are single values, and the names of the tensors.

    Raises ValueError for a model that would be misread.
    """
    from gguf import GGUFReader
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    reader = GGUFReader(file)
    settings: dict[str, Any] = {}
    for name, field in reader.fields.items():
        if len(field.data) == 1:
            settings[name] = field.contents()
    tensor_names = [tensor.name for tensor in reader.tensors]

    architecture = settings["general.architecture"]
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{file}: general.architecture={architecture!r} is not supported: must be one of "
            f"{', '.join(ARCHITECTURES)}; give the model's Hugging Face folder"
        )
    # Before a model with so many layers is built.
    num_layers = settings.get(f"{architecture}.block_count", 0)
    if num_layers > len(tensor_names):
        raise ValueError(
            f"{file}: block_count={num_layers}: the file has only {len(tensor_names)} tensors"
        )
    # The first part alone would be converted as a model with missing tensors.
    if settings.get("split.count", 1) > 1:
        raise ValueError(
            f"{file}: is one of several parts: join them with `llama-gguf-split --merge`"
        )
    scaling = settings.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensor_names:
        raise ValueError(
            f"{file}: scaled rope frequencies are not read from GGUF: give the model's Hugging "
            "Face folder"
        )
    window = settings.get(f"{architecture}.attention.sliding_window")
    if window:
        raise ValueError(
            f"{file}: attention.sliding_window={window} is not read from GGUF: give the model's "
            "Hugging Face folder"
        )
    # The model was trained with the rule: another would give it other tokens.
    rule = settings.get("tokenizer.ggml.pre")
    rules = {"gpt-2", SMOLLM, *GGUF_PRE_TOKENIZER_SPLITS}
    if settings.get("tokenizer.ggml.model") == "gpt2" and rule not in rules:
        raise ValueError(
            f"{file}: tokenizer.ggml.pre={rule!r}: how texts are split into tokens is not known: "
            "give the model's Hugging Face folder"
        )
    # transformers takes this name for an architecture, which the package `gguf` does not have.
    if settings.get("general.name") == "mistral":
        raise ValueError(
            f"{file}: general.name='mistral' is not read: give the model's Hugging Face folder"
        )
    return settings, tensor_names


def _read_model(
    file: Path, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor], Any]:
    """Return config.json, the tensors in bfloat16 by Hugging Face's names, and the tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with _link_alone(file) as link:
        config, of_transformers = _read_config(link, settings)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(of_transformers)
        checkpoint = load_gguf_checkpoint(
            link, return_tensors=True, model_to_load=model, torch_dtype=torch.bfloat16
        )
        tokenizer = AutoTokenizer.from_pretrained(link.parent, gguf_file=link.name)
    return config, checkpoint["tensors"], tokenizer


def _read_config(link: Path, settings: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return config.json, and the config as transformers has it."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(link.parent, gguf_file=link.name)
    values: dict[str, Any] = _restore_decimals(config.to_dict())
    # transformers takes Qwen3's default.
    head_dim = settings.get(f"{settings['general.architecture']}.attention.key_length")
    if head_dim:
        values["head_dim"] = head_dim
    spec_from_hf(values)  # before a model of sizes that no model has is built
    return values, config


@contextmanager
def _link_alone(file: Path) -> Iterator[Path]:
    """Yield a link to a file in a folder of its own: transformers would also read templates and
    settings that lie beside the file.
    """
    with tempfile.TemporaryDirectory() as alone:
        link = Path(alone) / "model.gguf"
        link.symlink_to(file.resolve())
        yield link


def _restore_decimals(config: Any) -> Any:
    """Return settings with the decimal numbers that were meant, as GGUF rounds 1e-5 to float32."""
    if isinstance(config, dict):
        return {name: _restore_decimals(value) for name, value in config.items()}
    return float(str(np.float32(config))) if isinstance(config, float) else config


def _collect_token_ids(settings: dict[str, Any]) -> dict[str, Any]:
    """Return generation_config.json, where the end of a turn and that of the text end a reply."""
    ends = {settings.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")}
    ids: dict[str, Any] = {
        "bos_token_id": settings.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted(ends - {None}),
        "pad_token_id": settings.get("tokenizer.ggml.padding_token_id"),
    }
    return {field: value for field, value in ids.items() if value is not None}


def _check_fit(
    file: Path,
    settings: dict[str, Any],
    tensor_names: list[str],
    *,
    model: Decoder.Config,
    adapter: DecoderAdapter,
    names: list[str],
) -> None:
    """Raise ValueError for a partly rotated head, or a tensor that no parameter is made of."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    # The decoder rotates whole heads.
    architecture, head_dim = settings["general.architecture"], model.block.attention.head_dim
    rotated = settings.get(f"{architecture}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ValueError(
            f"{file}: rope.dimension_count={rotated} is not supported: must be the size of a head, "
            f"{head_dim}"
        )
    table = get_tensor_name_map(MODEL_ARCH[architecture.upper()], model.num_layers)
    gguf_names: set[str | None] = set()
    for name in names:
        for hf_name in adapter.hf_names(name):
            gguf_names.add(table.get_name(hf_name, (".weight", ".bias")))
    # The model would compute without such a tensor.
    for tensor in tensor_names:
        if tensor not in gguf_names:
            raise ValueError(
                f"{file}: tensor {tensor} has no place in the model: give the model's Hugging Face "
                "folder"
            )


def _read_parameters(
    file: Path, names: list[str], *, adapter: DecoderAdapter, tensors: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, whose tensors are removed from `tensors` to free their memory."""
    for name in names:
        parts: list[Tensor] = []
        for hf_name in adapter.hf_names(name):
            if hf_name not in tensors:
                raise ValueError(f"{file}: the GGUF file has no tensor for {hf_name}")
            parts.append(tensors.pop(hf_name))
        yield name, adapter.from_hf(name, parts)
