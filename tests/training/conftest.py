"""Folders of weights shared by the tests of this folder."""

import pytest

from tests.training.parts import (
    even_spec,
    moe_spec,
    random_factors,
    small_spec,
    windowed_spec,
    write_adapter,
    write_assets,
)


@pytest.fixture(scope="session")
def assets(tmp_path_factory):
    """Return a read-only Hugging Face folder of `small_spec`."""
    return write_assets(tmp_path_factory.mktemp("assets") / "model")


@pytest.fixture(scope="session")
def moe_assets(tmp_path_factory):
    """Return a read-only Hugging Face folder of `moe_spec`."""
    return write_assets(tmp_path_factory.mktemp("assets") / "moe", spec=moe_spec())


@pytest.fixture(scope="session")
def windowed_assets(tmp_path_factory):
    """Return a read-only Hugging Face folder of `windowed_spec`."""
    return write_assets(tmp_path_factory.mktemp("assets") / "windowed", spec=windowed_spec())


@pytest.fixture(scope="session")
def all_assets(windowed_assets, moe_assets, tmp_path_factory):
    """Return the folders of weights by kind of model, and the adapters that LoRA starts with."""
    folder = tmp_path_factory.mktemp("assets")
    untied = small_spec(tie=False)
    return {
        "dense": windowed_assets,
        "moe": moe_assets,
        "lora": write_assets(folder / "untied", spec=untied),
        "adapter": write_adapter(folder / "adapter", random_factors(untied, scale=0.2)),
        "even adapter": write_adapter(folder / "even", random_factors(even_spec(), scale=0.02)),
    }
