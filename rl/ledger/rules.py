"""Rules of a ledger: what has to hold in a step, each with the place at which it does not.

Shape legend: N turns of a step, T sampled tokens of all of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from losses.types import Loss
from rl.ledger.findings import WHOLE_STEP, Checked, Found, Rule
from rl.ledger.losses import compute_loss, knows_sum, load_loss
from rl.ledger.step import LedgerStep, Place
from rl.receipts import finish_digest, start_digest
from rl.rollouts.advantage import Advantage, compute_kl_penalty
from rl.rollouts.trained import REASONS, ROLE, TOO_LONG, TRAINED, TRUNCATED

LOSS_TOLERANCE = 1e-4
"""Largest difference of a loss, relative to the sum of its tokens' sizes: sums over micro-batches
are rounded in another order."""
SUM_TOLERANCE = 1e-6


# Rules, in the order in which a fault would show first


def check_versions(step: LedgerStep, checked: Checked) -> Iterator[Found]:
    """Each optimizer step makes the next version."""
    for number, minibatch in enumerate(step.facts["minibatches"]):
        version = minibatch["policy_version"]
        if checked.version is not None and version != checked.version + 1:
            yield Found(
                rule="versions",
                place=WHOLE_STEP,
                what=f"policy version after minibatch {number}",
                expected=checked.version + 1,
                found=version,
            )
        checked.version = version
    # The loop's own list, by which it takes the age of a token.
    for text, at in step.facts["steps_of_versions"].items():
        made = checked.made.get(int(text), at)
        if made != at:
            yield Found(
                rule="versions",
                place=WHOLE_STEP,
                what=f"step after which the weights were those of policy version {text}",
                expected=made,
                found=at,
            )
    if checked.version is not None:
        checked.made[checked.version] = step.number


def check_problems(step: LedgerStep, checked: Checked) -> Iterator[Found]:
    """Every problem is trained on or dropped for a reason, in the task's order."""
    told = [group["number"] for group in step.groups]
    told += [number for _, number in step.facts["dropped"]]
    numbers = set(told)
    had = {
        n for n in numbers if checked.known_above < n <= checked.highest
    } - checked.missing.keys()
    had |= {number for number, times in Counter(told).items() if times > 1}
    for number in sorted(had):
        yield Found(
            rule="problems",
            place=WHOLE_STEP,
            what=f"problem number {number}",
            expected="in one step, once",
            found="again",
        )
    # Ahead of training a group may finish after later ones, but not later than the bound.
    bound = step.settings["max_off_policy_steps"]
    most = bound + 1
    first = checked.highest + 1
    is_first = checked.highest < 0 and step.number > 1
    if is_first:
        # A ledger that begins in the middle does not know which ones the steps before have had.
        first = min(numbers)
        checked.unknown_until = step.number + most if bound else 0
    if step.number > checked.unknown_until:
        for number in range(first, max(numbers) + 1):
            checked.missing.setdefault(number, step.number)
    checked.highest = max(checked.highest, *numbers)
    if is_first or step.number <= checked.unknown_until:
        checked.known_above = checked.highest
    for number in numbers:
        checked.missing.pop(number, None)
    # A run that was resumed begins the outstanding problems again, or has lost them.
    outstanding = step.facts.get("outstanding")
    for number in () if outstanding is None else sorted(checked.missing.keys() - outstanding):
        yield Found(
            rule="problems",
            place=WHOLE_STEP,
            what=f"problem number {number}, which step {checked.missing[number]} has passed over",
            expected="in a step, or under way",
            found="in neither",
        )
    for number, passed in checked.missing.items():
        if step.number - passed > most:
            yield Found(
                rule="problems",
                place=WHOLE_STEP,
                what=f"problem number {number}, which step {passed} has passed over",
                expected=f"in a step up to {passed + most}",
                found="in none",
            )


def check_receipts(step: LedgerStep, checked: Checked) -> Iterator[Found]:
    """Every trained token was sampled, and is as it was sampled."""
    trained_N = np.zeros(step.num_turns, dtype=bool)
    trained_N[np.unique(step.turn_of_token[step.is_trained])] = True
    for n in np.flatnonzero(trained_N):
        request = step.turns["request"][n]
        # Made up, or by a generator that is none of the run's.
        if not request:
            yield Found(
                rule="receipt",
                place=step.place_turn(n),
                what="receipt of the generator",
                expected="one for each reply that is trained on",
                found="none",
            )
            continue
        yield from check_digest(step, int(n))
        # Hashes are a tenth of the texts, of which a long run has millions.
        name = hash(request)
        if name in checked.requests:
            yield Found(
                rule="once",
                place=step.place_turn(n),
                what=f"training on the reply of request {request}",
                expected="once",
                found="twice",
            )
        checked.requests.add(name)


