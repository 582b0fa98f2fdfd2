"""Secrets of the environment, which actors do not get.

The code that an actor runs can read its environment, and so can who gets into its process. The
controller keeps its own: it downloads models and writes metrics.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection

NAMED = re.compile(
    r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?(_|$)|(^|_)AUTH(_|$)|_(PWD|PAT|PASS)$",
    re.IGNORECASE,
)
"""Names such as HF_TOKEN, AWS_ACCESS_KEY_ID, PGPASSWORD and SSH_AUTH_SOCK; not
TOKENIZERS_PARALLELISM.
"""
PASSWORD = re.compile(r"PASS|PWD", re.IGNORECASE)
SETTING = re.compile(r"\d{1,9}|true|false", re.IGNORECASE)
"""Values that are no secret, unless the name is that of a password:
VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD=1024.
"""
URL_WITH_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]+@")


def secret_names(keep: Collection[str] = ()) -> list[str]:
    """Return the variables of this process's environment that hold a secret, by their name or their
    value.

    A proxy's address stays, even with a password: without it an actor has no network.
    """
    return [
        name for name, value in os.environ.items() if name not in keep and _is_secret(name, value)
    ]


def _is_secret(name: str, value: str) -> bool:
    if NAMED.search(name):
        return bool(PASSWORD.search(name)) or not SETTING.fullmatch(value)
    return bool(URL_WITH_PASSWORD.search(value)) and not name.lower().endswith("_proxy")


def without_secrets(keep: Collection[str] = ()) -> dict[str, str]:
    """Return empty values for the secrets in the environment of a process to be started.

    Monarch lets a process inherit the environment and can only replace values.
    `forget_empty_secrets` does the rest.
    """
    return dict.fromkeys(secret_names(keep), "")


def forget_empty_secrets() -> None:
    """Remove the names that `without_secrets` has left, as an empty key is not the same as none."""
    for name in secret_names():
        if not os.environ[name]:
            del os.environ[name]
