"""Rules between the options of a config, as data.

    Rule(
        when={"loop.kl_reward.coef": above(0)},
        must={"trainer.reference.enable": True},
        because="the KL needs a reference policy",
    )

A rule applies where all conditions of `when` hold; then each option of `must` has to have its
value. The message of a broken rule follows from the rule: `trainer.reference.enable=False: must be
True with loop.kl_reward.coef=0.5, because the KL needs a reference policy`.

Options are dotted paths from the root of the config; `*` stands for each element of a list. An
option that a component lacks (the `kl_coef` of a loss of your own) meets no condition and breaks no
rule. The bounds of a single field are no rules: its `__post_init__` checks them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rl.config.tree import ConfigError, show_value

State = Literal["held", "broken", "not applying"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """What is right for an option, where a single value does not say it.

    `at_least(2)` compares with a number, `at_least("generator.max_model_len")` with another option.
    """

    text: str
    """The end of "must be", without the limit."""
    compare: Callable[[Any, Any], bool]
    """Function of the option's value and the limit."""
    limit: float | str | None = None
    """Number, or path of another option; None: `compare` ignores it."""

    @property
    def option(self) -> str | None:
        """Path of the option that takes part in the check."""
        return self.limit if isinstance(self.limit, str) else None

    def is_met(self, value: Any, config: Any) -> bool:
        """Return whether a value is right in a config."""
        return bool(self.compare(value, self._find_limit(config)))

    def describe(self, config: Any = None) -> str:
        """Return what is right; with a config, other options are shown with their values."""
        if self.limit is None:
            return self.text
        if self.option is None or config is None:
            return f"{self.text} {self.limit}"
        return f"{self.text} {self.option}={show_value(self._find_limit(config))}"

    def _find_limit(self, config: Any) -> Any:
        if self.option is None:
            return self.limit
        ((_, value),) = find_values(config, self.option)
        return value


def above(limit: float | str) -> Check:
    """Return a check that a value is above a number or another option; None passes."""
    return Check(text="above", compare=_skip_none(operator.gt), limit=limit)


def at_least(limit: float | str) -> Check:
    """Return a check that a value is at least a number or another option; None passes."""
    return Check(text="at least", compare=_skip_none(operator.ge), limit=limit)


def at_most(limit: float | str) -> Check:
    """Return a check that a value is at most a number or another option; None passes."""
    return Check(text="at most", compare=_skip_none(operator.le), limit=limit)


def below(limit: float | str) -> Check:
    """Return a check that a value is below a number or another option; None passes."""
    return Check(text="below", compare=_skip_none(operator.lt), limit=limit)


def same_as(option: str) -> Check:
    """Return a check that another option has the same value."""
    return Check(text="the same as", compare=operator.eq, limit=option)


def one_of(*values: Any) -> Check:
    """Return a check that a value is among these."""
    return satisfies(" or ".join(map(repr, values)), lambda value: value in values)


def none_of(*values: Any) -> Check:
    """Return a check that a value is not among these."""
    return satisfies(
        "other than " + " or ".join(map(repr, values)), lambda value: value not in values
    )


def satisfies(text: str, is_right: Callable[[Any], bool]) -> Check:
    """Return a check by a function of the value; `text` ends the sentence "must be ..."."""
    return Check(text=text, compare=lambda value, _: is_right(value))


