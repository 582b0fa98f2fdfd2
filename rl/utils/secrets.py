"""Variables of an environment that hold a secret, by name or by value.

Foreign code that a run starts (actors, agents) can read its environment, so these are left out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

SECRET_NAME = re.compile(
    r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?(_|$)"
    r"|(^|_)AUTH(_|$)|_(PWD|PAT|PASS)$",
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


def find_secrets(environment: Mapping[str, str], *, keep: Collection[str] = ()) -> list[str]:
    """Return the names of an environment that hold a secret, by name or by value.

    Example:
        >>> find_secrets({"HF_TOKEN": "a", "HOME": "/root", "API_KEY": "b"}, keep=["HF_TOKEN"])
        ['API_KEY']
    """
    names = []
    for name, value in environment.items():
        if name not in keep and _is_secret(name, value):
            names.append(name)
    return names


def _is_secret(name: str, value: str) -> bool:
    if SECRET_NAME.search(name):
        return bool(PASSWORD.search(name)) or not SETTING.fullmatch(value)
    # A proxy's address stays, even with a password: without it a process has no network.
    return bool(URL_WITH_PASSWORD.search(value)) and not name.lower().endswith("_proxy")
