"""The environments are in tests/tasks/verifiers_envs, one module each, as verifiers looks for
them.
"""

import asyncio
import importlib
import json
import logging
import os
import pickle
import sys
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest

from rl.agents.rollouts import AgentEpisodes
from rl.rollouts.rubric import UnparsedAnswer
from rl.tasks.verifiers_task import VerifiersTask, get_episode_reward
from rl.tools.tool import render_call
from rl.types import Problem, Reply, SamplingParams, ToolCall
from rl.utils.errors import RunError
from tests.support.agent_endpoint import ScriptedGenerator
from tests.support.chat_server import ChatServer
from tests.support.fakes import completion
from tests.support.scored import reply
from tests.support.verifiers_episodes import PlayedEnvironment, list_metrics

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
    with closing(PlayedEnvironment(task)) as played:
        yield played


@pytest.fixture(scope="module")
def sums():
    yield from made("relay_sums")


@pytest.fixture(scope="module")
def guess():
    yield from made("relay_guess")


@pytest.fixture(scope="module")
def adder():
    yield from made("relay_adder")


def contents(messages):
    return [(message.role, message.content) for message in messages]


def told(rollout):
    """Return what each turn has told the model."""
    return [contents(turn.messages) for turn in rollout.turns]


def roles(rollout):
    return [(branch.turns, branch.role, branch.cause) for branch in rollout.branches]


def failure(played, *texts):
    rollout = played.play(played.first(), *texts)
    assert rollout.end == "failed"
    return rollout.failure


def call(name, **arguments):
    return render_call(ToolCall(name=name, arguments=arguments))


def test_rows_are_problems_with_their_opening(sums):
    task, problem = sums.task, sums.first()
    assert problem.question == f"{int(problem.answer) - 1} + 1 = ?"
    assert contents(task.environment(problem).opening()) == [
        ("system", "Add."),
        ("user", problem.question),
    ]
    train = {p.id for p in islice(task.train_problems(seed=0), len(task._train))}
    held = {p.id for p in task.eval_sets()["held_out"]}
    assert train | held == {f"relay_sums/{n}" for n in range(40)}
    assert not train & held
    assert (
        task.train_problems(seed=0).problem(70) == list(islice(task.train_problems(seed=0), 71))[70]
    )


def test_environment_is_only_for_the_checks_before_a_run(sums):
    environment = sums.task.environment(sums.first())
    assert not environment.single_turn
    with pytest.raises(RuntimeError, match="`open_player`"):
        asyncio.run(environment.step(Reply(text="1", completion=completion("1"))))


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
    problem = sums.first()
    text = text.format(answer=problem.answer)
    rollout = sums.play(problem, text)
    reward = 0.8 * right + 0.2 * short
    assert (rollout.text, rollout.end, told(rollout)) == (
        text,
        "done",
        [[("system", "Add."), ("user", problem.question)]],
    )
    length = len(text.rpartition("</think>\n\n")[2])
    assert list_metrics(rollout) == {
        "length": length,
        "right": right,
        "short": short,
        "reward": reward,
    }
    rubric = pickle.loads(pickle.dumps(sums.task.rubric(seed=0)))
    score = rubric.score(rollout)
    assert (score.reward, score.correct) == (reward, correct)


def test_reward_or_environment_that_raises_fails_the_rollout(sums, guess):
    assert "TaskError: task SumTask scoring: ValueError: this reward raises" in failure(
        sums, "raise"
    )
    assert "EnvError: Guess.run(): ValueError: invalid literal for int()" in failure(
        guess, "a dozen"
    )


def test_episodes_of_a_task_each_get_its_data(sums):
    problem = sums.first()
    rewards = [list_metrics(sums.play(problem, problem.answer))["reward"] for _ in range(3)]
    assert rewards == [1.0] * 3


def test_episodes_that_run_at_once_get_their_own_replies(sums):
    problems = list(islice(sums.task.train_problems(seed=0), 12))
    answers = {p.question: p.answer for p in problems[1::2]}

    def answer(prompt):
        return next((a for question, a in answers.items() if f"\n{question}<" in prompt), "x")

    rollouts = sums.play_all(problems, answer)
    assert [list_metrics(rollout)["right"] for rollout in rollouts] == [0.0, 1.0] * 6


