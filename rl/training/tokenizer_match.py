"""Whether a checkpoint and the run that loads it have the same tokenizer. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl.models.tokenizer_print import TokenizerPrint
from rl.training.checkpoint_config import TOKENIZER, excluded

_ADVICE = (
    "; give hf_assets_path a folder with the checkpoint's tokenizer or, where the difference is meant, add "
    f"{TOKENIZER} to checkpoint.exclude_from_loading"
)


def check_tokenizer(
    checkpoint: Path,
    saved: TokenizerPrint | None,
    present: TokenizerPrint | None,
    *,
    model_only: bool,
    exclude: Sequence[str],
) -> None:
    """Of the run that saved, and of the one that loads; None where it is not known, which is let through.

    A run that continues needs all of it, one that takes the weights alone (`model_only`) their tokens.

    Raises:
        ValueError: they differ; names both folders and what differs.
    """
    if saved is None or present is None or excluded(TOKENIZER, exclude):
        return
    differences = saved.differences(present, tokens_alone=model_only)
    if not differences:
        return
    named = ", ".join(differences)
    made = f"checkpoint {checkpoint} was made with the tokenizer of {saved.folder}"
    if saved.folder == present.folder:
        difference = f"{made}, which has changed since ({named})"
    else:
        difference = f"{made}, this run has that of {present.folder}, which differs ({named})"
    meaning = (
        "the rows of its weights belong to other tokens"
        if model_only
        else "its policy would be told other tokens than it was trained on"
    )
    raise ValueError(f"{difference}: {meaning}{_ADVICE}")
