"""The environments are in tests/tasks/verifiers_envs, one module each, as verifiers looks for
them.
"""

import asyncio
import importlib
import json
import os
import pickle
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest

from rl.rollouts.rubric import UnparsedAnswer
from rl.tasks.verifiers_task import VerifiersTask, get_episode_reward
from rl.tools.tool import render_call
from rl.types import Problem, Reply, ToolCall
from rl.utils.threads import LoopThread
from tests.support.chat_server import ChatServer
from tests.support.fakes import completion
from tests.support.scored import reply

THREAD = LoopThread("environments")
ENVS = Path(__file__).parent / "verifiers_envs"

pytestmark = pytest.mark.medium


@pytest.fixture(scope="module", autouse=True)
def environments_are_importable():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ENVS))
        patch.setenv("PYTHONPATH", str(ENVS))  # for tool servers, which are programs
        yield


def made(taskset, **options):
    task = VerifiersTask.Config(taskset=taskset, **{"held_out": 0.3, **options}).build()
    yield task
    task.close()


@pytest.fixture(scope="module")
def sums():
    yield from made("relay_sums")


@pytest.fixture(scope="module")
def guess():
    yield from made("relay_guess")


@pytest.fixture(scope="module")
def adder():
    yield from made("relay_adder")


def first(task):
    return next(task.train_problems(seed=0))


def contents(messages):
    return [(message.role, message.content) for message in messages]


async def play(task, problem, *texts):
    """Return the observations of one episode."""
    environment = task.environment(problem)
    try:
        return [await stepped(environment, text) for text in texts]
    finally:
        await THREAD.start(environment.close())


def stepped(environment, text):
    return THREAD.start(environment.step(Reply(text=text, completion=completion(text))))


def played(task, problem, *texts):
    return asyncio.run(play(task, problem, *texts))


def failure(task, *texts):
    with pytest.raises(RuntimeError) as caught:
        played(task, first(task), *texts)
    return str(caught.value)


def test_rows_are_problems_with_their_opening(sums):
    problem = first(sums)
    assert problem.question == f"{int(problem.answer) - 1} + 1 = ?"
    assert contents(sums.environment(problem).opening()) == [
        ("system", "Add."),
        ("user", problem.question),
    ]
    train = {p.id for p in islice(sums.train_problems(seed=0), len(sums._train))}
    held = {p.id for p in sums.eval_sets()["held_out"]}
    assert train | held == {f"relay_sums/{n}" for n in range(40)}
    assert not train & held
    assert (
        sums.train_problems(seed=0).problem(70) == list(islice(sums.train_problems(seed=0), 71))[70]
    )


@pytest.mark.parametrize(
    ("text", "right", "short", "correct"),
    [
        ("{answer}", 1.0, 1.0, True),
        ("<think>hm, hm</think>\n\n{answer}", 1.0, 1.0, True),
        ("1000", 0.0, 1.0, False),
        ("no idea", 0.0, 0.0, False),
    ],
)
def test_rubric_gives_the_environments_rewards(sums, text, right, short, correct):
    problem = first(sums)
    text = text.format(answer=problem.answer)
    (observation,) = played(sums, problem, text)
    reward = 0.8 * right + 0.2 * short
    assert observation.messages == ()
    parts = {"length": len(text.rpartition("</think>\n\n")[2]), "right": right, "short": short}
    assert observation.metrics == {
        f"verifiers/{n}": v for n, v in {**parts, "reward": reward}.items()
    }
    rubric = pickle.loads(pickle.dumps(sums.rubric(seed=0)))
    score = rubric.score(reply(problem, text, observation=observation))
    assert (score.reward, score.correct) == (reward, correct)


@pytest.mark.parametrize(
    ("text", "content", "thoughts", "called"),
    [
        (" 5 ", " 5 ", None, []),
        ("<think>Or 6?</think> 5 ", "5", "Or 6?", []),
        ("Or 6?</think> 5 ", "5", "Or 6?", []),
        ("<think>\nPerhaps 5", "", "Perhaps 5", []),
        ("<think>a</think> I add. {call}", "I add.", "a", ["<think>x</think>"]),
        ("I add. {call} Done.", "I add.", None, ["<think>x</think>"]),
        ("<think>not {call} yet", "", "not {call} yet", []),
    ],
)
def test_response_tells_thoughts_from_text_and_calls(text, content, thoughts, called):
    from rl.tasks.verifiers_bridge import to_response  # importing verifiers takes seconds

    call = render_call(ToolCall(name="write", arguments={"text": "<think>x</think>"}))
    text, thoughts = (None if t is None else t.replace("{call}", call) for t in (text, thoughts))
    message = to_response(Reply(text=text, completion=completion(text)), call_prefix="c").message
    assert (message.content, message.reasoning_content) == (content, thoughts)
    assert [json.loads(c.arguments)["text"] for c in message.tool_calls or []] == called


