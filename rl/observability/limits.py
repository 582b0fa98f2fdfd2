"""What holds a run up, and which setting would move it, read off a step's record or the typical one of a run.

found = bottleneck(typical(records), config)
print(found.sentence, found.setting)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NUM_FIRST = 2
"""Steps at the beginning that allocate, compile and fill what is under way; left out where there are more."""
OVERLAP = 0.2
"""Share of a step that both sides must take before it is worth to let them overlap."""
NEAR = 0.5
"""Share of the machine's limit from which on there is more to win by more of the machine."""
LARGE = 0.2
"""Share of padding, of room that is not used, that is worth a setting."""

Config = Mapping[str, Any]
"""The values of a run's config.json."""

_PARTS = {
    "generate": ("time/generate_s", "generation", "limit/decode"),
    "score": ("time/score_s", "scoring", None),
    "train": ("time/train_s", "training", "limit/train"),
    "publish": ("time/publish_s", "the sync of the weights", "limit/sync"),
}
"""Parts of a step: how long the loop waits for each, its name, and the share of the limit that it reaches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bottleneck:
    """What a step waits for most."""

    sentence: str
    """With numbers, for people."""
    setting: str
    """The option that would move it, as on the command line: with a value where one is known."""


@dataclass(frozen=True, slots=True)
class _Advice:
    because: str
    setting: str


def typical(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each number over the steps of a run, without its first ones; evaluations are no steps."""
    steps = [record for record in records if "time/step_s" in record]
    steps = steps[NUM_FIRST:] if len(steps) > 2 * NUM_FIRST else steps
    names = {name for record in steps for name in record}
    values = {name: [r[name] for r in steps if _is_finite(r.get(name))] for name in names}
    return {name: statistics.median(of_name) for name, of_name in values.items() if of_name}


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def bottleneck(record: Mapping[str, float], config: Config | None = None) -> Bottleneck | None:
    """What takes most of a step, and what to set; None for a record that does not say.

    Args:
        record: of a step, or `typical` of several.
        config: `values` of the run's config.json; without it settings are named that it may have already.
    """
    step_s = record.get("time/step_s", math.nan)
    shares = {
        part: record[name] / step_s for part, (name, _, _) in _PARTS.items() if name in record and step_s > 0
    }
    if not shares:
        return None
    of = _Settings(config or {})
    if (turns := _turns(record, shares, of)) is not None:
        return turns
    part = max(shares, key=lambda name: shares[name])
    _, name, limit = _PARTS[part]
    reached = record.get(limit) if limit is not None else None
    share = f"{name} takes {_percent(shares[part])} of a step"
    reaches = "" if reached is None else f" and reaches {_percent(reached)} of what the machine can do"
    advise = {"generate": _generation, "score": _scoring, "train": _training, "publish": _sync}[part]
    advice = advise(record, reached, of)
    sentence = f"{share}{reaches}: {advice.because}"
    return Bottleneck(sentence=sentence[0].upper() + sentence[1:], setting=advice.setting)


def _turns(record: Mapping[str, float], shares: Mapping[str, float], of: _Settings) -> Bottleneck | None:
    """Where generation and training take turns that could overlap."""
    ahead = of.number("loop.max_policy_age", record.get("age/max", 0.0))
    generating = shares.get("generate", 0.0) + shares.get("score", 0.0)
    training = shares.get("train", 0.0) + shares.get("publish", 0.0)
    if ahead or not of.can_overlap or min(generating, training) < OVERLAP:
        return None
    idle = record.get("limit/idle")
    told = "" if idle is None else f", and devices are idle for {_percent(idle)} of it"
    return Bottleneck(
        sentence=(
            f"Generation ({_percent(generating)} of a step) and training ({_percent(training)}) take "
            f"turns{told}: {of.overlap.because}"
        ),
        setting=of.overlap.setting,
    )


def _generation(record: Mapping[str, float], reached: float | None, of: _Settings) -> _Advice:
    if reached is not None and reached >= NEAR:
        # Whose bits are to be the trainer's has its dtype.
        if of.given("generator.dtype") == "float32" and not of.given("batch_invariant"):
            return _Advice("half the bytes would be read in half the time", "--generator.dtype bfloat16")
        return _more_generators(of, "more of it needs more generators")
    requests = of.number("loop.num_prompts") * of.number("loop.num_samples")
    running = of.number("generator.max_num_seqs") * max(1.0, of.number("generator.num_replicas"))
    if requests > running > 0:
        return _Advice(
            f"of a step's {requests:.0f} completions {running:.0f} are drawn at once, and more at once cost "
            "little more",
            f"--generator.max_num_seqs {math.ceil(requests / max(1.0, of.number('generator.num_replicas')))}",
        )
    if of.on_gpu and of.given("generator.enforce_eager"):
        return _Advice("without CUDA graphs small steps wait for Python", "--generator.enforce_eager False")
    longest, mean = record.get("completion/tokens_max", 0.0), record.get("completion/tokens_mean", math.inf)
    ahead = of.number("loop.max_policy_age", record.get("age/max", 0.0))
    if longest >= 2 * mean and of.can_overlap and not ahead:
        return _Advice(
            f"the longest completion has {longest:.0f} tokens where the mean is {mean:.0f}, and a step "
            "waits for it",
            of.overlap.setting,
        )
    if reached is None:
        return _more_generators(of, "more at a time needs more generators")
    return _Advice(
        "steps of decoding are too small to use it, as they draw a token for few completions",
        "--loop.num_prompts",
    )