def test_episodes_share_one_http_client(sums):
    server = sums.task._env._interception
    problems = list(islice(sums.task.train_problems(seed=0), 3))
    at_once = []

    def answer(prompt):
        at_once.append({id(client.client) for client in server.clients.values()})
        return "1"

    sums.play_all(problems, answer)
    assert [len(clients) for clients in at_once] == [1, 1, 1]
    assert server.clients == {}


def test_episode_that_a_limit_ended_is_unparsed():
    problem = Problem(id="a", question="b", answer="c")
    with pytest.raises(UnparsedAnswer):
        get_episode_reward(reply(problem, "text"))


def test_keys_of_episodes_are_not_logged(sums, caplog):
    caplog.set_level(logging.INFO)
    assert sums.play(sums.first(), "raise").end == "failed"
    assert "this reward raises" in caplog.text
    assert "sk-relay" not in caplog.text


def test_proxy_of_the_environment_is_not_asked_for_this_machine(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "intranet")  # restored afterwards
    with play_odd("Scored") as played:
        assert played.play(played.first(), "a").failure is None


def test_episode_with_too_many_turns_is_not_scored(guess):
    rollout = guess.play(guess.first(), "-1", max_turns=2)
    assert (rollout.end, rollout.failure, len(rollout.turns)) == ("turns", None, 2)
    with pytest.raises(UnparsedAnswer, match="the episode was not scored: turns"):
        get_episode_reward(rollout)


def test_environment_answers_turn_by_turn(guess):
    problem = guess.first()
    number = int(problem.answer)
    rollout = guess.play(problem, str(number - 1), str(number + 1), str(number))
    assert told(rollout)[1:] == [[("user", "higher")], [("user", "lower")]]
    assert roles(rollout) == [((0, 1, 2), "main", "")]
    assert list_metrics(rollout) == {"found": 1.0, "reward": 1.0, "guesses": 3.0}


def test_tools_are_announced_called_and_answered(adder):
    problem = adder.first()
    number = int(problem.answer) - 1000
    calls = [call("adder_add", a=number, b=1000), problem.answer]
    prompts = []

    def answer(prompt):
        prompts.append(prompt)
        return calls.pop(0)

    (rollout,) = adder.play_all([problem], answer)
    # By the chat template, which reads the schemas.
    (schema,) = [json.loads(line) for line in prompts[0].splitlines() if line.startswith('{"type"')]
    assert schema["function"]["name"] == "adder_add"
    assert schema["function"]["parameters"]["required"] == ["a", "b"]
    assert told(rollout) == [
        [("system", "Add."), ("user", problem.question)],
        [("tool", problem.answer)],
    ]
    assert roles(rollout) == [((0, 1), "main", "")]
    assert list_metrics(rollout) == {"calls": 1.0, "right": 1.0, "reward": 1.0}


def test_wrong_calls_are_answered_with_the_error(adder):
    calls = [call("no"), call("adder_add", a="x", b=1), "7"]
    rollout = adder.play(adder.first(), *calls)
    (unknown,), (wrong_type,) = told(rollout)[1:]
    assert unknown == ("tool", "Error: there is no tool 'no'; the tools are adder_add")
    assert "valid integer" in wrong_type[1]
    assert list_metrics(rollout)["calls"] == 2.0


def test_full_context_ends_the_conversation_and_is_scored(adder):
    problem, calls = adder.first(), call("adder_add", a=1, b=1)
    turn = adder.play(problem, calls, "2").turns[0]
    # Room for the call, but not for the result of the tool.
    num_tokens = len(turn.prompt_ids) + len(turn.completion.token_ids) + 5
    rollout = adder.play(problem, calls, num_tokens=num_tokens)
    assert [turn.text for turn in rollout.turns] == [calls]
    assert (rollout.end, rollout.failure) == ("done", None)
    assert list_metrics(rollout) == {"calls": 0.0, "right": 0.0, "reward": 0.0}


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


def test_tool_servers_end_with_the_player(adder):
    before = processes_of("relay_adder")
    with closing(PlayedEnvironment(adder.task)):
        assert len(processes_of("relay_adder")) == len(before) + 1
    assert processes_of("relay_adder") == before


# Refusals


def odd(*names, **options):
    """Return a task of these classes, given by their name or by a function."""
    relay_odd = importlib.import_module("relay_odd")
    classes = tuple(getattr(relay_odd, name) if isinstance(name, str) else name() for name in names)
    given = {"taskset": "odd_one", "classes": classes, "held_out": 0.3, **options}
    return VerifiersTask.Config(**given).build()


