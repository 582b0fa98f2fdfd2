"""Builds of torchvision and its like that do not fit PyTorch's."""

import importlib.metadata
import importlib.util
import sys

import pytest

from rl.utils.hidden_packages import FOLLOWERS, hide_unfit_builds


def give_versions(monkeypatch, **versions):
    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    for name in FOLLOWERS:
        # Restored at the end, whatever the call puts there.
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]


def test_cuda_build_beside_a_cpu_build_counts_as_not_installed(monkeypatch):
    give_versions(monkeypatch, torch="2.13.0+cpu", torchvision="0.28.0", torchaudio="2.13.0+cpu")
    assert hide_unfit_builds() == ["torchvision"]
    assert importlib.util.find_spec("torchvision") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("torchvision")
    assert "torchaudio" not in sys.modules


def test_nothing_is_hidden_beside_a_cuda_build(monkeypatch):
    give_versions(monkeypatch, torch="2.13.0", torchvision="0.28.0")
    assert hide_unfit_builds() == []
