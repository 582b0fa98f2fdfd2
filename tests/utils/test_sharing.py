"""Private copies of problems, arrays that refuse changes, and read-only mappings."""

import asyncio
import copy
import json
import pickle
import random
import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from rl.types import Message, Observation, Problem, Prompt, Reply, Rollout, Turn
from rl.utils.sharing import ReadOnlyDict, copy_data
from tests.support.fakes import completion_of

INFO = {
    "questions": ["a", "b"],
    "board": np.zeros(3),
    "seen": {1},
    "pair": ([], "x"),
    "limits": {"most": 3},
}
PROBLEM = Problem(id="p", question="q", answer="a", demonstration="d", info=INFO)


def changed(info):
    info["questions"].pop()
    info["board"][0] = 5.0
    info["seen"].add(2)
    info["pair"][0].append(1)
    info["limits"]["most"] = 0
    info["new"] = True


def state(info):
    return {
        name: value.tolist() if name == "board" else copy.deepcopy(value)
        for name, value in info.items()
    }


def test_private_copies_of_a_problem_keep_their_changes_to_themselves():
    before = state(INFO)
    first, second = PROBLEM.make_private(), PROBLEM.make_private()
    assert (first.id, first.question, first.demonstrations) == ("p", "q", ("d",))
    changed(first.info)
    assert (first.info["questions"], first.info["new"]) == (["a"], True)  # kept for this user
    assert state(second.info) == state(PROBLEM.info) == state(INFO) == before
    assert replace(first, question="other").info["questions"] == ["a"]


def test_problem_keeps_a_copy_of_the_data_that_it_was_made_with():
    rows = {"words": ["x"]}
    problems = []
    for word in ("one", "two"):
        rows["words"][0] = word
        problems.append(Problem(id=word, question=word, answer="", info=rows))
    assert [p.info["words"] for p in problems] == [["one"], ["two"]]


def test_private_copy_is_equal_and_pickles():
    problem = Problem(id="p", question="q", answer="", info={"questions": ["a"]})
    assert problem.make_private() == problem
    for original in (problem, problem.make_private(), problem.make_private().make_private()):
        back = pickle.loads(pickle.dumps(original))
        assert back == problem
        assert copy.deepcopy(back) == problem
    with pytest.raises(AttributeError, match="'Problem' object has no attribute 'infos'"):
        problem.make_private().infos  # type: ignore[attr-defined]  # noqa: B018


@dataclass(frozen=True, kw_only=True)
class Game(Problem):
    """Problem with a mutable field of its own."""

    board: list[int] = field(default_factory=list)


def test_further_fields_of_a_subclass_are_private_too():
    game = Game(id="g", question="q", answer="", board=[0])
    mine = game.make_private()
    mine.board.append(1)
    assert (mine.board, game.board, type(mine)) == ([0, 1], [0], Game)


class Clock:
    def close(self):
        pass


class Stubborn:
    def __deepcopy__(self, memo):
        raise ValueError("one of a kind")


class Board:
    def __init__(self):
        self.cells = [0]


def test_what_belongs_to_no_single_user_is_shared_and_all_else_is_copied():
    numbers = [1, 2]
    shared = [
        threading.Lock(),
        Clock(),
        asyncio.Semaphore(2),
        (i for i in range(3)),
        Stubborn(),
        len,
    ]
    mine = copy_data(
        {
            "shared": shared,
            "a": numbers,
            "b": numbers,
            "board": Board(),
            "by": defaultdict(list, x=[1]),
        }
    )
    assert all(a is b for a, b in zip(mine["shared"], shared, strict=True))
    assert mine["a"] is mine["b"]  # one list in two places stays one
    assert mine["a"] is not numbers
    assert mine["board"].cells == [0]
    assert mine["by"] == {"x": [1]}
    loop: list = [1]
    loop.append(loop)
    again = copy_data(loop)
    assert again[1] is again


@dataclass(slots=True)
class Page:
    number: int
    words: list[str]
    marks: dict[str, list[int]]


def test_objects_in_a_list_are_all_copied_and_equal():
    pages = [Page(number=i, words=[str(i)], marks={"seen": [i]}) for i in range(100)]
    randoms = [random.Random(i) for i in range(5)]
    info: dict[str, Any] = {
        "pages": pages,
        "last": pages[-1],
        "randoms": randoms,
        "moved": [deque([i]) for i in range(5)],
    }
    mine = copy_data(info)
    assert mine["pages"] == pages
    assert mine["last"] is mine["pages"][-1]
    assert [r.random() for r in mine["randoms"]] == [random.Random(i).random() for i in range(5)]
    for name in ("pages", "randoms", "moved"):
        assert all(a is not b for a, b in zip(mine[name], info[name], strict=True))
    for page in mine["pages"]:
        page.words.pop()
        page.marks["seen"].clear()
    assert all(page.words and page.marks["seen"] for page in pages)


class Session:
    """State of an episode that holds what cannot be copied."""

    def __init__(self):
        self.questions = ["a", "b"]
        self.lock, self.limit, self.client, self.grade = (
            threading.Lock(),
            asyncio.Semaphore(2),
            Clock(),
            lambda r: 1,
        )
        self.me = self


