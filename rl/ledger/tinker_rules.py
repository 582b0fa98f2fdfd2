"""Rules of the ledger of a model that a Tinker client trains.

The client computes rewards, masks and advantages, so that there is no rule for these. What the
client may do, such as train on text of its own, is counted; what the server must not do is a
violation.

Shape legend: N spans of a step, T tokens of all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from rl.ledger.files import GIVEN, list_files
from rl.ledger.findings import WHOLE_STEP, Checked, Found, Rule, Violation
from rl.ledger.rules import check_digest, check_sums, check_trained
from rl.ledger.step import LedgerStep
from rl.observability.run_folder import LEDGER

ROLES = ("sampled", "edited", "given")
TWICE, OTHER_LOGPROBS = "trained again", "other logprobs"
OTHER_WEIGHTS, OLDEST = "other weights", "oldest"
CLIENTS = "rewards, masks and advantages, which the client has computed"


def check_steps(step: LedgerStep, checked: Checked) -> Iterator[Found]:
    """Each optimizer step makes the next version."""
    version = step.facts["optim_step"]["policy_version"]
    if checked.version is not None and version != checked.version + 1:
        yield Found(
            rule="versions",
            place=WHOLE_STEP,
            what="policy version after the step",
            expected=checked.version + 1,
            found=version,
        )
    checked.version = version


def check_calls(step: LedgerStep, checked: Checked) -> Iterator[Found]:
    """Each forward_backward is in one step, in the order of the seq ids, and only once."""
    calls = [call["seq_id"] for call in step.facts["minibatches"]]
    if step.facts["unrecorded"]:
        checked.note("calls for which there was no room until their optimizer step")
        calls = sorted([*calls, *step.facts["unrecorded"]])
    numbers = [checked.highest, *calls, step.facts["optim_step"]["seq_id"]]
    for before, number in pairwise(numbers):
        if number <= before:
            yield Found(
                rule="once",
                place=WHOLE_STEP,
                what=f"seq id of the call after that with {before}",
                expected=f"above {before}",
                found=number,
            )
    checked.highest = numbers[-1]
    for number in step.facts["dropped"]:
        if number in calls:
            yield Found(
                rule="once",
                place=WHOLE_STEP,
                what=f"gradient of forward_backward {number}",
                expected="dropped",
                found="part of the step",
            )


def check_loads(step: LedgerStep, checked: Checked) -> Iterator[Found]:
    """The ledger of the training that loaded weights come from has the step that they are of."""
    for load in step.facts["loads"]:
        path, mark = load["path"], load["mark"]
        if mark is None:
            checked.note(f"what was trained before {path}, which was saved without a ledger")
            continue
        if not mark["step"]:
            continue
        kept = list_files(checked.run.parent / name_folder(mark["model_id"]) / LEDGER)
        if not kept or kept[0].step > mark["step"]:
            checked.note(f"what was trained before {path}: the ledger of its run is not there")
        elif all(file.digest != mark["digest"] for file in kept):
            yield Found(
                rule="chain",
                place=WHOLE_STEP,
                what=f"digest of step {mark['step']} in the ledger of {path}",
                expected=mark["digest"],
                found="none with it",
            )
        else:
            checked.origins.append(f"goes on after step {mark['step']} of {mark['model_id']}")


def check_saved(run: Path, checked: Checked) -> Violation | None:
    """Return the violation of a ledger without a step after which a checkpoint was saved."""
    digests = {file.digest for file in list_files(run / LEDGER)}
    for record in sorted(run.glob("*weights/*.json")):
        try:
            mark = json.loads(record.read_bytes())["ledger"]
            folder, step, digest = name_folder(mark["model_id"]), mark["step"], mark["digest"]
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            # Saved without a ledger, or no record.
            continue
        if folder == run.resolve().name and step >= checked.first and digest not in digests:
            return Violation(
                step=step,
                rule="order",
                where="",
                what=f"file of the step after which {record.parent.name}/{record.stem} was saved",
                expected=digest,
                found="none with this digest",
            )
    return None


def name_folder(model_id: str) -> str:
    """Return the name of the folder of a training run (`rl.tinker.service.storage`)."""
    return model_id.replace(":", ".").replace("/", ".")


def check_spans(step: LedgerStep, checked: Checked) -> Iterator[Found]:
    """Every token that is called sampled was sampled, and is as it was sampled."""
    checked.note(CLIENTS)
    num_N = np.bincount(step.turn_of_token[step.is_trained], minlength=step.num_turns)
    for n, role in enumerate(step.turns["role"]):
        if role not in ROLES:
            yield Found(
                rule="role",
                place=step.place_turn(n),
                what="origin of a span",
                expected=" or ".join(ROLES),
                found=role,
            )
        checked.counts[role] += int(num_N[n])
        request = step.turns["request"][n]
        if role != "sampled":
            if request:
                yield Found(
                    rule="receipt",
                    place=step.place_turn(n),
                    what=f"receipt of a span that is called {role}",
                    expected="none",
                    found=request,
                )
            continue
        yield from check_digest(step, n)
        # A client may train on a sample twice; that the server has done so shows in `check_calls`.
        name = hash(request)
        if name in checked.requests:
            checked.counts[TWICE] += int(num_N[n])
        checked.requests.add(name)


def count_other_logprobs(step: LedgerStep, checked: Checked) -> Iterator[Found]:
    """Count trained tokens of which the client has given other logprobs than were sampled."""
    if GIVEN in step.tokens:
        given_T = step.tokens[GIVEN]
        differs_T = (given_T != step.tokens["logprobs"]) & ~np.isnan(given_T) & step.is_trained
        checked.counts[OTHER_LOGPROBS] += int(differs_T.sum())
        if differs_T.any() and not checked.first_other:
            place = step.place_token(int(np.flatnonzero(differs_T)[0]))
            checked.first_other = f"step {step.number}, {step.describe(place)}"
    yield from ()


def check_ages(step: LedgerStep, checked: Checked) -> Iterator[Found]:
    """No token was sampled with weights that did not exist yet; how old they were is counted."""
    steps = {int(version): at for version, at in step.facts["steps_of_versions"].items()}
    versions_T = step.tokens["versions"]
    is_sampled_T = np.array([role == "sampled" for role in step.turns["role"]], dtype=bool)[
        step.turn_of_token
    ]
    for version in np.unique(versions_T[is_sampled_T & step.is_trained]).tolist():
        is_of_T = (versions_T == version) & is_sampled_T & step.is_trained
        pushed = steps.get(version)
        if pushed is None:
            checked.counts[OTHER_WEIGHTS] += int(is_of_T.sum())
            continue
        age = step.number - 1 - pushed
        checked.counts[OLDEST] = max(checked.counts[OLDEST], age)
        if age < 0:
            yield Found(
                rule="staleness",
                place=step.place_token(int(np.flatnonzero(is_of_T)[0])),
                what=f"step after which the weights that have sampled it were those of version "
                f"{version}",
                expected=f"at most {step.number - 1}",
                found=pushed,
            )


def check_recorded(step: LedgerStep, checked: Checked) -> Iterator[Found]:
    """The trainer's sums are those of the recorded tokens."""
    for call in step.facts["minibatches"]:
        if call["has_ratio_mask"]:
            checked.note("losses with a sequence_ratio_mask, which is not recorded")
    yield from check_sums(step, checked)


TINKER_RULES: tuple[Rule, ...] = (
    check_steps,
    check_calls,
    check_loads,
    check_spans,
    count_other_logprobs,
    check_ages,
    check_trained,
    check_recorded,
)


def describe_facts(checked: Checked) -> list[str]:
    """Return what was counted in lines."""
    counts = checked.counts
    lines = [f"this training {origin}" for origin in checked.origins]
    lines.append(
        f"sampled by this server as they are: {counts['sampled']:,}; in the place of a sampled "
        f"reply, but edited or cut: {counts['edited']:,}; given by the client: "
        f"{counts['given']:,}"
    )
    age, num_other = counts[OLDEST], counts[OTHER_WEIGHTS]
    if counts["sampled"] > num_other:
        lines.append(f"oldest weights that have sampled them: {age} steps before their training")
    if num_other:
        lines.append(f"sampled with weights that this training has not made: {num_other:,}")
    if counts[TWICE]:
        lines.append(f"of samples that the client had trained on before: {counts[TWICE]:,}")
    if counts[OTHER_LOGPROBS]:
        lines.append(
            f"trained with other logprobs than were sampled: {counts[OTHER_LOGPROBS]:,}, first at "
            f"{checked.first_other}"
        )
    return lines
