"""Branches of a rollout: which turns, tokens and texts count, and which branches are refused."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from rl.rollouts.bundles import EpisodeRoom
from rl.rollouts.group import Group
from rl.rollouts.producer import find_reason_to_drop
from rl.rollouts.rubric import Criterion, Rubric
from rl.rollouts.samples import policy_sample, policy_samples
from rl.rollouts.staleness import WeightVersions
from rl.types import Branch, Message, Rollout, Score, Turn
from tests.support.conversations import conversation, drawn

LINEAR = conversation((3, drawn(10, 11)), (1, drawn(12)))


def say(turn: Turn, text: str) -> Turn:
    return replace(turn, text=text, messages=(Message(role="user", content=f"to {text}"),))


def tree(**changes: object) -> Rollout:
    """Return turns a -> b, a -> c (again, superseded), d of a sub-agent, a -> e (rewritten), and
    the auxiliary f."""
    rollout = conversation(
        (3, drawn(10, 11)), (1, drawn(12)), (1, drawn(13)), (9, drawn(14)), (2, drawn(15, 16)),
        (4, drawn(17, 18)),
    )  # fmt: skip
    turns = tuple(map(say, rollout.turns, "abcdef"))
    branches = (
        Branch(turns=(0, 1)),
        Branch(turns=(0, 2), role="superseded", cause="again", is_trained=False),
        Branch(turns=(3,), role="sub-agent", cause="agent"),
        Branch(turns=(0, 4), cause="rewritten"),
        Branch(turns=(5,), role="auxiliary", cause="agent", is_trained=False),
    )
    return replace(rollout, turns=turns, **({"branches": branches} | changes))  # type: ignore[arg-type]


def test_linear_rollout_is_one_trained_main_branch():
    assert LINEAR.branches == (Branch(turns=(0, 1), role="main", cause="", is_trained=True),)
    assert LINEAR.trained_turns == LINEAR.main_turns == LINEAR.turns
    assert (LINEAR.num_tokens, LINEAR.num_completion_tokens, LINEAR.row_tokens) == (7, 3, [7])
    assert LINEAR.state == {}


def test_turns_of_a_tree_count_once_if_they_are_trained():
    rollout = tree()
    assert [turn.text for turn in rollout.trained_turns] == ["a", "b", "d", "e"]
    assert rollout.num_completion_tokens == 2 + 1 + 1 + 2
    assert rollout.num_tokens == (3 + 2) + (1 + 1) + (9 + 1) + (2 + 2)
    assert rollout.row_tokens == [7, 10, 9]


def test_text_is_that_of_the_main_branch_that_ended_last():
    rollout = tree()
    assert (rollout.text, rollout.completion.token_ids.tolist()) == ("e", [15, 16])
    assert [message.content for message in rollout.messages] == ["to a", "a", "to e", "e"]
    cut = replace(rollout.turns[4].completion, finish_reason="length")
    turns = (*rollout.turns[:4], replace(rollout.turns[4], completion=cut), rollout.turns[5])
    assert replace(rollout, turns=turns).is_truncated
    assert not rollout.is_truncated
    # Without a main branch, the last one.
    others = [replace(b, role="sub-agent") for b in rollout.branches if b.role == "main"]
    hidden = [b for b in rollout.branches if b.role != "main"]
    assert tree(branches=(*hidden, *others)).text == "e"
    assert tree(branches=(*others, *hidden)).text == "f"


def test_default_follows_the_turns_also_after_a_pickle():
    copied = pickle.loads(pickle.dumps(LINEAR))
    for rollout in (LINEAR, copied):
        shorter = replace(rollout, turns=rollout.turns[:1])
        assert shorter.branches == (Branch(turns=(0,)),)
    copied = pickle.loads(pickle.dumps(tree(state={"exit": 0})))
    assert (copied.branches, copied.state) == (tree().branches, {"exit": 0})
    assert copied.text == "e"
    with pytest.raises(TypeError, match="read-only"):
        copied.state["exit"] = 1


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        ([()], r"branches\[0\] has turns=\(\): must have at least one turn"),
        ([(0, 2)], r"branches\[0\] has turns=\(0, 2\): 2 must be a turn's index from 0 to 1"),
        ([(0,), (-1,)], r"branches\[1\] has turns=\(-1,\): -1 must be"),
        ([(1, 0)], r"turns=\(1, 0\): must be in the order in which they were asked"),
        ([(0, 0, 1)], "in the order in which they were asked, each once"),
        ([(0, 1), (1,)], r"branches\[1\] .* turn 1 comes first, in an earlier branch it follows"),
        ([(0,)], r"branches lack the turns \[1\] of 2"),
    ],
)
def test_branches_that_are_no_forest_of_all_turns_are_refused(paths, says):
    with pytest.raises(ValueError, match=says):
        replace(LINEAR, branches=tuple(Branch(turns=path) for path in paths))


def test_branch_of_an_unknown_role_or_state_of_another_kind_is_refused():
    with pytest.raises(ValueError, match=r"role='side' is unknown: must be one of main, sub-agent"):
        Branch(turns=(0,), role="side")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"branches\[0\]=\(0, 1\) must be a Branch"):
        replace(LINEAR, branches=((0, 1),))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"state=\[1\] must be a mapping"):
        replace(LINEAR, state=[1])  # type: ignore[arg-type]


def test_state_is_a_copy_and_each_reward_function_has_its_own():
    files = {"a.py": ["x"]}
    rollout = tree(state={"files": files})
    files["a.py"].append("y")
    assert rollout.state == {"files": {"a.py": ["x"]}}
    seen: list[object] = []

    def pops(given: Rollout) -> float:
        seen.append((len(given.branches), given.text))
        return float(given.state["files"].pop("a.py") == ["x"])

    rubric = Rubric(
        criteria=(Criterion(name="one", function=pops), Criterion(name="two", function=pops))
    )
    assert rubric.score(rollout).parts == {"one": 1.0, "two": 1.0}
    assert seen == [(5, "e")] * 2
    assert rollout.state == {"files": {"a.py": ["x"]}}


def test_longest_row_decides_if_a_group_is_too_long():
    group = Group(number=0, rollouts=[tree()], scores=[Score(reward=1.0, correct=True)])
    for limit, reason in ((9, "oversize"), (10, None)):
        assert find_reason_to_drop(group, drop_equal=False, max_sample_tokens=limit) == reason


def test_only_versions_of_trained_turns_are_checked():
    rollout = tree()
    stale = replace(rollout.turns[2], completion=drawn(13, version=-7))
    turns = (*rollout.turns[:2], stale, *rollout.turns[3:])
    score = Score(reward=1.0, correct=True)
    versions = WeightVersions(max_off_policy_steps=0)
    versions.record_push(0, step=0)
    for given in (replace(rollout, turns=turns), rollout):
        group = Group(number=0, rollouts=[given], scores=[score])
        assert versions.count_off_policy_steps([group], step=1).tolist() == [0] * 6
    hidden = replace(LINEAR, branches=(Branch(turns=(0, 1), is_trained=False),))
    nothing = Group(number=0, rollouts=[hidden], scores=[score])
    assert versions.count_off_policy_steps([nothing], step=1).tolist() == []


def test_rollout_of_several_rows_is_no_single_sample():
    with pytest.raises(ValueError, match=r"problem 'p' has 3 rows to train on: must have 1"):
        policy_sample(tree(), advantages_C=np.zeros(6), temperature=1.0)


def test_episodes_of_two_calls_are_numbered_apart():
    rows = policy_samples([LINEAR, tree()], [np.zeros(3), np.zeros(6)], temperature=1.0)
    more = policy_samples([tree()], [np.zeros(6)], temperature=1.0, first_episode=2)
    assert [sample.episode for sample in rows + more] == [None, 1, 1, 1, 2, 2, 2]


def test_advantages_are_those_of_trained_turns():
    with pytest.raises(ValueError, match=r"^9 advantages for 6 tokens of problem"):
        policy_samples([tree()], [np.zeros(9)], temperature=1.0)


def test_rows_that_do_not_fit_together_are_too_long_for_a_loss_of_sequences():
    rollout = tree()
    group = Group(number=0, rollouts=[rollout], scores=[Score(reward=1.0, correct=True)])
    total = sum(rollout.row_tokens) - len(rollout.row_tokens)
    for room, reason in (
        (EpisodeRoom(max_tokens=total), None),
        (EpisodeRoom(max_tokens=total - 1), "oversize"),
        (EpisodeRoom(max_tokens=total, max_rows=1), "oversize"),
        (None, None),
    ):
        found = find_reason_to_drop(group, drop_equal=False, max_sample_tokens=None, room=room)
        assert found == reason