def _skip_none(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    # None stands for no limit, or for a value that is chosen later, as in `check_bounds`.
    return lambda value, limit: value is None or compare(value, limit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One rule between options.

    Example:
        >>> rule = Rule(
        ...     when={"launch.share_gpus": True},
        ...     must={"loop.max_off_policy_steps": 0},
        ...     because="trainer and generators take turns",
        ... )
        >>> str(rule)
        'loop.max_off_policy_steps 0 with launch.share_gpus True'
    """

    when: Mapping[str, Any] = field(default_factory=dict)
    """Conditions: a value or a `Check` by option. Without any, the rule always applies."""
    must: Mapping[str, Any]
    """Right values: a value or a `Check` by option."""
    because: str
    """Reason, which ends the message of a broken rule."""

    @property
    def options(self) -> set[str]:
        """Paths of all options that take part in the rule."""
        options = {*self.when, *self.must}
        for expected in (*self.when.values(), *self.must.values()):
            if isinstance(expected, Check) and expected.option is not None:
                options.add(expected.option)
        return options

    @property
    def sections(self) -> set[str]:
        """Parts of the root config that take part in the rule."""
        return {option.partition(".")[0] for option in self.options}

    def is_applicable(self, config: Any) -> bool:
        """Return whether all conditions hold."""
        for option, expected in self.when.items():
            # Of a list, one element that meets the condition is enough.
            values = find_values(config, option)
            if not any(_is_condition_met(value, expected, config) for _, value in values):
                return False
        return True

    def find_faults(self, config: Any) -> Iterator[str]:
        """Yield a message for each option that breaks the rule."""
        if not self.is_applicable(config):
            return
        for option, expected in self.must.items():
            for path, value in find_values(config, option):
                if not _is_right(value, expected, config):
                    yield (
                        f"{path}={show_value(value)}: must be {_describe(expected, config)}"
                        f"{self._describe_conditions(config)}, because {self.because}"
                    )

    def judge(self, config: Any) -> State:
        """Return how a config stands to the rule."""
        if not self.is_applicable(config):
            return "not applying"
        return "broken" if any(self.find_faults(config)) else "held"

    def _describe_conditions(self, config: Any) -> str:
        # Values in place of the conditions: the user sees which of their options are meant.
        conditions = []
        for option in self.when:
            for path, value in find_values(config, option):
                conditions.append(f"{path}={show_value(value)}")
        return f" with {', '.join(conditions)}" if conditions else ""

    def __str__(self) -> str:
        """Return the rule in a line, without its reason."""
        line = _join(self.must)
        return f"{line} with {_join(self.when)}" if self.when else line


def find_faults(config: Any, rules: Sequence[Rule]) -> Iterator[str]:
    """Yield a message for each rule and option that a config breaks, in the order of the rules."""
    for rule in rules:
        yield from rule.find_faults(config)


def check_rules(config: Any, rules: Sequence[Rule]) -> None:
    """Raise ConfigError for the first rule that a config breaks."""
    for fault in find_faults(config, rules):
        raise ConfigError(fault)


def select_rules(rules: Sequence[Rule], *sections: str) -> tuple[Rule, ...]:
    """Return the rules that only these parts of a config take part in.

    A trainer without a run has no `loop`: `select_rules(RULES, "trainer")` are the rules for it.
    """
    return tuple(rule for rule in rules if rule.sections <= {*sections})


def find_values(config: Any, option: str) -> list[tuple[str, Any]]:
    """Return path and value of each option that a path stands for; none where there is none.

    Example:
        >>> find_values(config, "trainer.converters.*.rank")
        [('trainer.converters.0.rank', 8)]
    """
    places = [("", config)]
    for name in option.split("."):
        inner: list[tuple[str, Any]] = []
        for path, node in places:
            if name == "*":
                inner += [(_extend(path, number), item) for number, item in enumerate(node)]
            # A component that is None lacks it, and so may a loss of the user's own.
            elif hasattr(node, name):
                inner.append((_extend(path, name), getattr(node, name)))
        places = inner
    return places


def _extend(path: str, name: str | int) -> str:
    return f"{path}.{name}" if path else str(name)


def _is_condition_met(value: Any, expected: Any, config: Any) -> bool:
    # None passes a check, as no limit or a later choice, but it asks for nothing.
    if value is None and isinstance(expected, Check):
        return False
    return _is_right(value, expected, config)


def _is_right(value: Any, expected: Any, config: Any) -> bool:
    if isinstance(expected, Check):
        return expected.is_met(value, config)
    return bool(value == expected)


def _describe(expected: Any, config: Any = None) -> str:
    if isinstance(expected, Check):
        return expected.describe(config)
    return show_value(expected)


def _join(values: Mapping[str, Any]) -> str:
    return " and ".join(f"{option} {_describe(value)}" for option, value in values.items())