def check_digest(step: LedgerStep, n: int) -> Iterator[Found]:
    """A turn's tokens, its context, logprobs and versions are those of its receipt."""
    # Of the whole context: a history that was rendered anew is another one.
    digest = finish_digest(
        start_digest(step.read_context(n)),
        step.of_turn(n, "token_ids"),
        step.of_turn(n, "logprobs"),
        step.of_turn(n, "versions"),
    )
    if digest != step.turns["receipt"][n]:
        yield Found(
            rule="receipt",
            place=step.place_turn(n),
            what="digest of what the generator has read and sampled, with logprobs and versions",
            expected=step.turns["receipt"][n].hex(),
            found=digest.hex(),
        )


def check_staleness(step: LedgerStep, checked: Checked) -> Iterator[Found]:
    """No trained token is older than the bound."""
    bound = step.settings["max_off_policy_steps"]
    steps = {int(version): at for version, at in step.facts["steps_of_versions"].items()}
    versions_T = step.tokens["versions"]
    for version in np.unique(versions_T[step.is_trained]).tolist():
        pushed = steps.get(version)
        age = math.inf if pushed is None else step.number - 1 - pushed
        if 0 <= age <= bound:
            continue
        # Of an unknown version the age is infinite.
        t = int(np.flatnonzero((versions_T == version) & step.is_trained)[0])
        what = f"age of policy version {version}, which has sampled it"
        yield Found(
            rule="staleness",
            place=step.place_token(t),
            what=what,
            expected=f"0 to {bound} steps",
            found="unknown" if pushed is None else f"{age} steps",
        )


def check_roles(step: LedgerStep, checked: Checked) -> Iterator[Found]:
    """Only branches of the roles of the settings are trained on."""
    roles = step.settings["trained_roles"]
    if roles is None:
        checked.note("a function of the task's chooses the branches that are trained on")
        return
    for n in np.flatnonzero(step.turns["trained"]):
        role = step.turns["role"][n]
        if role not in roles:
            yield Found(
                rule="role",
                place=step.place_turn(int(n)),
                what="role of the branch of a trained turn",
                expected=" or ".join(roles),
                found=role,
            )


def check_masks(step: LedgerStep, checked: Checked) -> Iterator[Found]:
    """The tokens that were to be trained on follow from roles and settings."""
    settings = step.settings
    expected_T = np.full(len(step.tokens["mask"]), TRAINED, dtype=np.int8)
    is_truncated_N = np.array(
        [
            step.groups[g]["members"][m]["truncated"]
            for g, m in zip(step.turns["group"], step.turns["member"], strict=True)
        ],
        dtype=bool,
    )
    if settings["mask_truncated_completions"]:
        expected_T[is_truncated_N[step.turn_of_token]] = TRUNCATED
    # A turn of no trained branch is masked for that, also where its rollout ran out of tokens.
    expected_T[~step.turns["trained"][step.turn_of_token]] = ROLE
    mask_T = step.tokens["mask"]
    differs_T = mask_T != expected_T
    if settings["max_sample_tokens"] is not None:
        # A sample above the limit is cut or left out.
        differs_T &= ~_find_too_long(step, limit=settings["max_sample_tokens"])
    for t in np.flatnonzero(differs_T):
        yield Found(
            rule="mask",
            place=step.place_token(t),
            what="the token's place in the training",
            expected=REASONS[expected_T[t]],
            found=REASONS[mask_T[t]],
        )


def _find_too_long(step: LedgerStep, *, limit: int) -> np.ndarray:
    """Return [T], True for tokens that are called too long, of samples that are."""
    is_called_T = step.tokens["mask"] == TOO_LONG
    names = [step.turns[name].tolist() for name in ("group", "member", "row")]
    samples = [*zip(*names, strict=True)]
    called = {samples[n] for n in np.unique(step.turn_of_token[is_called_T])}
    lengths: dict[tuple[int, ...], int] = {}
    for n, sample in enumerate(samples):
        if sample in called:
            # The last turn of a sample has read all others.
            length = len(step.read_context(n)) + int(step.starts[n + 1] - step.starts[n])
            lengths[sample] = max(length, lengths.get(sample, 0))
    is_long_N = np.array([lengths.get(sample, 0) > limit for sample in samples], dtype=bool)
    is_long_T: np.ndarray = is_called_T & is_long_N[step.turn_of_token]
    return is_long_T


