"""Components that own their configuration, and metadata of its fields. `Owner.Config.build()`
constructs `Owner`.

    class Optimizer(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            lr: float = 1e-4
            "Peak learning rate."

        def __init__(self, *, config: Config, params): ...

    Optimizer.Config(lr=3e-4).build(params=model.parameters())

A config is plain data: it can be copied, compared, edited by a registry function, changed on the
command line (`rl.config.cli`) and written as JSON (`rl.config.json`).

Fields tell whether they change anything, and which values are refused:

    num_tokens: int = field(default=32, metadata=only_if("enable", True))
    evaluation: Evaluation = field(default_factory=Evaluation, metadata=unless("eval_every", 0))
    export_dtype: Dtype = field(default="float32", metadata=all_of(only_if("enable", True),
        unless("a", 0)))
    compiled_autograd: bool = field(default=False, metadata=refused("it does not follow FSDP's
        hooks"))

Conditions name a field of the same config, or a field below one ("generator.num_replicas"). They
are shown and never enforced: to set an option without effect is no error.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rl.config.tree import ConfigError, check_fields, list_children

HIDDEN = {"hidden": True}
"""Metadata of a field that holds code (`field(metadata=HIDDEN)`): it is no option, and JSON has its
name.
"""

ONE_RUN = {"one_run": True}
"""Metadata of a root config's field that belongs to one run, such as its name: another run that
starts from the run's JSON gets the field's default."""

EFFECT, REFUSED = "effect", "refused"


class Configurable:
    """A component that is built from its own nested `Config`.

    A subclass without a `Config` of its own gets one that inherits its parent's fields and builds
    the subclass.

    Raises:
        TypeError: at the definition of a class whose `Config` is not a `@dataclass(kw_only=True,
            slots=True)` derived from its parent's `Config`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Settings of the component; `build` makes one."""

        owner: ClassVar[type[Configurable]]

        def build(self, **runtime: Any) -> Any:
            """Return `Owner(config=copy of self, **runtime)`; raises ConfigError if an edited field
            is refused.
            """
            own = copy.deepcopy(self)  # First, as a `__post_init__` could change a list in place.
            # Of a component that a script builds alone nobody else judges the edited fields.
            check_fields(own)
            return self.owner(config=own, **runtime)  # type: ignore[call-arg]

        def with_class(self, cls: type[Configurable]) -> Any:
            """Return a config of another class with the values of this one's fields, which are not
            copied.

                config.trainer = config.trainer.with_class(MyTrainer)

            Raises ConfigError if the class does not have these fields.
            """
            values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
            missing = values.keys() - cls.Config.__dataclass_fields__.keys()
            if missing:
                raise ConfigError(
                    f"{cls.__qualname__} has no fields {', '.join(sorted(missing))}: must be a "
                    f"class whose Config has all of {type(self).__qualname__}"
                )
            return cls.Config(**values)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        config = cls.__dict__.get("Config")
        if config is None:
            # Its own class, since `owner` belongs to the class: the parent's builds the parent.
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
    # One Config in two classes would build the class that was defined last.
    if "owner" in own:
        raise TypeError(
            f"{name} already builds {config.owner.__qualname__}: derive a new Config from it"
        )
    # Without slots a misspelled field of an edited config would be a new attribute.
    is_decorated = "__dataclass_fields__" in own and "__slots__" in own
    for f in dataclasses.fields(config):
        is_decorated = is_decorated and (f.kw_only is True or not f.init)
    if not is_decorated:
        raise TypeError(f"{name} must be decorated with @dataclass(kw_only=True, slots=True)")


# Metadata of fields


def only_if(field: str, *values: Any) -> Mapping[str, Any]:
    """Return metadata of a field that has an effect only if `field` has one of the values."""
    return {EFFECT: ((field, values, True),)}


def unless(field: str, *values: Any) -> Mapping[str, Any]:
    """Return metadata of a field that has no effect if `field` has one of the values."""
    return {EFFECT: ((field, values, False),)}


def all_of(*metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return metadata of a field that has an effect only if all conditions hold."""
    conditions: tuple[Any, ...] = ()
    for part in metadata:
        conditions += part[EFFECT]
    return {EFFECT: conditions}


def refused(reason: str) -> Mapping[str, Any]:
    """Return metadata of a field that other trainers have and this project refuses, with the
    reason.
    """
    return {REFUSED: reason}


def check_refused(config: Any) -> None:
    """Raise ValueError for a field of `refused` that has another value than its default."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if REFUSED in f.metadata and value != f.default:
            raise ValueError(f"{f.name}={value!r}: must be {f.default!r}: {f.metadata[REFUSED]}")


def find_idle_options(config: Any, *, prefix: str = "") -> Iterator[str]:
    """Yield the paths of options without effect; a component without effect is yielded without its
    fields.
    """
    for entry in list_children(config, prefix=prefix):
        if not _is_effective(config, entry.name):
            yield entry.path
        elif entry.kind == "node":
            yield from find_idle_options(entry.value, prefix=f"{entry.path}.")


def _is_effective(config: Any, name: str) -> bool:
    """Return whether all conditions of a field hold; items of a sequence have none."""
    if isinstance(config, list | tuple):
        return True
    metadata = type(config).__dataclass_fields__[name].metadata
    for path, values, wanted in metadata.get(EFFECT, ()):
        if (_get_at(config, path) in values) != wanted:
            return False
    return True


def _get_at(config: Any, path: str) -> Any:
    """Return the value at a dotted path, or None if a component on the way is None."""
    value = config
    for name in path.split("."):
        if value is None:
            return None
        value = getattr(value, name)
    return value
