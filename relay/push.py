"""Upload of a run's model to the Hugging Face hub: `relay push outputs/x owner/name`.

The model of checkpoints/hf is uploaded with a model card and the learning curve, in one commit. A
README.md that lies in the model's folder is taken as the card, so that a card which `--dry_run` has
written can be edited first.

Exit status: 0; 1 if the hub refuses or cannot be reached; 2 for what cannot be uploaded.
"""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relay.model_card import CURVE, CardFacts, find_base_model, make_card
from rl.config.json import get_value_at
from rl.observability.metrics import make_learning_curve, read_metrics
from rl.observability.run_folder import CONFIG, DEFAULTS, METRICS, refuse_special_files
from rl.utils.files import parse_json, read_regular, replace_file
from rl.utils.printing import print_error, print_text

if TYPE_CHECKING:
    from huggingface_hub import HfApi

CARD = "README.md"
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"
TIMEOUT_S = 10.0
"""Longest wait for the license of the base model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """Files of a commit."""

    repository: str
    folder: Path
    """Folder of the model."""
    files: dict[str, Path]
    """Files of the model's folder, and of the card, by their path in the repository."""
    curve: bytes | None
    """Picture of the learning curve; None without metrics."""


def main(argv: Sequence[str] | None = None) -> int:
    """Upload a model, and return the exit status."""
    options = _parse(argv)
    # First all that needs no network.
    try:
        run = Path(options.run).expanduser()
        folder = find_model(run, is_adapter=options.adapter)
        _check_name(options.repository)
        api = None if options.dry_run else _open_api()
        license_name = options.license or _find_license(api, _read_object(run / CONFIG))
        _write_card(run, folder, options, license_name=license_name)
        upload = collect_files(run, folder, repository=options.repository)
        print_text(describe_upload(upload))
        if api is None:
            print_text(f"nothing is uploaded; the card is {folder / CARD}")
            return 0
    except (ValueError, OSError) as error:
        print_error(f"error: {error}")
        return 2
    return _send(api, upload, private=options.private)


# What is uploaded


def find_model(run: Path, *, is_adapter: bool) -> Path:
    """Return the folder of a run's model; raise ValueError if there is none."""
    # It imports a tokenizer's library.
    from rl.training.checkpoints.files import ADAPTER_FOLDER, HF_FOLDER

    if not run.is_dir():
        raise ValueError(f"{run}: there is no such folder; give the folder of a run")
    refuse_special_files(run)
    config = _read_object(run / CONFIG)
    if not isinstance(config.get("values"), dict):
        raise ValueError(f"{run} is not the folder of a run: it has no readable {CONFIG}")
    checkpoints = get_value_at(config["values"], "trainer.checkpoint.folder", "checkpoints")
    folder = (
        run / Path(str(checkpoints)).expanduser() / (ADAPTER_FOLDER if is_adapter else HF_FOLDER)
    )
    if folder.is_dir() and any(folder.glob("*.safetensors")):
        return folder
    if is_adapter:
        raise ValueError(f"{run} has no adapter in {folder}: only runs with LoRA write one")
    raise ValueError(
        f"{run} has no model in {folder}: a run writes it at its end, unless "
        "--trainer.checkpoint.enable or --trainer.checkpoint.last_save_in_hf is False"
    )


def _check_name(repository: str) -> None:
    if NAME.fullmatch(repository):
        return
    if "/" not in repository:
        raise ValueError(
            f"{repository!r} has no owner: write owner/name, such as your-name/{repository}"
        )
    raise ValueError(
        f"{repository!r} is no name on the hub: must be owner/name of letters, digits, -, _ and ."
    )


def _write_card(
    run: Path, folder: Path, options: argparse.Namespace, *, license_name: str | None
) -> None:
    """Write the card into the model's folder, unless there is one."""
    card = folder / CARD
    if card.exists():
        print_text(f"{card} is taken as the card; remove the file for a new one")
        return
    records = read_metrics(run / METRICS)
    facts = CardFacts(
        repository=options.repository,
        config=_read_object(run / CONFIG),
        defaults=_read_object(run / DEFAULTS),
        records=records,
        is_adapter=options.adapter,
        has_curve=bool(records),
        license=license_name,
    )
    with replace_file(card) as temporary:
        temporary.write_text(make_card(facts), encoding="utf-8")