def play_odd(*names, **options):
    return closing(PlayedEnvironment(odd(*names, **options)))


PARTS = {"role": "user", "content": [{"type": "text", "text": "look"}]}
ASKED = {"role": "user", "content": "1 + 1 = ?"}
REPLIED = {"role": "assistant", "content": "2"}


def rows(**data):
    return importlib.import_module("relay_odd").taskset(**data)


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (
            [lambda: rows(prompt=[PARTS])],
            {},
            "odd_one/0 cannot be trained on: its prompt has parts that are not text",
        ),
        (
            [lambda: rows(prompt=[ASKED, REPLIED])],
            {},
            "its prompt must begin and end with a message to the model",
        ),
        ([lambda: rows(image="debian")], {}, "requires image 'debian', but the subprocess runtime"),
        (["Boxed"], {}, "BoxedTask needs a container runtime"),
        (["Endless"], {}, "is endless: set max_problems"),
        (["Scored", "Duo"], {}, "seat is empty, but Duo has several: player, partner"),
        (["Scored", "Duo"], {"seat": "judge"}, "seat='judge': Duo has player, partner"),
        (["Scored", "Duo"], {"seat": "player"}, "partner of Duo have no model"),
        (["Scored"], {"settings": {"nonsense": 1}}, "nonsense"),
        (
            ["Scored"],
            {"environment_settings": {"interception": '{"multiplex": 4}'}},
            "interception.server.multiplex",
        ),
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
    with play_odd(*names, **options) as played:
        assert message in failure(played, *texts)


def test_endless_episode_ends_at_its_time_limit():
    with play_odd("Stuck") as played:
        rollout = played.play(played.first(), "a", timeout_s=0.5)
        assert rollout.failure == "the agent was stopped at its time limit; it wrote nothing"
        assert played.task._env._interception.sessions == {}


def test_environment_that_cannot_be_started_is_told():
    with pytest.raises(RunError, match=r"the environment cannot be started: OSError\('no data"):
        PlayedEnvironment(odd("Scored", "BrokenStart"))


# What other harnesses and environments do


def test_other_seat_is_played_by_its_own_client():
    with ChatServer() as server:
        server.answers = [
            lambda request: f"{request['model']} heard {request['messages'][-1]['content']}"
        ]
        partner = json.dumps({"model": "elder", "client": {"base_url": server.url}})
        settings = {"partner": partner}
        with play_odd("Scored", "Duo", seat="player", environment_settings=settings) as played:
            rollout = played.play(played.first(), "my words", "thanks")
    assert told(rollout)[1] == [("user", "partner: elder heard my words")]
    assert roles(rollout) == [((0, 1), "main", "")]
    assert list_metrics(rollout)["reward"] == 2.0


def test_environment_may_open_rows_without_a_prompt():
    with play_odd("Unprompted", "Opener") as played:
        problem = played.first()
        name = json.loads(problem.question)["name"]
        rollout = played.play(problem, "a")
    assert told(rollout) == [[("user", name)]]


def test_replies_that_the_model_has_not_given_are_part_of_the_prompt():
    with play_odd("Scored", "Ventriloquist") as played:
        rollout = played.play(played.first(), "a", "b")
    assert [turn.text for turn in rollout.turns] == ["a", "b"]
    assert roles(rollout) == [((0,), "main", ""), ((1,), "main", "rewritten")]
    assert told(rollout)[1][1:] == [
        ("assistant", "a"),
        ("user", "and?"),
        ("assistant", "I say so"),
        ("user", "and?"),
    ]


def test_row_may_have_examples_of_replies():
    with play_odd("Examples") as played:
        problem = played.first()
        opening = played.task.environment(problem).opening()
        rollout = played.play(problem, "2")
    assert contents(opening) == [("user", "row 1000")]
    assert told(rollout) == [
        [("user", "row 1000"), ("assistant", "1000"), ("user", problem.question)]
    ]
    assert [turn.text for turn in rollout.turns] == ["2"]


def test_environment_may_rewrite_the_opening():
    with play_odd("Scored", "Preface") as played:
        rollout = played.play(played.first(), "a")
    assert told(rollout)[0][0] == ("system", "You are somebody else.")


def play_harness(harness, *texts, **limits):
    settings = {"agent": json.dumps({"harness": harness})}
    with play_odd("Scored", environment_settings=settings) as played:
        rollout = played.play(played.first(), *texts, **limits)
    assert rollout.failure is None
    assert list_metrics(rollout)["reward"] == len(rollout.turns)
    return rollout


