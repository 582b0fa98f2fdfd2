"""Stacks asked of real processes."""

import asyncio
import os
import signal
import subprocess
from dataclasses import replace

import pytest

from rl.observability.process_state import read_state
from rl.observability.stack_excerpt import excerpt, parse_stacks
from rl.observability.stacks import ask
from rl.process_id import identify
from tests.support.watched_child import watched_child


def asked(logs, *, timeout_s=20.0, **changed):
    state = replace(read_state(logs / "state" / "trainer-0.json"), **changed)
    return asyncio.run(ask(state, logs / "state", timeout_s=timeout_s))


def test_threads_and_tasks_say_where_they_are(tmp_path):
    with watched_child(tmp_path, "tasks") as child:
        text = asked(tmp_path)
        again = asked(tmp_path)
        assert child.poll() is None
    (main,) = (s for s in parse_stacks(text) if not s.is_task)
    assert "run_forever" in [frame.function for frame in main.frames]
    (equal,) = (s for s in parse_stacks(text) if "and 2 more at the same place" in s.title)
    assert [frame.function for frame in equal.frames] == ["wait", "wait_for_an_answer", "endpoint"]
    assert len(parse_stacks(again)) == len(parse_stacks(text))  # The file begins anew each time.
    (calls,) = (line for line in excerpt(text) if "wait_for_an_answer" in line)
    assert calls.startswith("task at ")
    assert calls.endswith(" endpoint")
    assert "tests/support/watched_child.py:" in calls


def test_a_thread_that_waits_for_a_lock_is_seen(tmp_path):
    with watched_child(tmp_path, "lock"):
        lines = excerpt(asked(tmp_path))
    assert any(" take_twice" in line and line.startswith("thread at tests/support/") for line in lines)


def test_stacks_of_threads_come_from_native_code_that_holds_the_interpreter(tmp_path):
    said = "(no stacks of tasks: the main thread does not run Python)\n"
    with watched_child(tmp_path, "native"):
        # It says that it is ready just before.
        while not (text := asked(tmp_path, timeout_s=0.3)).endswith(said):
            assert text
    assert "in hold_the_interpreter" in text


def test_a_stopped_process_is_said_to_be_stopped_and_not_asked(tmp_path):
    with watched_child(tmp_path, "lock") as child:
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert asked(tmp_path) == "no stacks: the process is stopped by a signal"
        os.kill(child.pid, signal.SIGCONT)
        assert "take_twice" in asked(tmp_path)


def test_a_dead_process_is_said_to_be_dead(tmp_path):
    with watched_child(tmp_path, "lock") as child:
        child.kill()
        child.wait()
        assert asked(tmp_path) == "no stacks: the process is dead"
    assert excerpt("no stacks: the process is dead") == ["no stacks: the process is dead"]


def test_a_process_that_does_not_listen_is_not_sent_what_would_end_it(tmp_path):
    with watched_child(tmp_path, "lock"), subprocess.Popen(["sleep", "60"]) as sleeper:
        said = asked(tmp_path, process=identify(sleeper.pid))
        assert said == "no stacks: the process does not listen yet"
        assert sleeper.poll() is None
        sleeper.kill()


def test_a_process_of_another_machine_is_not_asked(tmp_path):
    with watched_child(tmp_path, "lock"):
        assert asked(tmp_path, host="node-3") == "no stacks: it runs on node-3"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            'Thread 0x1 (most recent call first):\n  File "/lib/python3.11/threading.py", line 324 in wait\n'
            '  File "/x/site-packages/tqdm/_monitor.py", line 60 in run\n',
            ["no thread is busy"],
        ),
        (
            'Thread 0x1 (most recent call first):\n  File "/lib/python3.11/threading.py", line 324 in wait\n'
            '  File "/home/me/trainer.py", line 60 in wait\n',
            ["thread at /lib/python3.11/threading.py:324 wait < /home/me/trainer.py:60 wait"],
        ),
        (
            'Task a (most recent call first):\n  File "/x/site-packages/monarch/a.py", line 1 in handle\n',
            ["no thread is busy"],
        ),
    ],
)
def test_idle_is_who_waits_in_nobodys_code(text, line):
    assert excerpt(text) == line


def test_an_excerpt_is_bounded():
    block = "Thread 0x1 (most recent call first):\n" + '  File "/home/me/a.py", line 1 in deep\n' * 50
    lines = excerpt(block * 40)
    assert len(lines) == 7
    assert lines[-1] == "and 34 more"
    assert lines[0].count("deep") == 4
