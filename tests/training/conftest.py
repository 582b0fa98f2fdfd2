"""Folders of weights shared by the tests of this folder."""

import pytest

from tests.training.parts import (
    even_moe_spec,
    even_spec,
    granite_spec,
    moe_spec,
    random_factors,
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
def all_assets(moe_assets, tmp_path_factory):
    """Return the folders of weights by kind of model, and the adapters that LoRA starts with."""
    folder = tmp_path_factory.mktemp("assets")
    granite = granite_spec()
    return {
        "dense": write_assets(folder / "biased", spec=windowed_spec(bias=True)),
        "moe": moe_assets,
        "tied_moe": write_assets(folder / "tied moe", spec=moe_spec(tie=True)),
        "float8_moe": write_assets(folder / "even moe", spec=even_moe_spec()),
        "lora": write_assets(folder / "granite", spec=granite),
        "lora_moe": moe_assets,
        "adapter of lora": write_adapter(folder / "adapter", random_factors(granite, scale=0.2)),
        "adapter of lora_moe": write_adapter(
            folder / "experts", random_factors(moe_spec(), scale=0.2)
        ),
        "adapter of float8_lora": write_adapter(
            folder / "even", random_factors(even_spec(), scale=0.02)
        ),
    }
