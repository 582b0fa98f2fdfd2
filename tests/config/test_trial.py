from dataclasses import dataclass, field
from typing import Literal

from rl.config.tree import walk
from rl.config.trial import fixed_options


@dataclass(kw_only=True)
class Part:
    off: bool = False
    steps: int = 0
    rate: float = 1.0
    kind: Literal["a", "b"] = "a"
    depth: int = 3
    folder: str | None = None

    def __post_init__(self):
        if self.off:
            raise ValueError("off=True: must be False, as nothing can do it")
        if self.depth != 3 and self.kind == "a":
            raise ValueError(f"depth={self.depth} has no effect with kind='a': must be 3, or kind 'b'")
        if self.steps % 2:
            raise ValueError(f"steps={self.steps}: must be even")
        if self.folder is not None and not self.folder.startswith("/"):
            raise ValueError(f"folder={self.folder!r}: must be an absolute path")


@dataclass(kw_only=True)
class Whole:
    part: Part = field(default_factory=Part)
    parts: tuple[Part, ...] = ()
    dataset: str | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self):
        if self.dataset is not None:
            raise ValueError(f"dataset={self.dataset!r}: must be None: there is none")
        if any(not name.startswith("-") for name in self.names):
            raise ValueError(f"names={self.names}: each must start with -")


def fixed(config, **settings):
    return {found.path: (found.tried, found.why) for found in fixed_options(config, **settings)}


def test_options_whose_every_other_value_is_refused_are_found_with_the_reason():
    assert fixed(Whole()) == {
        "part.off": (True, "must be False, as nothing can do it"),
        "part.depth": (4, "has no effect with kind='a': must be 3, or kind 'b'"),
        "dataset": ("x", "must be None: there is none"),
    }


def test_a_field_of_which_some_value_is_taken_is_none_of_them():
    assert "part.depth" not in fixed(Whole(part=Part(kind="b")))
    # Odd numbers and relative paths are refused, others are not.
    assert not {"part.steps", "part.folder", "names"} & fixed(Whole()).keys()


def test_components_in_a_list_are_tried_too():
    assert fixed(Whole(parts=(Part(kind="b"),)))["parts.0.off"][0] is True


def test_the_config_that_is_tried_stays_as_it_was():
    config = Whole(parts=(Part(),))
    before = [(entry.path, entry.value) for entry in walk(config)]
    fixed(config)
    assert [(entry.path, entry.value) for entry in walk(config)] == before


def check(config):
    """Of fields of two components."""
    found = []
    if config.part.kind == "b" and config.dataset is None:
        found.append("part.kind='b': must be 'a' without a dataset")
    if config.part.rate != 1.0:
        found.append(f"part.rate={config.part.rate}: must be 1, as nothing else is known")
    if config.part.steps > 100:
        found.append(f"part.steps={config.part.steps}: must be at most 100")
    if config.names:
        found.append("names: must not be there")
    return found


def test_a_check_of_the_whole_says_what_is_refused_beside_the_other_components():
    found = fixed(Whole(), check=check)
    assert found["part.kind"] == ("b", "must be 'a' without a dataset")
    assert found["part.rate"] == (0.5, "must be 1, as nothing else is known")
    # Not every number was tried, and the message does not say that there is one alone.
    assert "part.steps" not in found
    assert "names" not in found


def test_what_the_whole_is_refused_for_already_is_no_reason():
    config = Whole(part=Part(steps=102))
    assert check(config) == ["part.steps=102: must be at most 100"]
    assert "part.steps" not in fixed(config, check=check)