def test_reward_or_environment_that_raises_fails_the_rollout(sums, guess):
    assert (
        failure(sums, "raise") == "TaskError: task SumTask scoring: ValueError: this reward raises"
    )
    assert failure(guess, "a dozen").startswith(
        "EnvError: Guess.run(): ValueError: invalid literal for int()"
    )


def test_episodes_of_a_task_each_get_its_data(sums):
    problem = first(sums)
    rewards = [
        played(sums, problem, problem.answer)[0].metrics["verifiers/reward"] for _ in range(3)
    ]
    assert rewards == [1.0] * 3


def test_episodes_that_run_at_once_get_their_own_replies(sums):
    problems = list(islice(sums.train_problems(seed=0), 12))

    async def all_of_them():
        texts = [p.answer if i % 2 else "x" for i, p in enumerate(problems)]
        return await asyncio.gather(
            *(play(sums, p, t) for p, t in zip(problems, texts, strict=True))
        )

    rights = [
        observation.metrics["verifiers/right"] for (observation,) in asyncio.run(all_of_them())
    ]
    assert rights == [float(i % 2) for i in range(12)]


def test_episode_that_a_limit_ended_is_unparsed():
    problem = Problem(id="a", question="b", answer="c")
    with pytest.raises(UnparsedAnswer):
        get_episode_reward(reply(problem, "text"))


def test_environment_answers_turn_by_turn(guess):
    problem = first(guess)
    number = int(problem.answer)
    low, high, right = played(guess, problem, str(number - 1), str(number + 1), str(number))
    told = [contents(observation.messages) for observation in (low, high, right)]
    assert told == [[("user", "higher")], [("user", "lower")], []]
    assert right.metrics == {
        "verifiers/found": 1.0,
        "verifiers/reward": 1.0,
        "verifiers/guesses": 3.0,
    }
    assert low.metrics == {}


def test_tools_are_announced_called_and_answered(adder):
    problem = first(adder)
    system, user = adder.environment(problem).opening()
    assert system.content.startswith("Add.\n\n# Tools\n")
    (schema,) = [
        json.loads(line) for line in system.content.splitlines() if line.startswith('{"type"')
    ]
    assert schema["function"]["name"] == "adder_add"
    assert schema["function"]["parameters"]["required"] == ["a", "b"]
    assert contents([user]) == [("user", problem.question)]
    number = int(problem.answer) - 1000
    call = json.dumps({"name": "adder_add", "arguments": {"a": number, "b": 1000}})
    called, end = played(adder, problem, f"<tool_call>\n{call}\n</tool_call>", problem.answer)
    assert contents(called.messages) == [("tool", problem.answer)]
    assert end.metrics == {"verifiers/calls": 1.0, "verifiers/right": 1.0, "verifiers/reward": 1.0}


def test_invalid_calls_are_answered_with_the_error(adder):
    texts = [
        '<tool_call>{"name": "adder_add"}</tool_call><tool_call>{"name": "no", "arguments": '
        "{}}</tool_call>",
        '<tool_call>{"name": "adder_add", "arguments": {"a": "x", "b": 1}}</tool_call>',
        "7",
    ]
    first_two, wrong_type, end = played(adder, first(adder), *texts)
    assert [m.content.partition(".")[0] for m in first_two.messages] == [
        'Error: the tool call is not an object with a string "name" and an object "arguments"',
        "Error: there is no tool 'no'; the tools are adder_add",
    ]
    assert "valid integer" in wrong_type.messages[0].content
    assert end.metrics["verifiers/calls"] == 3.0


def processes_of(module):
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        if parent == os.getpid() and module.encode() in words:
            found.append(folder.name)
    return found


def test_tool_servers_end_with_the_task(adder):
    played(adder, first(adder), "7")
    assert len(processes_of("relay_adder")) == 1
    adder.close()
    assert processes_of("relay_adder") == []


