"""Which conversation a request continues, and the tokens that the model reads."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from rl.agents.endpoint.branches import list_conversations
from rl.agents.endpoint.canonical import digest_message
from rl.agents.endpoint.record import EpisodeRecord
from rl.agents.types import BadRequestError, ChatRequest, ToolSpec
from rl.rollouts.control_tokens import RefusedMessageError
from rl.rollouts.renderer import Renderer, RendererConfig, make_renderer
from rl.types import BranchRole, Completion, Message, ToolCall
from tests.support.chat_templates import byte_tokenizer

ADD = ToolSpec(name="add", description="Add two numbers.", parameters={"type": "object"})
LOOK = ToolSpec(name="look", description="Look at a file.", parameters={"type": "object"})
MAIN: tuple[BranchRole, ...] = ("main",)
SYSTEM = Message(role="system", content="Be brief.")


def user(content):
    return Message(role="user", content=content)


def said(content, *calls):
    return Message(role="assistant", content=content, calls=calls)


def tool(content):
    return Message(role="tool", content=content)


@pytest.fixture(scope="module")
def renderers(tmp_path_factory):
    made = {}
    for name in ("qwen3", "llama3_1", "gemma3"):
        tokenizer = byte_tokenizer(tmp_path_factory.mktemp(name), name)
        config = RendererConfig(keep_replies=True)
        stop = (tokenizer.eos_token_id,)
        made[name] = make_renderer(config, tokenizer=tokenizer, stop_token_ids=stop)
        if name == "qwen3":
            config = RendererConfig(kind="chatml")
            made["chatml"] = make_renderer(config, tokenizer=tokenizer, stop_token_ids=stop)
    return made


class Talk:
    """An episode whose replies are sampled as single characters, unlike `encode` would do it."""

    def __init__(self, renderer: Renderer):
        self.renderer = renderer
        self.record = EpisodeRecord(renderer=renderer)

    def ask(self, *messages, reply, told=None, tools=(), ends=True, **options):
        """Plan a turn, record a reply to it, and return the plan."""
        role = options.pop("role", "")
        plan = self.record.plan(
            ChatRequest(messages=tuple(messages), tools=tuple(tools), **options), role=role
        )
        self.answer(plan, reply=reply, told=told, ends=ends)
        return plan

    def answer(self, plan, *, reply, told=None, ends=True, is_delivered=True):
        ids = [*self.renderer.encode(reply)] + [self.renderer.end_token_id] * ends
        completion = Completion(
            token_ids=np.array(ids, dtype=np.int32),
            logprobs=np.full(len(ids), -0.5, dtype=np.float32),
            policy_versions=np.zeros(len(ids), dtype=np.int32),
            finish_reason="stop" if ends else "length",
        )
        told = told or said(reply)
        self.record.add(plan, completion, text=reply, told=told)
        if is_delivered:
            self.record.undelivered.discard(plan.number)

    def read(self, plan):
        return self.renderer._decode(plan.context_ids.tolist())

    def list_branches(self):
        found = list_conversations(self.record, trained=("main", "sub-agent"))
        return [(b.turns, b.role, b.cause) for b in found.branches]


@pytest.fixture(params=["qwen3", "chatml", "llama3_1"])
def talk(request, renderers):
    return Talk(renderers[request.param])


@pytest.fixture
def qwen(renderers):
    return Talk(renderers["qwen3"])


def test_continued_conversation_has_the_recorded_tokens_and_the_new_messages(talk):
    first = talk.ask(SYSTEM, user("1 + 1?"), reply="2")
    second = talk.ask(SYSTEM, user("1 + 1?"), said("2"), user("Sure?"), reply="yes")
    assert second.parent == first.number
    assert second.messages == (user("Sure?"),)
    begin = len(first.context_ids)
    assert second.context_ids[:begin].tolist() == first.context_ids.tolist()
    reply = talk.record.turns[first.number].turn.completion.token_ids
    assert second.context_ids[begin : begin + len(reply)].tolist() == reply.tolist()
    whole = talk.renderer.opening([SYSTEM, user("1 + 1?")]).tolist() + reply.tolist()
    assert second.context_ids.tolist() == whole + second.prompt_ids.tolist()
    assert talk.list_branches() == [((0, 1), "main", "")]


def test_a_cut_off_reply_is_closed_before_the_next_message(qwen):
    qwen.ask(user("Count."), reply="1 2", ends=False)
    plan = qwen.ask(user("Count."), said("1 2"), user("On."), reply="3")
    text = "<|im_start|>assistant\n1 2<|im_end|>\n<|im_start|>user\nOn.<|im_end|>"
    assert text in qwen.read(plan)


@pytest.mark.parametrize(
    "echo",
    [
        said("", ToolCall(name="add", arguments={"b": 2, "a": 1})),
        said(" \n", ToolCall(name="add", arguments={"a": 1, "b": 2})),
    ],
)
def test_replies_are_compared_in_a_canonical_form(qwen, echo):
    told = said("", ToolCall(name="add", arguments={"a": 1, "b": 2}))
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1,"b": 2}}\n</tool_call>'
    first = qwen.ask(user("1 + 2?"), reply=text, told=told, tools=[ADD])
    second = qwen.ask(user("1 + 2?"), echo, tool("3"), reply="3", tools=[ADD])
    assert second.parent == first.number
    # As the model wrote it, without a space after the comma.
    assert text in qwen.read(second)


@pytest.mark.parametrize(
    ("written", "echoed"),
    [
        ('{"a": 1.0}', {"a": 1}),
        ('{"a": 1e3}', {"a": 1000}),
        ('{"a": -0}', {"a": 0}),
        ('{"a": -0.0}', {"a": 0}),
        ('{"a": [{"b": 1e21}]}', {"a": [{"b": 1e21}]}),
        ('{"a": 12345678901234567890}', {"a": 12345678901234567000}),
        ('{"a": 0.10}', {"a": 0.1}),
        ('{"a": 1, "b": null}', {"a": 1}),
        ('{"a": 1}', {"a": 1, "b": None}),
    ],
)
def test_call_that_a_client_has_read_and_written_again_is_the_same(qwen, written, echoed):
    text = f'<tool_call>\n{{"name": "add", "arguments": {written}}}\n</tool_call>'
    told = said("", ToolCall(name="add", arguments=json.loads(written)))
    first = qwen.ask(user("1 + 2?"), reply=text, told=told, tools=[ADD])
    echo = said("", ToolCall(name="add", arguments=echoed))
    second = qwen.ask(user("1 + 2?"), echo, tool("3"), reply="3", tools=[ADD])
    assert second.parent == first.number
    # The quote of a history that was changed before it, too.
    third = qwen.ask(user("Add 1 and 2."), echo, tool("3"), reply="3", tools=[ADD])
    assert third.relation == "rewritten"
    assert text in qwen.read(third)


@pytest.mark.parametrize(
    ("arguments", "other"),
    [
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": "1"}),
        ({"a": [None]}, {"a": []}),
        ({"a": {"b": None}}, {"a": {}}),
        ({"a": 10**400}, {"a": 10**400 + 1}),
    ],
)
def test_calls_with_other_values_differ(arguments, other):
    digests = {
        digest_message(said("", ToolCall(name="add", arguments=given)))
        for given in (arguments, other)
    }
    assert len(digests) == 2


def test_order_of_tools_does_not_count(qwen):
    first = qwen.ask(user("Hi"), reply="Hi.", tools=[ADD, LOOK])
    second = qwen.ask(user("Hi"), said("Hi."), user("Go"), reply="Ok", tools=[LOOK, ADD])
    assert second.parent == first.number


def test_other_tools_begin_a_branch(qwen):
    qwen.ask(user("Hi"), reply="Hi.", tools=[ADD])
    plan = qwen.ask(user("Hi"), said("Hi."), user("Go"), reply="Ok", tools=[ADD, LOOK])
    assert (plan.parent, plan.relation) == (None, "tools")
    assert "Look at a file." in qwen.read(plan)
    assert qwen.list_branches() == [((0,), "main", ""), ((1,), "main", "tools")]


def test_another_system_message_begins_a_branch(qwen):
    qwen.ask(replace(SYSTEM, content="It is 9:00."), user("Hi"), reply="Hi.")
    plan = qwen.ask(
        replace(SYSTEM, content="It is 9:01."), user("Hi"), said("Hi."), user("Go"), reply="Ok"
    )
    assert (plan.parent, plan.relation) == (None, "system")
    assert qwen.list_branches() == [((0,), "main", ""), ((1,), "main", "system")]


def test_summary_in_place_of_the_history_begins_a_main_branch(qwen):
    qwen.ask(SYSTEM, user("Task"), reply="a", tools=[ADD])
    qwen.ask(SYSTEM, user("Task"), said("a"), user("Sum up."), reply="did a", tools=[ADD])
    plan = qwen.ask(SYSTEM, user("So far: did a"), reply="b", tools=[ADD])
    assert plan.relation == "rewritten"
    qwen.ask(SYSTEM, user("So far: did a"), said("b"), user("More"), reply="c", tools=[ADD])
    assert qwen.list_branches() == [((0, 1), "main", ""), ((2, 3), "main", "rewritten")]


def test_quoted_replies_keep_their_sampled_tokens(renderers):
    talk = Talk(renderers["qwen3"])
    first = talk.record.plan(ChatRequest(messages=(user("one"),)))
    # Tokens that no tokenizer would choose for this text.
    ids = np.array([*talk.renderer.encode("a"), *talk.renderer.encode("b")], dtype=np.int32)[::-1]
    completion = Completion(
        token_ids=ids.copy(),
        logprobs=np.zeros(2, np.float32),
        policy_versions=np.zeros(2, np.int32),
        finish_reason="length",
    )
    talk.record.add(first, completion, text="ab", told=said("ab"))
    plan = talk.record.plan(
        ChatRequest(messages=(user("summary"), said("x"), user("so"), said("ab"), user("go on")))
    )
    assert plan.relation == "rewritten"
    text = talk.read(plan)
    assert "<|im_start|>assistant\nx<|im_end|>\n<|im_start|>user\nso<|im_end|>" in text
    assert "<|im_start|>assistant\nba<|im_end|>\n<|im_start|>user\ngo on" in text


class Numbered(Talk):
    """An episode whose replies are equal as messages, and numbered as tokens."""

    def ask_for_yes(self, *messages, number):
        return self.ask(*messages, reply=f"{number}", told=said("yes"))

    def list_quoted(self, plan):
        return re.findall(r"assistant\n(.*)<\|im_end\|>", self.read(plan))


def test_equal_replies_are_quoted_from_the_conversation_that_is_rewritten_in_its_order(renderers):
    talk = Numbered(renderers["qwen3"])
    yes, other = said("yes"), replace(SYSTEM, content="You search.")
    history = [SYSTEM]
    for number in range(3):
        history += [user(f"q{number}"), yes]
        talk.ask_for_yes(*history[:-1], number=number)
    for number in range(3, 6):
        talk.ask_for_yes(other, user(f"other {number}"), number=number)
    on = user("on")
    # The end of a history, its beginning, and all of it under other messages of the user.
    for messages, quoted in (
        ([SYSTEM, user("summary"), *history[3:], on], ["1", "2"]),
        ([SYSTEM, user("q0"), yes, user("q1"), yes, user("changed"), yes, on], ["0", "1", "2"]),
        ([SYSTEM, user("changed"), *history[2:5], on], ["0", "1"]),
        ([SYSTEM, user("a"), yes, user("b"), yes, user("c"), yes, on], ["0", "1", "2"]),
        # Each once, and only then those of others.
        ([SYSTEM, user("x"), yes, *history[1:], on], ["5", "0", "1", "2"]),
    ):
        plan = talk.record.plan(ChatRequest(messages=tuple(messages)))
        assert talk.list_quoted(plan) == quoted
        assert plan.relation == "rewritten"


def test_a_history_that_is_rewritten_again_quotes_what_the_first_one_quoted(renderers):
    talk = Numbered(renderers["qwen3"])
    yes = said("yes")
    for number, content in enumerate("abc"):
        # At each step all messages of the user are other ones.
        messages = [SYSTEM]
        for _ in range(number):
            messages += [user(content), yes]
        plan = talk.ask_for_yes(*messages, user(content), number=number)
        assert talk.list_quoted(plan) == ["0", "1", "2"][:number]


def test_two_continuations_of_one_reply_share_their_beginning(qwen):
    first = qwen.ask(user("Task"), reply="a")
    left = qwen.ask(user("Task"), said("a"), user("left"), reply="l")
    right = qwen.ask(user("Task"), said("a"), user("right"), reply="r")
    assert left.parent == right.parent == first.number
    assert qwen.list_branches() == [((0, 1), "main", ""), ((0, 2), "main", "fork")]


def test_the_same_request_again_supersedes_the_reply_that_is_not_continued(qwen):
    first = qwen.ask(user("Task"), reply="bad")
    second = qwen.ask(user("Task"), reply="good", max_tokens=5)
    assert second.prompt_ids is first.prompt_ids
    qwen.ask(user("Task"), said("good"), user("on"), reply="done")
    assert qwen.list_branches() == [
        ((0,), "superseded", ""),
        ((1, 2), "main", "again"),
    ]
    # Only what is trained comes with `is_trained`.
    branches = list_conversations(qwen.record, trained=MAIN).branches
    assert [branch.is_trained for branch in branches] == [False, True]


def test_of_equal_requests_without_continuation_the_last_counts(qwen):
    qwen.ask(user("Task"), reply="a")
    qwen.ask(user("Task"), reply="b", max_tokens=5)
    assert qwen.list_branches() == [((0,), "superseded", ""), ((1,), "main", "again")]


def test_replies_that_no_client_has_got_count_only_if_they_were_continued(qwen):
    qwen.ask(user("Task"), reply="a")
    again = qwen.record.plan(ChatRequest(messages=(user("Task"),)))
    qwen.answer(again, reply="b", is_delivered=False)
    assert qwen.list_branches() == [((0,), "main", ""), ((1,), "superseded", "again")]
    qwen.ask(user("Task"), said("b"), user("on"), reply="c")
    assert qwen.list_branches() == [((0,), "superseded", ""), ((1, 2), "main", "again")]


def test_a_conversation_whose_last_reply_no_client_has_got_counts_up_to_that_reply(qwen):
    qwen.ask(user("Task"), reply="a")
    qwen.ask(user("Task"), said("a"), user("on"), reply="b")
    request = ChatRequest(messages=(user("Task"), said("a"), user("on"), said("b"), user("on")))
    qwen.answer(qwen.record.plan(request), reply="c", is_delivered=False)
    assert qwen.list_branches() == [((0, 1), "main", ""), ((0, 1, 2), "superseded", "")]


def test_a_reply_without_which_a_later_request_goes_on_is_superseded(qwen):
    qwen.ask(SYSTEM, user("Task"), reply="bad")
    qwen.ask(SYSTEM, user("Task"), user("No JSON."), reply="a")
    begin = [SYSTEM, user("Task"), user("No JSON."), said("a")]
    qwen.ask(*begin, user("on"), reply="bad too")
    qwen.ask(*begin, user("on"), user("No JSON."), reply="b")
    assert qwen.list_branches() == [
        ((0,), "superseded", ""),
        ((1, 2), "superseded", "rewritten"),
        ((1, 3), "main", "fork"),
    ]


@pytest.mark.parametrize("follows", [said("in other words"), tool("3")])
def test_a_reply_that_was_used_in_other_words_is_not_superseded(qwen, follows):
    qwen.ask(SYSTEM, user("Task"), reply="a")
    qwen.ask(SYSTEM, user("Task"), follows, user("on"), reply="b")
    assert [role for _, role, _ in qwen.list_branches()] == ["main", "main"]


def test_samples_that_were_under_way_at_the_same_time_all_count(qwen):
    request = ChatRequest(messages=(user("Task"),))
    plans = [qwen.record.plan(request) for _ in range(3)]
    # One asks for more at the same time: it has not rejected a reply that was not there.
    longer = qwen.record.plan(ChatRequest(messages=(user("Task"), user("Quick"))))
    for plan, reply in zip([*plans, longer], "abcd", strict=True):
        qwen.answer(plan, reply=reply)
    assert [role for _, role, _ in qwen.list_branches()] == ["main"] * 4
    qwen.ask(user("Task"), said("b"), user("on"), reply="e")
    assert [role for _, role, _ in qwen.list_branches()] == ["main"] * 4
    # Asked once more, when they were there.
    qwen.ask(user("Task"), reply="f")
    assert qwen.list_branches()[-1] == ((5,), "superseded", "again")


def test_a_title_is_auxiliary_and_a_conversation_with_another_opening_a_sub_agent(qwen):
    qwen.ask(user("Write a title for: Task"), reply="Title")
    qwen.ask(SYSTEM, user("Task"), reply="a", tools=[ADD])
    other = replace(SYSTEM, content="You search.")
    qwen.ask(other, user("Find x"), reply="looking", tools=[LOOK])
    qwen.ask(other, user("Find x"), said("looking"), user("?"), reply="x", tools=[LOOK])
    qwen.ask(SYSTEM, user("Task"), said("a"), user("x"), reply="b", tools=[ADD])
    assert qwen.list_branches() == [
        ((0,), "auxiliary", ""),
        ((2, 3), "sub-agent", "agent"),
        ((1, 4), "main", "agent"),
    ]


def test_main_is_the_conversation_that_ends_last_whatever_its_length(qwen):
    other = replace(SYSTEM, content="You search.")
    qwen.ask(other, user("Find x"), reply="a")
    qwen.ask(other, user("Find x"), said("a"), user("?"), reply="b")
    qwen.ask(other, user("Find x"), said("a"), user("?"), said("b"), user("!"), reply="x")
    qwen.ask(SYSTEM, user("Task"), reply="c")
    qwen.ask(SYSTEM, user("Task"), said("c"), user("x"), reply="d")
    qwen.ask(user("Was d right?"), reply="yes")
    assert qwen.list_branches() == [
        ((0, 1, 2), "sub-agent", ""),
        ((3, 4), "main", "agent"),
        ((5,), "sub-agent", "agent"),
    ]


def test_a_client_may_name_the_role(qwen):
    qwen.ask(user("Task"), reply="a")
    qwen.ask(SYSTEM, user("Judge a"), reply="fine", role="auxiliary")
    assert qwen.list_branches() == [((0,), "main", ""), ((1,), "auxiliary", "agent")]


def test_requests_in_flight_at_the_same_time_are_in_the_order_of_their_arrival(qwen):
    first = qwen.record.plan(ChatRequest(messages=(user("Task"),), tools=(ADD,)))
    second = qwen.record.plan(ChatRequest(messages=(SYSTEM, user("Sub")), tools=(ADD,)))
    qwen.answer(second, reply="s")
    qwen.answer(first, reply="m")
    found = list_conversations(qwen.record, trained=MAIN)
    assert [turn.text for turn in found.turns] == ["m", "s"]
    assert qwen.list_branches() == [((0,), "main", ""), ((1,), "sub-agent", "agent")]


def test_a_request_without_an_answer_leaves_no_turn(qwen):
    qwen.record.plan(ChatRequest(messages=(user("Task"),)))
    qwen.ask(user("Other task"), reply="a")
    assert qwen.list_branches() == [((0,), "main", "")]


@pytest.mark.parametrize("is_parallel", [False, True])
def test_a_request_without_an_answer_changes_no_roles(qwen, is_parallel):
    def plan(content):
        return qwen.record.plan(ChatRequest(messages=(SYSTEM, user(content))))

    plan("Too long a task")
    if is_parallel:
        # The first request is refused when the others are under way, of which the last is answered
        # first.
        first, second = plan("Task"), plan("Task, in other words")
        qwen.answer(second, reply="b")
        qwen.answer(first, reply="a")
    else:
        qwen.ask(SYSTEM, user("Task"), reply="a")
        qwen.ask(SYSTEM, user("Task, in other words"), reply="b")
    qwen.ask(SYSTEM, user("Summary"), reply="c")
    assert qwen.list_branches() == [
        ((0,), "main", ""),
        ((1,), "main", "rewritten"),
        ((2,), "main", "rewritten"),
    ]


def test_template_without_a_role_for_tools_is_told_their_results_by_the_user(renderers):
    talk = Talk(renderers["gemma3"])
    first = talk.ask(user("Task"), reply="a")
    plan = talk.ask(user("Task"), said("a"), tool("3"), tool("4"), user("Go on."), reply="b")
    assert plan.parent == first.number
    results = "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>\nGo on."
    assert f"<start_of_turn>user\n{results}<end_of_turn>" in talk.read(plan)


def test_messages_that_no_template_could_render_are_refused(renderers):
    talk = Talk(renderers["gemma3"])
    talk.ask(user("Task"), reply="a")
    with pytest.raises(BadRequestError, match="cannot be rendered"):
        talk.ask(user("Task"), said("a"), replace(SYSTEM, content="New rules."), reply="b")


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ((), "messages is empty"),
        ((user("a"), said("b")), "the last message is the assistant's"),
    ],
)
def test_conversations_without_an_answer_are_refused(qwen, messages, error):
    with pytest.raises(BadRequestError, match=error):
        qwen.record.plan(ChatRequest(messages=messages))


def test_tools_are_announced_as_the_template_does(renderers):
    for name, text in (
        ("qwen3", "# Tools\n\nYou may call one or more functions"),
        ("chatml", "# Tools\n\nYou may call one or more functions"),
        ("gemma3", "# Tools\n\nYou may call one or more functions"),
        ("llama3_1", 'Respond in the format {"name": function name, "parameters"'),
    ):
        talk = Talk(renderers[name])
        plan = talk.ask(SYSTEM, user("1 + 1?"), reply="2", tools=[ADD])
        assert text in talk.read(plan), name
        assert "Be brief." in talk.read(plan)
        assert "Add two numbers." in talk.read(plan)


def test_control_tokens_in_messages_and_tools_stay_texts(qwen):
    end = qwen.renderer.end_token_id
    plan = qwen.ask(user("x<|im_end|>y"), reply="a")
    assert plan.context_ids.tolist().count(end) == 1
    with pytest.raises(RefusedMessageError, match="description of the tool 'add'"):
        qwen.ask(user("x"), reply="a", tools=[replace(ADD, description="<|im_end|>")])


def test_num_tokens_counts_each_token_once(qwen):
    first = qwen.ask(user("Task"), reply="a")
    second = qwen.ask(user("Task"), said("a"), user("on"), reply="bc")
    assert qwen.record.num_tokens == len(second.context_ids) + 3
    assert len(second.context_ids) == len(first.context_ids) + 2 + len(second.prompt_ids)
