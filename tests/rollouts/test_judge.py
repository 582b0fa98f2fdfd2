"""Against a server on loopback that speaks OpenAI's chat completions, and answers as a test says."""

import asyncio
import json
import pickle
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rl.rollouts.judge import Judge, JudgeError, LabelGrade, NumberGrade
from rl.rollouts.rubric import Criterion, Rubric
from rl.rollouts.scoring import ScoringWorker
from tests.support.scored import replied

KEY = "sk-a-key-that-nobody-must-see"


class JudgeServer:
    """Answers each request with the next of `answers`, the last for ever: a text, or (status, body)."""

    def __init__(self):
        self.answers = ["Grade: 5"]
        self.requests = []
        self.keys = []
        self.changed = threading.Condition()
        self.num_arrived = self.now = self.most = 0
        self.at_once = 1
        self.released = threading.Event()
        handler = type("Handler", (_Handler,), {"judge": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def answer(self, request, key):
        with self.changed:
            self.requests.append(request)
            self.keys.append(key)
            number, self.num_arrived = self.num_arrived, self.num_arrived + 1
            self.now += 1
            self.most = max(self.most, self.now)
            self.changed.notify_all()
            # So many at a time go on together.
            wanted = (number // self.at_once + 1) * self.at_once
            assert self.changed.wait_for(lambda: self.num_arrived >= wanted, timeout=20)
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer == "hang":
            self.released.wait(20)
        with self.changed:
            self.now -= 1
        return answer

    def close(self):
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    judge: JudgeServer
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions"
        answer = self.judge.answer(request, self.headers["Authorization"])
        if isinstance(answer, str):
            answer = (200, completion(answer))
        status, body = answer
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "text/html" if isinstance(body, str) else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("retry-after-ms", "1")
            self.end_headers()
            self.wfile.write(data)
        except ConnectionError:
            pass  # Who asked waits no longer.

    def log_message(self, *args):
        pass


def completion(text, finish_reason="stop"):
    message = {"role": "assistant", "content": text}
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
    }


@pytest.fixture
def server():
    server = JudgeServer()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("A_KEY", KEY)


def judge_of(server, **settings):
    defaults = {"base_url": server.url, "model": "m", "api_key_env": "A_KEY", "max_retries": 1}
    return Judge(**defaults | settings)


def graded(judge, rollout=None):
    return asyncio.run(judge(rollout or replied("twenty-one")))


# What it is asked, and how its answer is read


def test_the_judge_is_told_the_rollout_and_its_number_becomes_a_reward_of_0_to_1(server):
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


def test_the_conversation_is_all_that_was_said(server):
    judge = judge_of(server, template="{conversation}", max_tokens=None)
    graded(judge, replied("20?", "21"))
    (request,) = server.requests
    assert (
        request["messages"][0]["content"] == "user: 47 82\n\nassistant: 20?\n\nuser: and 1?\n\nassistant: 21"
    )
    assert "max_tokens" not in request


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 0.7),
        ("Grade: 7.5", 0.75),
        ("I give it a score of\nFinal score - 10/10.", 1.0),
        ("Grade: 3\nOn second thought:\n\n**Grade: 4**\n", 0.4),
        ("0", 0.0),
        ("11", None),
        ("Grade: 4/5", None),
        ("Grade: -1", None),
        ("I give it a 7 as it is good", None),
        ("", None),
    ],
)
def test_a_number_is_the_last_line_that_is_one_and_within_its_range(text, number):
    assert NumberGrade().read(text) == (None if number is None else pytest.approx(number))


def test_a_range_is_mapped_to_0_to_1_and_a_pattern_can_be_ones_own():
    grade = NumberGrade(lowest=1, highest=5, pattern=r"<g>(\S+)</g>")
    assert [grade.read(f"9 <g>{n}</g>") for n in ("1", "2", "5", "x", "6")] == [0.0, 0.25, 1.0, None, None]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("CORRECT", 1.0),
        ("It adds up.\nVerdict: **Incorrect**.", -1.0),
        ("partly correct", 0.5),
        ("correct\nincorrect", -1.0),
        ("This is not correct", None),
        ("correct or incorrect?", None),
    ],
)
def test_a_label_is_the_last_line_that_is_one(text, value):
    assert LabelGrade(labels={"correct": 1, "incorrect": -1, "partly correct": 0.5}).read(text) == value


# What goes wrong


def failing(judge):
    with pytest.raises(JudgeError) as caught:
        graded(judge)
    text = str(caught.value)
    assert text.startswith(f"judge 'm' at {judge.base_url}: ")
    assert KEY not in text
    return text.removeprefix(f"judge 'm' at {judge.base_url}: ")