def check_trained(step: LedgerStep, checked: Checked) -> Iterator[Found]:
    """The loss was applied to the tokens of the masks, with their advantages."""
    is_masked_T = step.tokens["mask"] == TRAINED
    for t in np.flatnonzero(is_masked_T != step.is_trained):
        words = ("not trained", "trained")
        yield Found(
            rule="trained",
            place=step.place_token(t),
            what="the token in the trainer's loss",
            expected=words[int(is_masked_T[t])],
            found=words[int(step.is_trained[t])],
        )
    # What was sent is known from the rollouts, what was read from the loss.
    sent_T, read_T = step.tokens["advantages"], step.tokens["trainer_advantages"]
    for t in np.flatnonzero(step.is_trained & (sent_T != read_T)):
        yield Found(
            rule="trained",
            place=step.place_token(t),
            what="advantage in the trainer's loss",
            expected=sent_T[t],
            found=read_T[t],
        )


def check_advantages(step: LedgerStep, checked: Checked) -> Iterator[Found]:
    """Advantages follow from the recorded rewards."""
    settings = step.settings
    advantage = Advantage(**settings["advantage"])
    kl = settings["kl_reward"]
    by_batch = advantage.baseline == "batch_mean" or advantage.scale == "batch_std"
    # Otherwise a rollout's reward stands at its last token, and its tokens need not be known.
    by_token = kl["coef"] != 0 or advantage.credit == "token"
    if by_token and by_batch and not step.is_whole:
        checked.note("advantages of a batch are not computed again: not all tokens are recorded")
        return
    turns_of: dict[tuple[int, int], list[int]] = {}
    for n in np.flatnonzero(step.turns["trained"]):
        turns_of.setdefault((int(step.turns["group"][n]), int(step.turns["member"][n])), []).append(
            int(n)
        )
    rewards_PG = []
    for p, group in enumerate(step.groups):
        rewards_G = []
        for g, member in enumerate(group["members"]):
            turns = turns_of.get((p, g), [])
            rewards_G.append(_compute_rewards(step, member, turns, by_token=by_token, kl=kl))
        rewards_PG.append(rewards_G)
    computed_PG = advantage(rewards_PG)
    for (p, g), turns in turns_of.items():
        recorded_C = np.concatenate([step.of_turn(n, "advantages") for n in turns])
        computed_C = computed_PG[p][g]
        # Bit for bit: the same numbers in the same order give the same float32.
        for c in np.flatnonzero(recorded_C != computed_C):
            yield Found(
                rule="advantage",
                place=_place_in_turns(step, turns, int(c)),
                what=f"advantage of a reward of {step.groups[p]['members'][g]['reward']:g}",
                expected=computed_C[c],
                found=recorded_C[c],
            )


def _compute_rewards(
    step: LedgerStep, member: dict[str, Any], turns: Sequence[int], *, by_token: bool, kl: Any
) -> np.ndarray:
    """Return [C] float64 rewards of a rollout's tokens, as `compute_token_rewards` does."""
    rewards_C = np.zeros(member["num_tokens"], dtype=np.float64)
    if not len(rewards_C):
        return rewards_C
    rewards_C[-1] = member["reward"] + member["overlong"]
    # Of a group whose tokens are not recorded there are no turns.
    if not (by_token and turns):
        return rewards_C
    if step.settings["advantage"]["credit"] == "token":
        end = -1
        for n in turns:
            end += int(step.starts[n + 1] - step.starts[n])
            rewards_C[end] += step.turns["reward"][n]
            rewards_C[-1] -= step.turns["reward"][n]
    if kl["coef"]:
        logprobs_C = np.concatenate([step.of_turn(n, "logprobs") for n in turns])
        reference_C = np.concatenate([step.of_turn(n, "reference_logprobs") for n in turns])
        rewards_C -= kl["coef"] * compute_kl_penalty(logprobs_C, reference_C, kl["estimator"])
    return rewards_C