@pytest.mark.parametrize("kind", ["responses", "messages"])
def test_harness_may_speak_another_dialect(kind):
    rollout = play_harness(
        {"id": "relay_harnesses", "kind": kind}, call("add_one", a=6), "<think>Yes.</think>\n7"
    )
    (system, question), result = told(rollout)
    assert system == ("system", "Add.")
    assert question[1].startswith("row ")
    assert result == [("tool", "7")]
    assert roles(rollout) == [((0, 1), "main", "")]


def test_harness_may_stream():
    rollout = play_harness({"id": "relay_harnesses", "kind": "streamed"}, "hello")
    assert rollout.text == "hello"


def test_rewritten_history_is_a_branch():
    rollout = play_harness({"id": "relay_harnesses", "kind": "rewrite"}, "long words", "short")
    assert roles(rollout) == [((0,), "main", ""), ((1,), "main", "rewritten")]
    assert "You said: long words" in told(rollout)[1][1][1]
    assert all(branch.is_trained for branch in rollout.branches)


def test_sub_agent_is_a_branch():
    rollout = play_harness(
        {"id": "relay_harnesses", "kind": "sub_agent"}, "my plan", "looks good", "done"
    )
    assert roles(rollout) == [((1,), "sub-agent", "agent"), ((0, 2), "main", "")]
    assert told(rollout)[2] == [("user", "looks good")]


# verifiers' own harnesses are programs


@pytest.fixture
def programs_need_no_download(monkeypatch):
    """Run the scripts of harnesses with this Python, which has what they would install."""
    from verifiers.v1.runtimes import Runtime

    async def prepare(self, script, env=None, **options):
        await self.write("harness_program.py", script.encode())
        return [sys.executable, "harness_program.py"]

    monkeypatch.setattr(Runtime, "prepare_uv_script", prepare)


@pytest.mark.usefixtures("programs_need_no_download")
def test_null_harness_of_verifiers_is_recorded():
    rollout = play_harness({"id": "null"}, "hello")
    assert (rollout.text, roles(rollout)) == ("hello", [((0,), "main", "")])


@pytest.mark.usefixtures("programs_need_no_download")
def test_program_of_a_harness_ends_with_its_episode():
    async def scenario(played):
        generator = ScriptedGenerator(reply=str, go_on=asyncio.Event())
        episodes = AgentEpisodes(generator=generator, player=played.player, max_tokens=5000)
        sampling = SamplingParams(max_tokens=10, num_samples=1)
        playing = asyncio.create_task(episodes.run([played.first()], sampling=sampling))
        while not generator.calls:
            await asyncio.sleep(0.01)
        assert len(processes_of("harness_program.py")) == 1
        playing.cancel()
        await asyncio.wait({playing})

    settings = {"agent": json.dumps({"harness": {"id": "null"}})}
    with play_odd("Scored", environment_settings=settings) as played:
        played.run(scenario(played))
    assert processes_of("harness_program.py") == []


@pytest.mark.usefixtures("programs_need_no_download")
def test_bash_harness_of_verifiers_compacts_its_history():
    harness = {"id": "bash", "compaction": {"summarize_at_tokens": 1500}}
    rollout = play_harness(
        harness,
        call("bash", command="echo 'one two'"),
        call("bash", command="seq 400"),
        "I have seen numbers up to 400.",
        "Done.",
    )
    assert told(rollout)[1] == [("tool", "one two\n")]
    ((_, result), (_, request)) = told(rollout)[2]
    assert result.startswith("1\n2\n3\n")
    assert request.startswith("You are performing a CONTEXT CHECKPOINT COMPACTION")
    assert "I have seen numbers up to 400." in told(rollout)[3][1][1]
    assert roles(rollout) == [((0, 1, 2), "main", ""), ((3,), "main", "rewritten")]


def test_evaluation_may_have_other_settings():
    task = VerifiersTask.Config(
        taskset="relay_sums", settings={"num": 10}, eval_settings={"first": 100, "num": 5}
    ).build()
    assert {p.answer for p in task.eval_sets()["held_out"]} == {str(n + 1) for n in range(100, 105)}
    assert {p.answer for p in islice(task.train_problems(seed=0), 10)} == {
        str(n + 1) for n in range(10)
    }
