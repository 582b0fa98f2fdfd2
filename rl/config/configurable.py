"""Components that own their configuration: `Owner.Config.build()` constructs `Owner`.

    class Optimizer(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            lr: float = 1e-4
            "Peak learning rate."

        def __init__(self, *, config: Config, params): ...

    Optimizer.Config(lr=3e-4).build(params=model.parameters())

A config is plain data: it can be copied, compared, edited by a registry function, put on
the command line (`rl.config.cli`) and written as JSON (`rl.config.serialize`).
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from rl.config.tree import check_fields

HIDDEN = {"hidden": True}
"""Metadata of a field that holds code (`field(metadata=HIDDEN)`): not on the command line,
and listed by name in JSON."""

ONE_RUN = {"one_run": True}
"""Metadata of a field of the root config that is a single run's, with a default (its name): written to
JSON, and back at its default where another run starts from that file."""


class Configurable:
    """A component built from its own nested `Config`.

    A subclass that defines no `Config` of its own gets a fresh one that inherits its
    parent's fields and builds the subclass, never silently the parent.

    Raises:
        TypeError: when the class is defined, if its `Config` is not a
            `@dataclass(kw_only=True, slots=True)` deriving from its parent's `Config`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        owner: ClassVar[type[Configurable]]

        def build(self, **runtime: Any) -> Any:
            """`Owner(config=copy of self, **runtime)`; the caller's config is never shared.

            Raises:
                ConfigError: a field that was edited is not of its type, or is refused.
            """
            check_fields(self)
            return self.owner(config=copy.deepcopy(self), **runtime)  # type: ignore[call-arg]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        config = cls.__dict__.get("Config")
        if config is None:
            config = _fresh_config(cls)
            cls.Config = config  # type: ignore[misc]
        _check_config(cls, config)
        config.owner = cls


Configurable.Config.owner = Configurable


def _fresh_config(cls: type[Configurable]) -> type[Configurable.Config]:
    body = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.Config"}
    return dataclass(kw_only=True, slots=True)(type("Config", (cls.Config,), body))


def _check_config(cls: type[Configurable], config: type) -> None:
    name = f"{cls.__qualname__}.Config"
    decorate = f"decorate {name} with @dataclass(kw_only=True, slots=True)"
    for base in cls.__bases__:
        if issubclass(base, Configurable) and not (
            isinstance(config, type) and issubclass(config, base.Config)
        ):
            raise TypeError(f"{name} must derive from {base.Config.__qualname__}")
    if "owner" in config.__dict__:
        raise TypeError(f"{name} already builds {config.owner.__qualname__}: derive a new Config from it")  # type: ignore[attr-defined]
    if "__dataclass_fields__" not in config.__dict__:
        raise TypeError(f"{name} is not a dataclass: {decorate}")
    if "__slots__" not in config.__dict__:
        raise TypeError(f"{name} has no slots: {decorate}")
    for f in dataclasses.fields(config):
        if f.init and not f.kw_only:
            raise TypeError(f"{name}.{f.name} is positional: {decorate}")
    # Python 3.12 records the decorator's arguments, so a Config without fields of its own is seen too.
    if not getattr(config.__dict__["__dataclass_params__"], "kw_only", True):
        raise TypeError(f"{name} is not keyword-only: {decorate}")
