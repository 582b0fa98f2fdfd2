"""Components that own their configuration: `Owner.Config.build()` constructs `Owner`.

    class Optimizer(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            lr: float = 1e-4
            "Peak learning rate."

        def __init__(self, *, config: Config, params): ...

    Optimizer.Config(lr=3e-4).build(params=model.parameters())

A config is plain data: it can be copied, compared, edited by a registry function, changed on the command line
(`rl.config.cli`) and written as JSON (`rl.config.json`).
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from rl.config.tree import check_fields

HIDDEN = {"hidden": True}
"""Metadata of a field that holds code (`field(metadata=HIDDEN)`): it is no option, and JSON has its name."""

ONE_RUN = {"one_run": True}
"""Metadata of a root config's field that belongs to one run, such as its name: another run that starts from the run's
JSON gets the field's default."""


class Configurable:
    """A component that is built from its own nested `Config`.

    A subclass without a `Config` of its own gets one that inherits its parent's fields and builds the subclass.

    Raises:
        TypeError: at the definition of a class whose `Config` is not a `@dataclass(kw_only=True, slots=True)` derived
            from its parent's `Config`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        owner: ClassVar[type[Configurable]]

        def build(self, **runtime: Any) -> Any:
            """Return `Owner(config=copy of self, **runtime)`.

            Raises:
                ConfigError: an edited field is not of its type, or its value is refused.
            """
            check_fields(self)
            return self.owner(config=copy.deepcopy(self), **runtime)  # type: ignore[call-arg]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        config = cls.__dict__.get("Config")
        if config is None:
            body = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.Config"}
            config = dataclass(kw_only=True, slots=True)(type("Config", (cls.Config,), body))
            cls.Config = config  # type: ignore[misc]
        _check_config(cls, config)
        config.owner = cls


Configurable.Config.owner = Configurable


def _check_config(cls: type[Configurable], config: Any) -> None:
    name = f"{cls.__qualname__}.Config"
    for base in cls.__bases__:
        if issubclass(base, Configurable) and not (
            isinstance(config, type) and issubclass(config, base.Config)
        ):
            raise TypeError(f"{name} must derive from {base.Config.__qualname__}")
    own = config.__dict__
    if "owner" in own:
        raise TypeError(f"{name} already builds {config.owner.__qualname__}: derive a new Config from it")
    is_decorated = (
        "__dataclass_fields__" in own
        and "__slots__" in own
        and all(f.kw_only for f in dataclasses.fields(config) if f.init)
    )
    if not is_decorated:
        raise TypeError(f"{name} must be decorated with @dataclass(kw_only=True, slots=True)")