def _place_in_turns(step: LedgerStep, turns: Sequence[int], c: int) -> Place:
    """Return the place of token `c` of the trained turns of a rollout."""
    for n in turns:
        num = int(step.starts[n + 1] - step.starts[n])
        if c < num:
            return step.place_token(int(step.starts[n]) + c)
        c -= num
    raise AssertionError("a token of the rollout")


def check_minibatches(step: LedgerStep, checked: Checked) -> Iterator[Found]:
    """Groups are divided into minibatches in their order."""
    # Parts of which no group is recorded are not known to be minibatches.
    if not step.is_whole:
        return
    width = step.settings["groups_per_batch"] // step.settings["num_minibatches"]
    numbers_N = step.turns["minibatch"]
    num, num_told = len(np.unique(numbers_N[numbers_N >= 0])), len(step.facts["minibatches"])
    if num != num_told:
        yield Found(
            rule="minibatch",
            place=WHOLE_STEP,
            what="number of minibatches of which the trainer says sums",
            expected=num,
            found=num_told,
        )
    parts_N = step.turns["group"] // width
    # Parts without a sample are no minibatches.
    expected_N = np.searchsorted(np.unique(parts_N[numbers_N >= 0]), parts_N)
    for n in np.flatnonzero((numbers_N >= 0) & (expected_N != numbers_N)):
        yield Found(
            rule="minibatch",
            place=step.place_turn(int(n)),
            what="minibatch",
            expected=int(expected_N[n]),
            found=int(numbers_N[n]),
        )


def check_sums(step: LedgerStep, checked: Checked) -> Iterator[Found]:
    """The trainer's sums are those of the recorded tokens."""
    if not step.is_whole:
        share = step.facts["share"]
        checked.note(f"tokens of {share:.0%} of the groups are recorded: sums are not proved")
        return
    for number, told in enumerate(step.facts["minibatches"]):
        # Of a Tinker client each call has its own loss.
        described = told.get("loss") or step.settings["loss"]
        loss = load_loss(described)
        if loss is None:
            checked.note(
                f"{described['class']} is not a loss of relay's: denominators are not computed "
                "again"
            )
        elif not knows_sum(loss):
            checked.note("the loss reads entropies or a reference: its sum is not computed again")
        for name, (computed, tolerance) in _compute_sums(step, loss, minibatch=number).items():
            # Not ">", so that NaN is a difference.
            if not abs(computed - told[name]) <= tolerance:
                yield Found(
                    rule="sums",
                    place=WHOLE_STEP,
                    what=f"{name} of minibatch {number}, as the trainer says",
                    expected=computed,
                    found=told[name],
                )


def _compute_sums(
    step: LedgerStep, loss: Loss | None, *, minibatch: int
) -> dict[str, tuple[float, float]]:
    """Return sums of a minibatch by name, each with the largest difference of an equal one."""
    is_of_N = step.turns["minibatch"] == minibatch
    is_of_T = is_of_N[step.turn_of_token] & step.is_trained
    advantages_T = step.tokens["trainer_advantages"][is_of_T].astype(np.float64)
    size = float(np.abs(advantages_T).sum())
    members = zip(step.turns["group"][is_of_N], step.turns["member"][is_of_N], strict=True)
    sums = {
        "num_tokens": (float(is_of_T.sum()), 0.0),
        "num_episodes": (float(len({*members})), 0.0),
        "advantage_sum": (float(advantages_T.sum()), SUM_TOLERANCE * size + 1e-12),
    }
    if loss is None:
        return sums
    output = compute_loss(loss, step, minibatch=minibatch)
    # Without a denominator the sum is not divided, and the trainer says 0.
    denominator = 0.0 if output.denominator is None else float(output.denominator)
    sums["denominator"] = (denominator, 0.0)
    if knows_sum(loss) and not step.facts["minibatches"][minibatch].get("has_ratio_mask"):
        loss_sum = float(output.loss_sum)
        sums["loss_sum"] = (loss_sum, LOSS_TOLERANCE * max(1.0, size, abs(loss_sum)))
    return sums


RULES: tuple[Rule, ...] = (
    check_versions,
    check_problems,
    check_receipts,
    check_staleness,
    check_roles,
    check_masks,
    check_advantages,
    check_trained,
    check_minibatches,
    check_sums,
)
# Not by importance: the first fault is the cause of those after it.
