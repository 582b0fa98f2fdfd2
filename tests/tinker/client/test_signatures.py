"""Code moves from the official client to this one by another import: names, parameters and defaults agree."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import tinker as official

import rl.tinker as ours

CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient")

ADDED = {"ServiceClient.__init__": {"backend", "storage_folder", "progress"}}
"""Parameters that only ours has, all optional."""
INTERNAL = {
    "TrainingClient.__init__": "ServiceClient makes them",
    "SamplingClient.__init__": "ServiceClient and TrainingClient make them",
}
"""Signatures that are nobody's to call."""
ABSENT = {
    "ServiceClient.holder": "of HTTP connections",
    "SamplingClient.create": "internal: it takes a holder",
    "SamplingClient.on_queue_state_change": "internal: called by what polls",
    **dict.fromkeys(
        (
            "RestClient.assign_session_project",
            "RestClient.assign_session_project_async",
            "RestClient.copy_weights",
            "RestClient.copy_weights_async",
            "RestClient.publish_checkpoint_from_tinker_path",
            "RestClient.publish_checkpoint_from_tinker_path_async",
            "RestClient.unpublish_checkpoint_from_tinker_path",
            "RestClient.unpublish_checkpoint_from_tinker_path_async",
            "RestClient.search_sessions",
            "RestClient.whoami",
        ),
        "of accounts, projects and publishing",
    ),
    **dict.fromkeys(
        (
            "RestClient.get_audit_log",
            "RestClient.get_audit_log_async",
            "RestClient.get_billing_usage",
            "RestClient.get_billing_usage_async",
            "RestClient.get_current_checkpoint_storage_usage",
            "RestClient.get_current_checkpoint_storage_usage_async",
        ),
        "of an organisation's administration",
    ),
    **dict.fromkeys(
        (
            "RestClient.export_session_trace",
            "RestClient.export_session_trace_async",
            "RestClient.get_external_weights_urls",
            "RestClient.get_external_weights_urls_async",
        ),
        "files that the hosted service offers to download",
    ),
}
"""The deliberate differences: what only the official clients have."""


def public_methods(client):
    names = (name for name in dir(client) if not name.startswith("_") or name == "__init__")
    return {name: getattr(client, name) for name in names}


def parameters(function):
    signature = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in signature]


@pytest.mark.parametrize("client", CLIENTS)
def test_every_public_method_has_the_official_parameters(client):
    theirs, own = public_methods(getattr(official, client)), public_methods(getattr(ours, client))
    differences = {}
    for name, method in theirs.items():
        full = f"{client}.{name}"
        if full in ABSENT:
            assert name not in own, f"{full} is there, but listed as absent"
        elif full not in INTERNAL:
            mine = parameters(own[name]) if name in own else []
            added = [parameter for parameter in mine if parameter[0] in ADDED.get(full, ())]
            assert all(default is None for _, _, default in added)
            mine = [parameter for parameter in mine if parameter not in added]
            if mine != parameters(method):
                differences[full] = (mine, parameters(method))
    assert differences == {}
    assert sorted(set(own) - set(theirs)) == []


@pytest.mark.parametrize("client", CLIENTS)
def test_what_is_a_coroutine_there_is_one_here(client):
    own = public_methods(getattr(ours, client))
    for name, method in public_methods(getattr(official, client)).items():
        if name in own and name != "__init__":
            assert inspect.iscoroutinefunction(own[name]) == inspect.iscoroutinefunction(
                inspect.unwrap(method)
            ), name


def test_every_name_of_the_official_package_is_there_or_said_not_to_be():
    for name in official.__all__:
        if name in ours.ABSENT:
            with pytest.raises(AttributeError, match=f"rl.tinker has no {name}: "):
                getattr(ours, name)
        elif name in ours.OWN:
            assert getattr(ours, name).__module__.startswith("rl.tinker.client.")
        elif name != "types":
            assert getattr(ours, name) is getattr(official, name)
    assert set(ours.__all__) <= set(official.__all__)


def test_types_are_the_official_ones():
    from rl.tinker.types import Datum

    assert Datum is official.types.Datum is ours.types.Datum is ours.Datum
    missing = [n for n in dir(official.types) if n[0].isupper() and not hasattr(ours.types, n)]
    assert missing == []


def test_the_import_alone_loads_nothing():
    code = (
        "import sys, rl.tinker; "
        "print(sorted({'torch', 'tinker', 'numpy', 'transformers', 'httpx'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        ours.Nonsense  # noqa: B018


def test_only_users_speak_in_official_types():
    """Service, backends and servers have messages of their own, in `rl.tinker.messages`."""
    root = Path(ours.__file__).parents[2]
    files = [path for top in ("rl", "actors", "configs") for path in (root / top).rglob("*.py")]
    users = [path for path in files if "rl.tinker.types" in path.read_text()]
    assert [path.relative_to(root).as_posix() for path in users] == ["rl/tinker/__init__.py"]