def _more_generators(of: _Settings, because: str) -> _Advice:
    num = of.number("generator.num_replicas")
    return _Advice(because, f"--generator.num_replicas{f' {num + 1:.0f}' if num else ''}")


def _scoring(record: Mapping[str, float], reached: float | None, of: _Settings) -> _Advice:
    num = of.number("reward.num_procs")
    return _Advice(
        "reward functions are slower than what is to be scored; more processes score side by side",
        f"--reward.num_procs{f' {2 * num:.0f}' if num else ''}",
    )


def _training(record: Mapping[str, float], reached: float | None, of: _Settings) -> _Advice:
    num_micro_batches = record.get("packing/num_micro_batches", 1.0)
    unused = 1.0 - record.get("packing/fill", 1.0)
    if num_micro_batches > 1 and (unused >= LARGE or (reached or 0.0) < NEAR):
        return _Advice(
            f"its {num_micro_batches:.0f} micro-batches are {_percent(1 - unused)} full, and fewer larger "
            "ones use it better, as far as memory goes",
            _doubled(of, "trainer.training.max_tokens_per_microbatch"),
        )
    if of.on_gpu and of.given("trainer.training.param_dtype") == "float32":
        return _Advice(
            "products are several times as fast in bfloat16", "--trainer.training.param_dtype bfloat16"
        )
    if of.given("trainer.activation_checkpoint.mode") not in (None, "none"):
        return _Advice(
            "activations are computed twice, to save memory", "--trainer.activation_checkpoint.mode none"
        )
    if of.on_gpu and of.given("trainer.compile.enable") is False:
        return _Advice("compiled blocks do more in fewer kernels", "--trainer.compile.enable True")
    if reached is not None and reached >= NEAR:
        return _Advice("more of it needs more ranks", _doubled(of, "trainer.num_procs"))
    return _Advice(
        "its products are small for the machine, and a larger batch for each step uses it better",
        "--loop.num_prompts",
    )


def _sync(record: Mapping[str, float], reached: float | None, of: _Settings) -> _Advice:
    age = of.number("loop.max_policy_age", record.get("age/max", 0.0))
    if not age and of.can_overlap:
        return _Advice(
            "with generation a step ahead weights travel behind the next gradient", of.overlap.setting
        )
    every = max(1.0, of.number("loop.publish_every"))
    if age >= every:
        return _Advice(
            "the bound on the age of a token allows fewer publishes", f"--loop.publish_every {every + 1:.0f}"
        )
    return _Advice("more threads copy more at once", _doubled(of, "weights.num_threads"))


def _doubled(of: _Settings, path: str) -> str:
    value = of.number(path)
    return f"--{path} {2 * value:.0f}" if value else f"--{path}"


@dataclass(frozen=True, slots=True)
class _Settings:
    """A config, asked by path; of what it does not have, None or 0."""

    values: Config

    def given(self, path: str) -> Any:
        node: Any = self.values
        for name in path.split("."):
            if not isinstance(node, Mapping) or name not in node:
                return None
            node = node[name]
        return node

    def number(self, path: str, otherwise: float = 0.0) -> float:
        value = self.given(path)
        return float(value) if isinstance(value, int | float) else otherwise

    @property
    def can_overlap(self) -> bool:
        """Whether generation and training can go on at once: not on devices that they share."""
        return not self.given("launch.share_gpus")

    @property
    def overlap(self) -> _Advice:
        """How they go on at once. On the cores of one CPU each gets half its threads: with all of them
        twice, threads wait for each other, and steps of `tiny` took several times as long as by turns."""
        ahead = "--loop.max_policy_age 1"
        threads = {role: self.number(f"{role}.num_threads") for role in ("trainer", "generator")}
        halves = "".join(f" --{role}.num_threads {n // 2:.0f}" for role, n in threads.items() if n >= 2)
        if self.on_gpu or not halves:
            return _Advice("at the same time, a step would take as long as the longer of the two", ahead)
        return _Advice(
            "at the same time, each with half its threads, they use the cores better", ahead + halves
        )

    @property
    def on_gpu(self) -> bool:
        """As far as settings say: a run on a CPU has no reason for half precision in the generator."""
        return self.given("generator.dtype") in ("bfloat16", "float16")


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.01 else f"{100 * share:.1f}%"
