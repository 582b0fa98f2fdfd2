"""Rules for runs that cannot learn, with their causes in order.

    wrong_template      raw text for a chat model
    replies_cut_off     replies reach the limit of tokens
    unparsed_replies    no answer is found in the replies
    never_right         no reply is right
    no_reward_variance  the replies of a group earn the same

Each cause leads to those below it, so only the first that holds is a finding. `find_no_update`
looks for a trainer that changes nothing although there is something to learn from.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from rl.reporting.data import RunData, find_last_turn
from rl.reporting.evidence import (
    Finding,
    RolloutEvidence,
    Series,
    make_series,
    pick_evenly,
    read_series,
    select_kind,
    show,
    show_rollout,
)

CORRECT, CUT_OFF, EQUAL = "reward/correct", "completion/cut_off", "reward/equal_groups"
UNPARSED, GRADIENT, RATE = "reward/num_unparsed", "loss/grad_norm", "loss/lr"
MIN_STEPS = 5
"""Steps that a cause must last."""
MANY_CUT_OFF = 0.9
"""Share of cut-off replies that leaves too few whole ones."""
MANY_UNPARSED = 0.5
"""Share of replies without an answer that counts as most of them."""
MIN_FALL = 0.1
"""Fall of the share of unparsed replies that shows a policy which is learning the form."""
MOSTLY_RIGHT = 0.5
"""Share of right replies from which on cut-off or unparsed replies do no harm."""
MIN_NEVER_RIGHT = 256
"""Replies of which not one is right."""
MIN_NEVER_RIGHT_STEPS = 3
MOSTLY_EQUAL = 0.5
"""Share of groups with equal rewards below which wrong replies teach something too."""
RARELY_RIGHT = 0.1
OFTEN_CUT_OFF = 0.5
"""Share of cut-off replies that, with few right ones, is suspicious of a chat model."""
SOLVED = 0.9
"""Share of correct replies that counts as solved."""
NO_VARIANCE = 0.9
"""Share of groups with equal rewards that leaves too little to learn from."""
NO_GRADIENT = 1e-10
"""Gradient norm that counts as 0."""


def find_no_signal(run: RunData) -> Finding | None:
    """Find the first cause, from the prompt to the rewards, for which nothing can be learned."""
    finding = find_cut_off(run) or find_unparsed(run) or find_never_right(run)
    if _has_raw_prompts(run):
        finding = finding or _find_rambling(run)
        if finding is not None:
            return _blame_template(run, finding)
    return finding or find_no_variance(run)


def is_solved(run: RunData) -> bool:
    """Return whether nearly all replies of the last steps are right."""
    correct = read_series(run.steps, CORRECT)
    return len(correct) > 0 and correct.last_level >= SOLVED


# Templates


def _has_raw_prompts(run: RunData) -> bool:
    """Return whether prompts are raw text although the model that the user gave has a template."""
    is_raw = run.get_setting("renderer.kind") == "raw"
    # A model that relay made itself has a template too, but was warmed up with this renderer.
    return is_raw and run.get_setting("hf_assets_path") is not None and run.has_chat_template


def _blame_template(run: RunData, finding: Finding) -> Finding:
    model = str(run.get_setting("hf_assets_path"))
    symptom = finding.sentence[0].lower() + finding.sentence[1:]
    return replace(
        finding,
        kind="wrong_template",
        title="A chat model is asked in raw text",
        sentence=(
            f"The prompts are raw text (renderer.kind=raw) although {model} has a chat template: "
            f"{symptom}"
        ),
        advice=(
            "`--renderer.kind template` asks the model as it was trained to be asked; for a base "
            "model that is right to read raw text, look at the replies below."
        ),
    )


def _find_rambling(run: RunData) -> Finding | None:
    """Find replies that are often cut off and rarely right, which is little for a chat model."""
    cut_off = read_series(run.steps, CUT_OFF)
    correct = read_series(run.steps, CORRECT)
    since = _find_since(cut_off, lambda share: share >= OFTEN_CUT_OFF)
    if since is None or len(correct) == 0:
        return None
    if correct.select_from(since).last_level >= RARELY_RIGHT:
        return None
    return _describe_cut_off(run, cut_off, since=since)


# Replies


def find_cut_off(run: RunData) -> Finding | None:
    """Find replies that nearly all end at the limit of tokens, and are seldom right."""
    cut_off = read_series(run.steps, CUT_OFF)
    since = _find_since(cut_off, lambda share: share >= MANY_CUT_OFF)
    if since is None or _are_mostly_right(run, since):
        return None
    return _describe_cut_off(run, cut_off, since=since)


def _describe_cut_off(run: RunData, cut_off: Series, *, since: int) -> Finding:
    correct = read_series(run.steps, CORRECT)
    right = correct.select_from(since)
    and_right = f", and {right.last_level:.0%} are right" if len(right) else ""
    limit = run.get_number("loop.sampling.max_tokens", 0)
    at_limit = f" at {limit:.0f} tokens" if limit else ""
    return Finding(
        kind="replies_cut_off",
        title="Replies are cut off",
        since_step=since,
        sentence=(
            f"Since step {since} {cut_off.select_from(since).last_level:.0%} of the replies are "
            f"cut off{at_limit}, before they end{and_right}."
        ),
        advice=_advise_more_tokens(run),
        evidence=show(
            cut_off,
            correct,
            read_series(run.steps, "completion/tokens_mean"),
            rollouts=_show_replies(run, since, is_shown=_is_cut_off, note="cut off"),
        ),
    )


def _advise_more_tokens(run: RunData) -> str:
    limit = run.get_number("loop.sampling.max_tokens", 0)
    value = f" {2 * limit:.0f}" if limit else ""
    return (
        f"`--loop.sampling.max_tokens{value}` (generator.max_model_len must have room for prompt "
        "and reply), or a prompt that asks for short replies."
    )


def find_unparsed(run: RunData) -> Finding | None:
    """Find replies in which the reward mostly finds no answer, and which do not get better."""
    shares = _measure_unparsed(run)
    since = _find_since(shares, lambda share: share >= MANY_UNPARSED)
    if since is None or _are_mostly_right(run, since):
        return None
    part = shares.select_from(since)
    if part.last_level <= part.first_level - MIN_FALL:
        return None

    lines = [line for line in _select_replies(run, since) if line.get("unparsed")]
    cut_off = sum(_is_cut_off(line) for line in lines)
    # With no end there is no answer at the end.
    is_for_length = len(lines) > 0 and cut_off >= 0.5 * len(lines)
    because = f"; {cut_off} of {len(lines)} recorded ones are cut off" if is_for_length else ""
    return Finding(
        kind="unparsed_replies",
        title="No answer is found in most replies",
        since_step=since,
        sentence=(
            f"Since step {since} {_name_functions(lines)} no answer in {part.last_level:.0%} of "
            f"the replies, in the place where it is looked for{because}."
        ),
        advice=_advise_more_tokens(run) if is_for_length else _advise_place(run),
        evidence=show(
            shares,
            read_series(run.steps, CORRECT),
            read_series(run.steps, CUT_OFF),
            rollouts=_show_replies(
                run, since, is_shown=lambda line: bool(line.get("unparsed")), note="no answer found"
            ),
        ),
    )


def _measure_unparsed(run: RunData) -> Series:
    """Return by step the share of replies in which a function found no answer."""
    shares = {}
    for record in run.steps:
        num_replies = _count_replies(run, record)
        if num_replies and math.isfinite(record.get(UNPARSED, math.nan)):
            shares[int(record["step"])] = min(1.0, record[UNPARSED] / num_replies)
    return make_series("share of replies without an answer", shares)


def _name_functions(lines: Sequence[dict[str, Any]]) -> str:
    """Return the subject of a sentence: the reward functions that found no answer."""
    names: Counter[str] = Counter()
    for line in lines:
        names.update(map(str, line["unparsed"]))
    if not names:
        return "the reward finds"
    return f"reward {names.most_common(1)[0][0]!r} finds"


def _advise_place(run: RunData) -> str:
    ask = "ask in the prompt for the form that the reward reads"
    if run.get_setting("task.system") is not None:
        ask += ", with `--task.system`"
    place = run.get_setting("task.answer_in")
    if place is None:
        return f"Read the replies below: {ask}, or let the reward read the form that they have."
    return (
        f"Read the replies below: {ask}, or look where the answers are, with `--task.answer_in` "
        f"(now {place})."
    )


def find_never_right(run: RunData) -> Finding | None:
    """Find a run without a single right reply whose rewards hardly differ either."""
    num_replies, steps = 0.0, []
    for record in run.steps:
        correct = record.get(CORRECT)
        if correct is None:
            continue
        if correct != 0.0:
            return None
        steps.append(int(record["step"]))
        num_replies += _count_replies(run, record)
    if num_replies < MIN_NEVER_RIGHT or len(steps) < MIN_NEVER_RIGHT_STEPS:
        return None

    equal = read_series(run.steps, EQUAL)
    spread = read_series(run.steps, "reward/std")
    # Rewards that differ teach something, and a reward may never be as large as a right answer's.
    if len(equal):
        same = median(equal.values)
        if same < MOSTLY_EQUAL:
            return None
        rewards = f"{same:.0%} of the groups have equal rewards"
    elif len(spread) and max(spread.values) <= 1e-9:
        rewards = "all earn the same"
    else:
        return None
    since = steps[0]
    size = run.get_number("loop.group_size", 0)
    more = f" {2 * size:.0f}" if size else ""
    return Finding(
        kind="never_right",
        title="No reply is ever right",
        since_step=since,
        sentence=(
            f"Since step {since} none of {num_replies:,.0f} replies is right, and {rewards}: there "
            "is nothing to learn from."
        ),
        advice=(
            "Read the replies below. If one is right, the reward misses it; otherwise the problems "
            "are too hard: take easier ones (docs/tasks.md, by pass rate), a warm-up, or more "
            f"samples of each with `--loop.group_size{more}`."
        ),
        evidence=show(
            read_series(run.steps, CORRECT),
            read_series(run.steps, "reward/mean"),
            equal,
            rollouts=_show_replies(run, since, is_shown=lambda line: True, note="not right"),
        ),
    )


# Rewards


def find_no_variance(run: RunData) -> Finding | None:
    """Find a run in which nearly all groups have equal rewards although the task is not solved."""
    equal = read_series(run.steps, EQUAL)
    # A few steps at the end may be chance, and a solved task has equal rewards by nature.
    since = _find_since(equal, lambda share: share >= NO_VARIANCE)
    if since is None or is_solved(run):
        return None
    correct = read_series(run.steps, CORRECT)
    return Finding(
        kind="no_reward_variance",
        title="Groups have equal rewards",
        since_step=since,
        sentence=(
            f"Since step {since} all replies of a group earn the same in "
            f"{equal.select_from(since).last_level:.0%} of the groups: their advantages are 0, and "
            "they teach nothing."
        ),
        advice=(
            "Problems of another difficulty (docs/tasks.md, by pass rate), "
            "`--loop.drop_zero_advantage_groups True`, more samples of a prompt "
            "(`--loop.group_size`), or a reward with more levels between wrong and right."
        ),
        evidence=show(
            equal,
            read_series(run.steps, "reward/mean"),
            correct,
            rollouts=show_last_group(run, since),
        ),
    )


def show_last_group(run: RunData, since: int) -> list[RolloutEvidence]:
    """Return up to three replies to the problem that was recorded last."""
    lines = _select_replies(run, since)
    group = []
    for line in lines:
        last = lines[-1]
        if (line["step"], line.get("problem")) == (last["step"], last.get("problem")):
            group.append(show_rollout(line, note=f"reward {line.get('reward')}"))
    return group[:3]


# Updates


def find_no_update(run: RunData) -> Finding | None:
    """Find a learning rate of 0, or a gradient of 0 although rewards differ."""
    return _find_zero_rate(run) or _find_zero_gradient(run)


def _find_zero_rate(run: RunData) -> Finding | None:
    rates = read_series(run.steps, RATE)
    since = _find_since(rates, lambda rate: rate <= 0.0)
    if since is None:
        return None
    if run.get_number("trainer.optimizer.lr", 0.0) > 0:
        advice = (
            "The schedule has ended: `--trainer.lr_scheduler.total_steps` must be the optimizer "
            "steps of the whole run, or `--trainer.lr_scheduler.min_ratio` above 0."
        )
    else:
        advice = (
            "`--trainer.optimizer.lr`, such as 1e-6 for a model of billions of parameters and 2e-5 "
            "for one of millions."
        )
    return Finding(
        kind="nothing_learned",
        title="The learning rate is 0",
        since_step=since,
        sentence=(
            f"Since step {since} the learning rate is 0, in {len(rates.select_from(since))} steps: "
            "no update changes the weights."
        ),
        advice=advice,
        evidence=show(rates, read_series(run.steps, GRADIENT)),
    )


def _find_zero_gradient(run: RunData) -> Finding | None:
    norm_of_step = {}
    for record in run.steps:
        norm = record.get(GRADIENT, math.nan)
        # Equal rewards have no gradient by nature.
        if math.isfinite(norm) and _have_unequal_rewards(record):
            norm_of_step[int(record["step"])] = norm
    norms = make_series(f"{GRADIENT} where rewards differ", norm_of_step)
    since = _find_since(norms, lambda norm: norm <= NO_GRADIENT)
    if since is None:
        return None
    if run.get_setting("loop.mask_truncated_completions") and find_cut_off(run) is not None:
        return None  # The replies are masked because they are cut off.
    spread = read_series(run.steps, "reward/std")
    deviation = f" by {spread.select_from(since).last_level:.2g}" if len(spread) else ""
    return Finding(
        kind="nothing_learned",
        title="The gradient is 0",
        since_step=since,
        sentence=(
            f"Since step {since} the gradient is 0, in {len(norms.select_from(since))} steps whose "
            f"rewards differ{deviation}: no update changes the weights."
        ),
        advice=(
            "Look at the tokens of the replies below. With a mask of 1 and an advantage other than "
            "0, the loss (`--trainer.loss`) passes no gradient on; with a mask of 0, "
            "`--loop.mask_truncated_completions False` trains on replies that were cut off."
        ),
        evidence=show(
            norms,
            spread,
            read_series(run.steps, "samples/masked"),
            rollouts=show_last_group(run, since),
        ),
    )


def _have_unequal_rewards(record: Mapping[str, float]) -> bool:
    if EQUAL in record:
        return record[EQUAL] < 1.0
    return record.get("reward/std", 0.0) > 1e-9


# Parts of the rules


def _find_since(series: Series, is_bad: Callable[[float], bool]) -> int | None:
    """Return the first step of at least `MIN_STEPS` from which values are bad up to the end."""
    since = series.find_lasting(is_bad, hold=MIN_STEPS)
    if since is None or len(series.select_from(since)) < MIN_STEPS:
        return None
    return since


def _are_mostly_right(run: RunData, since: int) -> bool:
    correct = read_series(run.steps, CORRECT).select_from(since)
    return len(correct) > 0 and correct.last_level >= MOSTLY_RIGHT


def _count_replies(run: RunData, record: Mapping[str, float]) -> float:
    """Return the replies of a step, those of dropped groups included; 0 if they are unknown."""
    num_groups = run.get_number("loop.groups_per_batch", 0)
    size = run.get_number("loop.group_size", 0)
    if not num_groups * size:
        # The samples that were trained on, of a run whose config cannot be read.
        return round(record.get("perf/samples_per_s", 0.0) * record.get("time/step_s", 0.0))
    for reason in ("equal", "oversize"):
        num_groups += record.get(f"groups/dropped_{reason}", 0.0)
    return num_groups * size


def _select_replies(run: RunData, since: int) -> list[dict[str, Any]]:
    lines = select_kind(run.rollouts, "train", "dropped")
    return [line for line in lines if line["step"] >= since]


def _is_cut_off(line: Mapping[str, Any]) -> bool:
    turn = find_last_turn(line)
    return turn is not None and turn.get("finish_reason") == "length"


def _show_replies(
    run: RunData, since: int, *, is_shown: Callable[[dict[str, Any]], bool], note: str
) -> list[RolloutEvidence]:
    """Return three of the replies since a step, evenly spaced."""
    lines = [line for line in _select_replies(run, since) if is_shown(line)]
    examples = []
    for line in pick_evenly(lines, 3):
        answer = str(line.get("answer") or "")[:40]
        told = f"{note}; the answer is {answer!r}" if answer else note
        examples.append(show_rollout(line, note=told))
    return examples
