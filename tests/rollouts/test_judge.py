"""The judge against a local server of OpenAI's chat completions with scripted answers."""

import asyncio
import os
from dataclasses import replace

import pytest

from rl.rollouts.judge import Judge, JudgeError, LabelGrade, NumberGrade
from rl.rollouts.rubric import UnparsedAnswer
from tests.support.chat_server import ChatServer, completion
from tests.support.scored import replied

KEY = "sk-a-key-that-nobody-must-see"


@pytest.fixture
def server():
    with ChatServer() as server:
        yield server


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("A_KEY", KEY)


def judge_of(server, **settings):
    defaults = {"base_url": server.url, "model": "m", "api_key_env": "A_KEY", "max_retries": 1}
    return Judge(**defaults | settings)


def graded(judge, rollout=None):
    return asyncio.run(judge(rollout or replied("twenty-one")))


def test_judge_sees_the_rollout_and_its_number_is_mapped_to_0_to_1(server):
    server.answers = ["It is short.\n**Grade:** 7/10"]
    judge = judge_of(
        server,
        template='{"q": {question}, "a": {answer}, "r": {reply}} {other}',
        system="You grade.",
        max_tokens=99,
        extra_body={"seed": 3},
    )
    assert graded(judge, replied("first", "it is {answer}")) == pytest.approx(0.7)
    (request,) = server.requests
    assert request["messages"] == [
        {"role": "system", "content": "You grade."},
        {"role": "user", "content": '{"q": 47 82, "a": 21, "r": it is {answer}} {other}'},
    ]
    asked = {name: request[name] for name in ("model", "temperature", "max_tokens", "seed")}
    assert asked == {"model": "m", "temperature": 0.0, "max_tokens": 99, "seed": 3}
    assert server.keys == [f"Bearer {KEY}"]


def test_judge_reads_the_reply_without_thoughts_and_the_conversation_with_them(server):
    judge = judge_of(server, template="{reply}|{conversation}")
    prompt = judge.prompt(replied("one", "<think>\nOr 20? </think>\n21 "))
    assert prompt == (
        "21|user: 47 82\n\nassistant: one\n\nuser: and 1?\n\nassistant: <think>\nOr 20? "
        "</think>\n21 "
    )
    assert judge.prompt(replied(" 21 ")).startswith(" 21 |")


def test_judge_is_not_asked_about_a_thought_that_was_cut_off(server):
    with pytest.raises(UnparsedAnswer, match="ends within a thought"):
        graded(judge_of(server), replied("<think>\nPerhaps 21"))
    assert server.requests == []


NUMBER, LABEL = (
    NumberGrade(),
    LabelGrade(labels={"correct": 1, "incorrect": -1, "partly correct": 0.5}),
)


@pytest.mark.parametrize(
    ("grade", "text", "value"),
    [
        (NUMBER, "Grade: 7.5", 0.75),
        (NUMBER, "I give it a score of\nFinal score - 10/10.", 1.0),
        (NUMBER, "Grade: 3\nOn second thought:\n\n**Grade: 4**\n", 0.4),
        (NUMBER, "0", 0.0),
        (NUMBER, "Grade: .5", 0.05),
        (NUMBER, "Grade: \u22125", None),
        (NUMBER, "Grade - 5", 0.5),
        (NUMBER, "Grade \u2013 7,5/10,0", 0.75),
        (NumberGrade(lowest=-10), "Score: \u22125", 0.25),
        (NumberGrade(highest=2000), "1,000 / 2,000", 0.5),
        (NUMBER, "\uff17", 0.7),
        (NumberGrade(pattern="<score>(.*?)</score>"), "<score> 7 </score>", 0.7),
        (NumberGrade(pattern="<score>(.*?)</score>"), "<score>7 of 10</score>", None),
        (NumberGrade(pattern="<score>(.*?)</score>"), "<score>7/10</score>", None),
        (NUMBER, "11", None),
        (NUMBER, "Grade: 4/5", None),
        (NUMBER, "I give it a 7 as it is good", None),
        (LABEL, "CORRECT", 1.0),
        (LABEL, "It adds up.\nVerdict: **Incorrect**.", -1.0),
        (LABEL, "partly correct", 0.5),
        (LABEL, "correct\nincorrect", -1.0),
        (LABEL, "This is not correct", None),
        (LABEL, "correct or incorrect?", None),
    ],
)
def test_grade_is_that_of_the_last_valid_line(grade, text, value):
    assert grade.read(text) == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize(
    "make", [lambda: NumberGrade(pattern=r"\d+"), lambda: replace(LABEL, pattern="{labels}")]
)
def test_pattern_without_a_group_is_refused(make):
    with pytest.raises(ValueError, match="must have a group in parentheses around the grade"):
        make()