def test_object_is_copied_around_what_it_shares():
    session = Session()
    mine = copy_data({"session": session, "frozen": MappingProxyType({"questions": ["a"]})})
    mine["session"].questions.pop()
    mine["frozen"]["questions"].pop()
    again = copy_data({"session": session})["session"]
    assert (session.questions, again.questions) == (["a", "b"], ["a", "b"])
    assert again.me is again
    for name in ("lock", "limit", "client", "grade"):
        assert getattr(again, name) is getattr(session, name)


class Slotted:
    __slots__ = ("questions",)

    def __init__(self, questions: list[int]) -> None:
        self.questions = questions


def test_temporary_parts_of_a_copy_are_not_mixed_up():
    frozen = [MappingProxyType({"questions": [number]}) for number in range(50)]
    slotted = [Slotted([number]) for number in range(50)]
    mine = copy_data([*zip(frozen, slotted, strict=True), (frozen[0], slotted[0])])
    for number, (mapping, value) in enumerate(mine[:50]):
        assert mapping["questions"] == value.questions == [number]
        assert value.questions is not slotted[number].questions
    assert mine[50][0] is mine[0][0]  # one mapping in two places stays one


def test_read_only_arrays_are_shared_because_nobody_can_change_them():
    array = np.arange(3)
    array.setflags(write=False)
    objects = np.array([[1], None], dtype=object)
    objects.setflags(write=False)
    mine = copy_data([array, objects])
    assert mine[0] is array
    assert mine[1][0] is not objects[0]


def test_large_data_is_copied_only_for_users_who_read_it():
    class Counted:
        num_copies = 0

        def __deepcopy__(self, memo):
            Counted.num_copies += 1
            return self

    problem = Problem(id="p", question="q", answer="", info={"data": Counted()})
    before = Counted.num_copies
    users = [problem.make_private() for _ in range(5)]
    assert [user.question for user in users] == ["q"] * 5
    assert Counted.num_copies == before
    assert users[0].info is users[0].info
    assert Counted.num_copies == before + 1


def test_arrays_of_a_rollout_are_read_only_also_after_pickling():
    completion = completion_of([1, 2, 0])
    asked = np.ones(2, dtype=np.int32)
    turn = Turn(messages=(), prompt_ids=asked, completion=completion, text="ab")
    rollout = Rollout(prompt=Prompt(problem=PROBLEM, token_ids=asked), sample=0, turns=[turn])  # type: ignore[arg-type]
    assert isinstance(rollout.turns, tuple)
    for r in (rollout, pickle.loads(pickle.dumps(rollout))):
        arrays = [
            r.prompt.token_ids,
            r.turns[0].prompt_ids,
            r.completion.token_ids,
            r.completion.logprobs,
        ]
        for array in (*arrays, r.completion.policy_versions):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 7
    asked[0] = 5  # the array of the caller stays as it is
    reply = Reply(text="a", completion=completion_of([1, 0]))
    with pytest.raises(ValueError, match="read-only"):
        reply.completion.logprobs.sort()


def test_observation_keeps_no_object_of_its_environment():
    messages, metrics = [Message(role="user", content="1")], {"moves": 1.0}
    observation = Observation(messages=messages, metrics=metrics)  # type: ignore[arg-type]
    messages.append(Message(role="user", content="2"))
    metrics["moves"] = 9.0
    assert [m.content for m in observation.messages] == ["1"]
    assert observation.metrics == {"moves": 1.0}
    for change in (
        lambda m: m.update(moves=0.0),
        lambda m: m.pop("moves"),
        lambda m: m.__setitem__("a", 1.0),
    ):
        with pytest.raises(TypeError, match="read-only"):
            change(observation.metrics)
    back = pickle.loads(pickle.dumps(observation))
    assert (type(back.metrics), back) == (ReadOnlyDict, observation)
    assert json.dumps(back.metrics) == '{"moves": 1.0}'
    assert {**back.metrics, "more": 2.0} == back.metrics | {"more": 2.0}


@pytest.mark.parametrize(
    "messages",
    [(m for m in [Message(role="user", content="1")]), [Message(role="user", content="1")]],
)
def test_messages_of_any_iterable_are_kept_as_a_tuple(messages):
    assert Observation(messages=messages).messages == (Message(role="user", content="1"),)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("go on", r"messages='go on' is a str: messages must be a sequence of Message"),
        (Message(role="user", content="1"), r"messages=Message\(.*is a Message: "),
        ({"role": "user", "content": "1"}, "is a dict: "),
        (None, "messages=None is a NoneType: "),
    ],
)
def test_messages_that_are_no_sequence_are_refused(messages, says):
    with pytest.raises(ValueError, match=says):
        Observation(messages=messages)


def test_data_and_metrics_that_are_no_mapping_are_refused():
    with pytest.raises(ValueError, match=r"problem 'p': info=\[1\] must be a mapping"):
        Problem(id="p", question="q", answer="", info=[1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"metrics=\[1.0\] must be a mapping"):
        Observation(metrics=[1.0])  # type: ignore[arg-type]
    listed = Problem(id="p", question="q", answer="", demonstration=["a", "b"])  # type: ignore[arg-type]
    assert listed.demonstrations == ("a", "b")
