"""Stack dumps requested from real processes."""

import asyncio
import os
import re
import signal
import subprocess
from dataclasses import replace

from rl.observability.spans import read_state
from rl.observability.stacks import extract_busy_lines, request_stacks
from rl.utils.processes import identify
from tests.support.watched_child import watched_child


def asked(logs, *, timeout_s=20.0, **changed):
    state = replace(read_state(logs / "state" / "trainer-0.json"), **changed)
    return asyncio.run(request_stacks(state, logs, timeout_s=timeout_s))


def test_stacks_show_threads_and_tasks(tmp_path):
    with watched_child(tmp_path, "tasks") as child:
        text = asked(tmp_path)
        again = asked(tmp_path)
        assert child.poll() is None
    threads, _, tasks = text.partition("\nTask ")
    assert "in run_forever\n" in threads
    assert "and 2 more at the same place (most recent call first):\n" in tasks
    assert re.search(r"in wait\n.* in wait_for_an_answer\n.* in endpoint\n", tasks)
    assert again.count("most recent call") == text.count(
        "most recent call"
    )  # each request starts a new file
    (calls,) = (line for line in extract_busy_lines(text) if "wait_for_an_answer" in line)
    assert re.fullmatch(
        r"task at tests/support/watched_child\.py:\d+ wait_for_an_answer < .* endpoint", calls
    )


def test_native_code_that_holds_the_gil_has_thread_stacks(tmp_path):
    said = "(no stacks of tasks: the main thread does not run Python)\n"
    with watched_child(tmp_path, "native"):
        # The process reports that it is ready just before.
        while not (text := asked(tmp_path, timeout_s=0.3)).endswith(said):
            assert text
    assert "in hold_the_interpreter" in text


def test_stopped_dead_or_deaf_process_is_not_asked(tmp_path):
    with watched_child(tmp_path, "tasks") as child:
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert asked(tmp_path) == "no stacks: the process is stopped by a signal"
        with subprocess.Popen(["sleep", "60"]) as sleeper:
            said = asked(tmp_path, process=identify(sleeper.pid))
            assert said == "no stacks: the process does not listen yet"
            assert sleeper.poll() is None
            sleeper.kill()
        child.kill()
        child.wait()
        assert asked(tmp_path) == "no stacks: the process is dead"


def test_stacks_without_our_code_are_left_out_of_an_extract_busy_lines():
    frames = [
        ("/lib/python3.11/threading.py", "wait"),
        ("/x/site-packages/tqdm/_monitor.py", "run"),
    ]
    text = "Thread 0x1 (most recent call first):\n" + "".join(
        f'  File "{file}", line 60 in {function}\n' for file, function in frames
    )
    assert extract_busy_lines(text) == ["no thread is busy"]
    assert extract_busy_lines(f'{text}  File "/home/me/trainer.py", line 6 in step\n') == [
        "thread at /home/me/trainer.py:6 step"
    ]