def collect_files(run: Path, folder: Path, *, repository: str) -> Upload:
    """Return the files of the model, the card and the curve."""
    files: dict[str, Path] = {}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        # A link could lead to any file of this user.
        if file.is_file() and not file.is_symlink() and not file.name.startswith("."):
            files[name] = file
    return Upload(
        repository=repository, folder=folder, files=files, curve=_draw_curve(run / METRICS)
    )


def _draw_curve(metrics: Path) -> bytes | None:
    # Drawn anew: the file in the run's folder is of the end of an earlier attempt, or missing.
    records = read_metrics(metrics)
    if not records:
        return None
    picture = io.BytesIO()
    make_learning_curve(records).savefig(picture, format="png")
    return picture.getvalue()


def describe_upload(upload: Upload) -> str:
    """Return the files with their sizes as lines."""
    sizes = {name: file.stat().st_size for name, file in upload.files.items()}
    if upload.curve is not None:
        sizes[CURVE] = len(upload.curve)
    total = sum(sizes.values()) / 1e6
    lines = [f"{upload.repository}: {len(sizes)} files, {total:.1f} MB, of {upload.folder}"]
    lines += [f"  {size / 1e6:10.3f} MB  {name}" for name, size in sorted(sizes.items())]
    if base := _find_local_base(upload):
        lines.append(
            f"note: adapter_config.json names the base model {base!r}, a path of this machine; "
            "change base_model_name_or_path for others to load the adapter"
        )
    return "\n".join(lines)


def _find_local_base(upload: Upload) -> str | None:
    """Return the base model of an adapter if it is a path of this machine."""
    file = upload.files.get("adapter_config.json")
    base = None if file is None else _read_object(file).get("base_model_name_or_path")
    return base if isinstance(base, str) and base.startswith("/") else None


def _read_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file is missing or damaged."""
    with suppress(OSError, ValueError):
        content = parse_json(read_regular(file))
        if isinstance(content, dict):
            return content
    return {}


# The hub


def _open_api() -> HfApi:
    """Return a client; raise ValueError if nobody is logged in, or the hub is switched off."""
    from huggingface_hub import HfApi, constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise ValueError("HF_HUB_OFFLINE is set: unset it to upload, or use --dry_run")
    if get_token() is None:
        raise ValueError(f"there is no token for the Hugging Face hub: {LOG_IN}")
    return HfApi()


def _find_license(api: HfApi | None, config: dict[str, Any]) -> str | None:
    """Return the license of the base model, as the hub has it; None if it is unknown."""
    base = find_base_model(config)
    if api is None or base is None:
        return None
    try:
        card = api.model_info(base, timeout=TIMEOUT_S).card_data
    except Exception:  # noqa: BLE001 - a network request, and the card does without its result
        return None
    license_name = None if card is None else card.get("license")
    return license_name if isinstance(license_name, str) else None


def _send(api: HfApi, upload: Upload, *, private: bool) -> int:
    """Upload the files in one commit, and return the exit status."""
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.errors import HfHubHTTPError

    # One commit, so that nobody sees the card without the weights.
    operations = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=file)
        for name, file in upload.files.items()
    ]
    if upload.curve is not None:
        operations.append(CommitOperationAdd(path_in_repo=CURVE, path_or_fileobj=upload.curve))
    name = upload.repository
    try:
        # Without --private the owner's default holds.
        url = api.create_repo(name, private=True if private else None, exist_ok=True)
        if private and not api.model_info(name).private:
            print_error(f"error: {name} exists and is public: nothing is uploaded")
            return 2
        api.create_commit(name, operations, commit_message="Upload a model trained with relay")
    except HfHubHTTPError as error:
        status = error.response.status_code
        hint = f"; {LOG_IN}" if status in (401, 403) else ""
        reason = error.server_message or str(error).partition("\n")[0]
        print_error(f"error: the hub refused {name} with status {status}: {reason}{hint}")
        return 1
    except Exception as error:  # noqa: BLE001 - a network request
        print_error(f"error: {name} was not uploaded: {type(error).__name__}: {error}")
        return 1
    print_text(f"{url}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="relay push", description="Upload a run's model to the Hugging Face hub."
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run, such as outputs/x")
    parser.add_argument("repository", metavar="OWNER/NAME", help="the model's name on the hub")
    parser.add_argument("--adapter", action="store_true", help="the LoRA adapter instead")
    parser.add_argument("--private", action="store_true", help="a private repository")
    parser.add_argument(
        "--license",
        metavar="ID",
        help="license of the model, such as apache-2.0; default: the base model's, if known",
    )
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help=f"write the card ({CARD} in the model's folder), list the files, upload nothing",
    )
    return parser.parse_args(argv)