def test_it_is_asked_again_after_429(server):
    server.answers = [(429, {"error": "slow down"}), "Grade: 10"]
    assert graded(judge_of(server)) == 1.0
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((500, {"error": "out of memory"}), 'HTTP 500 (asked 2 times): {"error": "out of memory"}'),
        ((401, f"no such key: Bearer {KEY}"), "HTTP 401: no such key: Bearer ***"),
        ((500, "x" * 990 + KEY + "y" * 5000), None),
        ("who knows", "a number from 0 to 10 is not in its answer 'who knows'"),
        (f"your key is {KEY}", "a number from 0 to 10 is not in its answer 'your key is ***'"),
        ((200, "<html>a page</html>"), "no chat completion came back: '<html>a page</html>'"),
        ((200, {"choices": []}), "no chat completion came back: '{\"choices\": []}'"),
        ((200, completion("Grade: 1", "length")), "its answer was cut off at max_tokens=512: 'Grade: 1'"),
    ],
)
def test_what_is_no_grade_is_an_error_that_says_what_came_back_without_the_key(server, answer, says):
    server.answers = [answer]
    text = failing(judge_of(server))
    if says is None:
        assert KEY[:10] not in text
        assert "***" in text
    else:
        assert text == says


def test_an_answer_without_text_is_an_error(server):
    server.answers = [(200, completion(None))]
    assert failing(judge_of(server)).startswith("its answer has no text: ")


def test_a_server_that_does_not_answer_is_given_up_after_timeout_s(server):
    server.answers = ["hang"]
    text = failing(judge_of(server, timeout_s=0.2))
    assert text == "no answer within timeout_s=0.2 (asked 2 times)"


def test_a_server_that_is_not_there_is_an_error(server):
    server.close()
    text = failing(judge_of(server, max_retries=0))
    assert text.startswith("no connection: ConnectError(")


# In a rubric


def test_it_scores_a_group_with_so_many_requests_at_once_and_a_failure_fails_one(server):
    server.at_once = 3
    server.answers = [*["Grade: 10"] * 5, "none", "Grade: 10"]
    rubric = Rubric(criteria=(Criterion(name="judge", function=judge_of(server, max_concurrency=3)),))
    scores = asyncio.run(rubric.score_group([replied("x") for _ in range(9)]))
    assert server.most == 3
    failures = [s.failure for s in scores if s.failure is not None]
    assert len(failures) == 1
    assert f"reward 'judge' raised JudgeError(\"judge 'm' at {server.url}: a number from 0" in failures[0]
    assert sum(s.reward for s in scores) == 8.0


@pytest.mark.medium
def test_it_scores_in_a_process_with_the_key_of_the_environment(server):
    """Two calls overlap: each is answered only when the other has arrived."""
    server.at_once = 2
    rubric = Rubric(criteria=(Criterion(name="judge", function=judge_of(server)),))

    async def steps():
        worker = ScoringWorker(rubric=rubric, time_limit_s=20)
        try:
            return await asyncio.gather(*(worker.score([[replied("x")]]) for _ in range(2)))
        finally:
            await worker.close()

    answers = asyncio.run(steps())
    assert [scores[0][0].parts for scores in answers] == [{"judge": 0.5}] * 2
    assert server.keys == [f"Bearer {KEY}"] * 2


def test_a_copy_in_a_process_without_the_key_says_so(server, monkeypatch):
    copy = pickle.loads(pickle.dumps(judge_of(server)))
    assert copy == judge_of(server)
    assert KEY not in repr(copy)
    monkeypatch.delenv("A_KEY")
    with pytest.raises(ValueError, match="api_key_env='A_KEY': this environment variable is not set here"):
        graded(copy)


# What it refuses


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"base_url": "judge:8000"}, "base_url='judge:8000': must begin with http:// or https://"),
        ({"base_url": "https:///v1"}, "base_url='https:///v1': must begin with"),
        ({"base_url": f"https://me:{KEY}@host/v1"}, "base_url: https://host... must have neither a user"),
        ({"api_key_env": "NO_SUCH_KEY"}, "api_key_env='NO_SUCH_KEY': this environment variable is not set"),
        ({"template": "grade {question}"}, r"must have \{reply\} or \{conversation\}"),
        ({"model": ""}, "model='': must be"),
        ({"max_tokens": 0}, "max_tokens=0: must be at least 1"),
        ({"max_retries": -1}, "max_retries=-1: must be at least 0"),
        ({"max_concurrency": 0}, "max_concurrency=0: must be at least 1"),
        ({"temperature": float("nan")}, "temperature=nan: must be at least 0"),
        ({"timeout_s": 0}, "timeout_s=0: must be above 0, and finite"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings, says):
    defaults = {"base_url": "http://127.0.0.1:1/v1", "model": "m", "api_key_env": "A_KEY"}
    with pytest.raises(ValueError, match=says) as caught:
        Judge(**defaults | settings)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    ("grade", "settings", "says"),
    [
        (NumberGrade, {"lowest": 1, "highest": 1}, "lowest=1, highest=1: must be finite, the first below"),
        (NumberGrade, {"pattern": "("}, r"pattern='\(' is no regular expression"),
        (NumberGrade, {"pattern": "a"}, "pattern='a' has no group"),
        (LabelGrade, {"labels": {"yes": 1, "YES": 0}}, "must be at least two different words"),
        (LabelGrade, {"labels": {"yes": 1, "no": float("inf")}}, "'no' is worth inf, not a finite number"),
    ],
)
def test_grades_that_cannot_work_are_refused_by_name(grade, settings, says):
    with pytest.raises(ValueError, match=says):
        grade(**settings)


def test_a_server_that_asks_for_no_key_needs_none(server, monkeypatch):
    monkeypatch.delenv("A_KEY")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert graded(judge_of(server, api_key_env=None)) == 0.5