def test_pattern_that_is_not_one_is_refused():
    with pytest.raises(ValueError, match=r"pattern='\(': must be a regular expression"):
        NumberGrade(pattern="(")


def test_status_429_is_retried_and_a_server_may_need_no_key(server, monkeypatch):
    monkeypatch.delenv("A_KEY")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server.answers = [(429, {"error": "slow down"}), "Grade: 10"]
    assert graded(judge_of(server, api_key_env=None)) == 1.0
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((500, {"error": "out of memory"}), 'HTTP 500: {"error": "out of memory"}'),
        ((401, f"no such key: Bearer {KEY}"), "HTTP 401: no such key: Bearer ***"),
        ("hang", "no answer within timeout_s=0.2"),
        ("who knows", "no valid grade is in its answer 'who knows'"),
        (f"your key is {KEY}", "no valid grade is in its answer 'your key is ***'"),
        ((200, "<html>a page</html>"), "no chat completion came back: '<html>a page</html>'"),
        ((200, completion(None)), "its answer has no text: '{"),
        (
            (200, completion("Grade: 1", "length")),
            "its answer was cut off at max_tokens=512: 'Grade: 1'",
        ),
    ],
)
def test_error_shows_the_answer_without_the_key(server, answer, message):
    server.answers = [answer]
    judge = judge_of(server, timeout_s=0.2 if answer == "hang" else 20)
    with pytest.raises(JudgeError) as caught:
        graded(judge)
    assert str(caught.value).startswith(f"judge 'm' at {judge.base_url}: {message}")
    assert KEY[:10] not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_url": "judge:8000"}, "base_url: must be http:// or https://"),
        ({"base_url": f"https://me:{KEY}@host/v1"}, "base_url: must be http:// or https://"),
        (
            {"api_key_env": "NO_SUCH_KEY"},
            "api_key_env='NO_SUCH_KEY': this environment variable is not set",
        ),
        ({"template": "grade {question}"}, r"must contain \{reply\} or \{conversation\}"),
        ({"timeout_s": 0}, "timeout_s=0: must be above 0"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    defaults = {"base_url": "http://127.0.0.1:1/v1", "model": "m", "api_key_env": "A_KEY"}
    with pytest.raises(ValueError, match=message) as caught:
        Judge(**defaults | settings)
    assert KEY not in str(caught.value)


@pytest.fixture
def dead_proxy(monkeypatch):
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")


def test_judge_on_this_machine_needs_no_proxy_and_the_error_of_another_names_it(server, dead_proxy):
    server.answers = ["7"]
    assert graded(judge_of(server)) == pytest.approx(0.7)
    with pytest.raises(
        JudgeError, match=r"no connection through the proxy of http_proxy=http://127.0.0.1:9: "
    ):
        graded(judge_of(server, base_url="http://judge.example/v1", max_retries=0))


@pytest.mark.parametrize(
    ("proxy", "says"),
    [
        (
            "socks5://127.0.0.1:9",
            r"proxy of http_proxy=socks5://127.0.0.1:9 cannot be used: .*httpx\[socks\]",
        ),
        (
            "http://user:se/cret@p:1",
            r"proxy of http_proxy=http://p:1 cannot be used: its address is not valid",
        ),
        (
            "http://[::1",
            r"proxy of http_proxy=http://\[::1 cannot be used: its address is not valid",
        ),
    ],
)
def test_proxy_that_cannot_be_used_is_named_by_the_judge_that_needs_it(
    server, dead_proxy, monkeypatch, proxy, says
):
    monkeypatch.setenv("http_proxy", proxy)
    with pytest.raises(JudgeError, match=says) as raised:
        graded(judge_of(server, base_url="http://judge.example/v1"))
    assert "cret" not in str(raised.value)
    server.answers = ["7"]
    assert graded(judge_of(server)) == pytest.approx(0.7)