# Refusals


def odd(*names, **options):
    """Return a task of these classes, given by their name or by a function."""
    relay_odd = importlib.import_module("relay_odd")
    classes = tuple(getattr(relay_odd, name) if isinstance(name, str) else name() for name in names)
    given = {"taskset": "odd_one", "classes": classes, "held_out": 0.3, **options}
    return VerifiersTask.Config(**given).build()


PARTS = {"role": "user", "content": [{"type": "text", "text": "look"}]}


def rows(**data):
    return importlib.import_module("relay_odd").taskset(**data)


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        ([lambda: rows(prompt=None)], {}, "odd_one/0 cannot be trained on: it has no prompt"),
        (
            [lambda: rows(prompt=[PARTS])],
            {},
            "cannot be trained on: its prompt has parts that are not text",
        ),
        ([lambda: rows(image="debian")], {}, "requires image 'debian', but the subprocess runtime"),
        (["Boxed"], {}, "BoxedTask needs a container runtime"),
        (["Endless"], {}, "is endless: set max_problems"),
        (["Scored", "Duo"], {}, "seat is empty, but Duo has several: player, partner"),
        (["Scored", "Duo"], {"seat": "judge"}, "seat='judge': Duo has player, partner"),
        (["Scored", "Duo"], {"seat": "player"}, "partner of Duo have no model"),
        (["Scored"], {"settings": {"nonsense": 1}}, "nonsense"),
        ([], {"taskset": "nowhere_v1"}, "taskset 'nowhere_v1' not found"),
        (
            [],
            {"taskset": "relay_earlier"},
            "for verifiers before 0.4 have load_environment and no Taskset",
        ),
        (["Scored"], {"held_out": 0.0}, "30 rows leave 30 to train on and 0 to evaluate on"),
    ],
)
def test_unsuitable_environment_is_refused_with_the_reason(names, options, message):
    with pytest.raises(ValueError, match=r".") as caught:
        odd(*names, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("names", "options", "texts", "message"),
    [
        (["Scored", "Twice"], {}, ["a", "b"], "seat 'agent' plays several runs in one episode"),
        (
            ["Scored", "Ventriloquist"],
            {},
            ["a", "b"],
            "it contains a reply that the model has not given",
        ),
        (
            ["Scored", "Preface"],
            {},
            ["a"],
            "it does not continue the conversation, but begins another or",
        ),
        ([rows], {}, ["a"], "it has no rewards, so nothing can be learned from it"),
        (
            ["Stuck"],
            {"settings": {"scoring_s": 0.05}},
            ["a"],
            "ended before its rewards were computed",
        ),
    ],
)
def test_episode_that_relay_cannot_train_on_fails(names, options, texts, message):
    with closing(odd(*names, **options)) as task:
        assert message in failure(task, *texts)


def test_endless_episode_ends_when_it_is_closed():
    async def scenario(task):
        environment = task.environment(first(task))
        await THREAD.start(task._host.start())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stepped(environment, "a"), timeout=0.5)
        run = environment._run
        assert not run.done()
        await THREAD.start(environment.close())
        assert run.done()

    with closing(odd("Stuck")) as task:
        asyncio.run(scenario(task))
        assert task._host.policy.episodes == {}


def test_other_seat_is_played_by_its_own_client():
    with ChatServer() as server:
        server.answers = [
            lambda request: f"{request['model']} heard {request['messages'][-1]['content']}"
        ]
        partner = json.dumps({"model": "elder", "client": {"base_url": server.url}})
        settings = {"partner": partner}
        with closing(odd("Scored", "Duo", seat="player", environment_settings=settings)) as task:
            asked, end = played(task, first(task), "my words", "thanks")
    assert contents(asked.messages) == [("user", "partner: elder heard my words")]
    assert end.metrics["verifiers/reward"] == 2.0


def test_evaluation_may_have_other_settings():
    task = VerifiersTask.Config(
        taskset="relay_sums", settings={"num": 10}, eval_settings={"first": 100, "num": 5}
    ).build()
    assert {p.answer for p in task.eval_sets()["held_out"]} == {str(n + 1) for n in range(100, 105)}
    assert {p.answer for p in islice(task.train_problems(seed=0), 10)} == {
        str(n + 1) for n in range(10)
    }
