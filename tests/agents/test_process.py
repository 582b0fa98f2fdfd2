"""Agents in processes: their results and limits, what they leave behind, lost processes."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rl.agents.players import folder as play_folder
from rl.agents.players import process
from rl.agents.players.folder import remove_folder
from rl.agents.players.plays import AgentSpec
from rl.agents.players.process import AgentProcess, AgentProcessLostError
from rl.types import Problem
from rl.utils import namespaces
from rl.utils.errors import RunError
from rl.utils.processes import identify
from tests.support.forked import answer_in_fork
from tests.support.playing_agents import DAEMON, PLACE, Played

PR_SET_NO_NEW_PRIVS = 38
SECRETS = {
    "TEST_API_KEY": "sk-secret",
    "TEST_DATABASE": "postgres://me:secret@db/x",
    "TEST_KEPT_TOKEN": "kept",
    "TEST_PLAIN": "plain",
    # No secrets, but of another model than an episode's.
    "OPENAI_BASE_URL": "http://other",
    "OPENAI_API_KEY": "1",
}


@pytest.fixture(scope="module")
def played():
    played = Played(keep_env=["TEST_KEPT_TOKEN"])
    with pytest.MonkeyPatch.context() as patch:
        # Images of containers set it, and output would not be buffered.
        patch.delenv("PYTHONUNBUFFERED", raising=False)
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        played.run(played.agents.start())
    yield played
    played.close()


@pytest.fixture
def fresh():
    """A process that a test may break."""
    played = Played()
    yield played
    played.close()


def root_of(played):
    """Return the folder of the plays' folders."""
    return Path(played.play("pwd").output.strip()).parents[1]


def find_below(played):
    """Return the zygote and the processes of plays."""
    assert played.agents.process is not None
    (zygote,) = psutil.Process(played.agents.process.pid).children()
    return zygote, zygote.children(recursive=True)


def assert_nothing_left(played):
    assert find_below(played)[1] == []
    assert list(root_of(played).iterdir()) == []


def are_gone(pids, *, within_s=10.0):
    ends = time.monotonic() + within_s
    while any(identify(pid) is not None for pid in pids):
        if time.monotonic() > ends:
            return False
        time.sleep(0.01)
    return True


async def wait_for_pid(file):
    async with asyncio.timeout(20):
        while not (file.exists() and file.read_text().endswith("\n")):
            await asyncio.sleep(0.005)
    return [int(pid) for pid in file.read_text().split()]


# Commands


def test_command_returns_its_output_and_status(played):
    result = played.play("sh", "-c", "echo out; echo err >&2; printf '\\377'")
    assert (result.reason, result.status, result.value) == ("ok", 0, None)
    assert result.output == "out\nerr\n\ufffd"
    assert result.describe() == "ok"


@pytest.mark.parametrize(
    ("command", "status", "says"),
    [
        (("sh", "-c", "exit 3"), 3, "exit status 3"),
        (("sh", "-c", "kill -SEGV $$"), -11, "ended by SIGSEGV"),
        (("sh", "-c", "kill -9 $$"), -9, "ended by SIGKILL, perhaps because memory ran out"),
        (("sh", "-c", "sh -c 'kill -9 $$'; exit $?"), 137,
         "exit status 137, perhaps because memory ran out"),
        (("no-such-program",), 127, "exit status 127"),
        (("/etc/passwd",), 126, "exit status 126"),
        (("echo", "\ud800"), 126, "exit status 126"),
    ],
)  # fmt: skip
def test_failed_command_is_an_error_with_its_status(played, command, status, says):
    result = played.play(*command)
    assert (result.reason, result.status, result.describe()) == ("error", status, says)


def test_command_that_does_not_exist_is_named(played):
    output = played.play("no-such-program").output
    assert "the agent cannot be started: [Errno 2] No such file" in output
    assert "'no-such-program'" in output


def test_command_finds_programs_in_the_path_of_its_own_environment(played, tmp_path):
    (tmp_path / "my-agent").write_text("#!/bin/sh\necho mine")
    (tmp_path / "my-agent").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    assert played.play("my-agent", env={"PATH": path}).output == "mine\n"


def test_command_reads_nothing_and_has_a_session_with_default_signals(played):
    code = (
        "import os, signal, sys\n"
        "print([sys.stdin.read(), os.getsid(0) == os.getpid(), sorted(os.listdir('/proc/self/fd')),"
        "[signal.getsignal(n) is signal.SIG_IGN for n in (signal.SIGINT, signal.SIGTERM,"
        "signal.SIGHUP, signal.SIGCHLD)], signal.pthread_sigmask(0, [])])"
    )
    result = played.play(sys.executable, "-c", code)
    # 3 is the listing itself.
    assert (
        result.output == "['', True, ['0', '1', '2', '3'], [False, False, False, False], set()]\n"
    )


# Functions


@pytest.mark.parametrize(
    ("request_", "value"),
    [
        (
            ("give", {"reward": 0.5, "turns": [1, "é", None]}),
            {"reward": 0.5, "turns": [1, "é", None]},
        ),
        (("give", None), None),
        (("wait_and_show", "NAME"), "Ada"),
    ],
    ids=["sync", "none", "async"],
)
def test_function_returns_plain_data(played, request_, value):
    result = played.call(*request_, env={"NAME": "Ada"})
    assert (result.reason, result.status, result.output, result.value) == ("ok", 0, "", value)


def test_function_has_a_session_and_signals_of_its_own(played):
    assert played.call("describe_process").value == [True, "", True, True, True]


def test_function_keeps_variables_that_its_module_has_set(tmp_path):
    (tmp_path / "agent.py").write_text(
        "import os\nos.environ.update(TRACING='off', PATH='/mine')\n"
        "def play(x): return [os.environ['TRACING'], os.environ['PATH'], os.environ['MODEL']]"
    )
    played = Played(f"{tmp_path}/agent.py:play")
    assert played.play(env={"MODEL": "policy"}).value == ["off", "/mine", "policy"]
    result = played.play("env")
    assert (result.reason, "TRACING=off" in result.output) == ("ok", False)
    played.close()


def test_function_gets_a_problem(played):
    problem = Problem(id="p/7", question="?", answer="", info={"number": 7})
    assert played.play(argument=problem).value == ["p/7", 7]


@pytest.mark.parametrize(
    ("request_", "status", "output"),
    [
        (("leave", 4), 4, ""),
        (("leave", None), 0, ""),
        (("leave", "bad luck"), 1, "bad luck\n"),
        (("end_at_once", 5), 5, ""),
        (("be_killed",), -11, "the last line\n"),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, tuple) else "",
)
def test_function_ends_as_a_program_would(played, request_, status, output):
    result = played.call(*request_)
    assert (result.status, result.output) == (status, output)
    assert result.reason == ("ok" if status == 0 else "error")


def test_error_of_a_function_is_shown_with_its_traceback(played):
    result = played.call("fail")
    assert (result.reason, result.status, result.value) == ("error", 1, None)
    assert result.output.startswith("before the error\nTraceback (most recent call last):\n")
    assert result.output.endswith("LookupError: no such city\n")
    assert "playing_agents.py" in result.output
    assert "play_function.py" not in result.output


def test_value_that_is_no_json_is_left_out_and_named(played):
    result = played.call("give", {1, 2})
    assert (result.reason, result.value) == ("ok", None)
    assert "is not kept (TypeError: Object of type set is not JSON" in result.output


def test_value_that_is_too_long_is_left_out_and_named(played):
    result = played.call("give", "x" * 262_143)
    assert (result.reason, result.value) == ("ok", None)
    assert "is not kept (ValueError: 262145 bytes of JSON, at most 262144)" in result.output
    assert len(played.call("give", "x" * 262_142).value) == 262_142


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (("nest", 64), ""),
        (("nest", 65), "is not kept (ValueError: it is nested deeper than 64 levels)"),
        (("nest", 100_000), "is not kept (RecursionError: "),
        (("write_value", b"[" * 65 + b"]" * 65), "is not kept (it is nested too deeply)"),
        (("write_value", b"[" * 100_000), "is not kept (maximum recursion depth"),
        (("write_value", b"\xff"), "is not kept ('utf-8' codec can't decode"),
    ],
)
def test_value_that_is_nested_too_deeply_or_no_value_is_left_out_and_named(played, request_, said):
    result = played.call(*request_)
    assert result.reason == "ok"
    assert said in result.output
    assert (result.value is None) == bool(said)


def test_two_functions_at_once_have_different_environments(played, tmp_path):
    async def meet():
        requests = [("meet", str(tmp_path), name, other) for name, other in ("ab", "ba")]
        calls = [played.agents.play(AgentSpec(argument=r, time_limit_s=20)) for r in requests]
        return await asyncio.gather(*calls)

    assert [result.value for result in played.run(meet())] == ["a", "b"]
    assert played.call("show_variable", "MET").value[0] is None


def test_plays_draw_different_random_numbers(played):
    assert played.call("draw_number").value != played.call("draw_number").value


def test_argument_that_does_not_pickle_is_refused(played):
    with pytest.raises(ValueError, match=r"argument=<function .* cannot be sent"):
        played.play(argument=lambda: None)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("no_such_module:play", "cannot be loaded: there is no module 'no_such_module'"),
        (PLACE.replace("obey", "obay"), "has no 'obay'; did you mean 'obey'"),
    ],
)
def test_function_that_cannot_be_imported_is_told_at_the_start(function, says):
    played = Played(function)
    with pytest.raises(RunError, match=says):
        played.run(played.agents.start())
    assert played.agents.process is None
    played.close()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("import os; os._exit(7)", r"ended while importing .*agent.py:play' \(exit code 7\)"),
        ("import sys; sys.exit('no key')", r"cannot be loaded: SystemExit\('no key'\)"),
        ("1 / 0", "cannot be loaded: .*ZeroDivisionError: division by zero"),
    ],
)
def test_module_that_ends_its_process_is_told_at_the_start(tmp_path, line, says):
    (tmp_path / "agent.py").write_text(line)
    played = Played(f"{tmp_path}/agent.py:play")
    with pytest.raises(RunError, match=says):
        played.run(played.agents.start())
    played.close()


def test_import_that_takes_too_long_names_its_option(tmp_path):
    (tmp_path / "agent.py").write_text("import time; time.sleep(600)")
    played = Played(f"{tmp_path}/agent.py:play", import_timeout_s=0.3)
    with pytest.raises(TimeoutError, match=r"agent.py:play' within import_timeout_s=0.3 s"):
        played.run(played.agents.start())
    played.close()


def test_threads_of_the_import_are_told(tmp_path, caplog):
    (tmp_path / "agent.py").write_text(
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, name='of-the-import', daemon=True).start()"
        "\ndef play(x): return threading.active_count()\n"
    )
    played = Played(f"{tmp_path}/agent.py:play")
    assert played.play().value == 1
    assert "agent.py:play started threads, which agents do not have: of-the-import" in caplog.text
    played.close()


def test_close_does_not_wait_for_an_import(tmp_path):
    (tmp_path / "agent.py").write_text(
        f"import time; open('{tmp_path}/pid', 'w').write('1\\n'); time.sleep(600)"
    )
    played = Played(f"{tmp_path}/agent.py:play")

    async def close():
        starting = asyncio.create_task(played.agents.start())
        await wait_for_pid(tmp_path / "pid")
        await played.agents.close()
        with pytest.raises(RunError, match="the agent process was closed"):
            await starting

    played.run(asyncio.wait_for(close(), 30))
    played.close()


def test_function_is_needed_without_a_command():
    played = Played(None)
    with pytest.raises(ValueError, match="command=None needs an AgentProcess with a function"):
        played.play()
    played.close()


# Limits


@pytest.mark.parametrize("request_", [(), ("hang",)], ids=["command", "function"])
def test_agent_that_ignores_sigterm_ends_at_its_time_limit(played, request_):
    command = () if request_ else ("sh", "-c", "trap '' TERM; while :; do :; done")
    result = played.play(*command, argument=request_, time_limit_s=0.2)
    assert (result.reason, result.status) == ("time limit", -9)
    assert 0.2 <= result.wall_s < 5
    assert result.cpu_s > 0
    assert result.describe() == "stopped at its time limit"
    assert_nothing_left(played)


def test_flood_of_output_ends_with_its_last_part(played):
    result = played.play("seq", "100000000", max_output_bytes=2_000_000)
    assert (result.reason, result.status) == ("output limit", -9)
    assert len(result.output) <= 65_536
    # The first and the last line may be cut.
    numbers = [int(line) for line in result.output.splitlines()[1:-1]]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    # Up to 99,999 they have 588,889 bytes, then 7 each. Beyond the limit are the rest of a read and
    # what is in the pipe, of 65,536 bytes each.
    assert 301_580 <= numbers[-1] <= 301_590 + 2 * 9_370


def test_output_within_its_limit_is_no_error(played):
    code = "import sys; sys.stdout.write('a' * 99_999 + 'z')"
    result = played.play(sys.executable, "-c", code, max_output_bytes=100_000)
    assert (result.reason, len(result.output), result.output[-2:]) == ("ok", 65_536, "az")
    assert played.play(sys.executable, "-c", code, max_output_bytes=99_999).reason == "output limit"


WRITE_UNREAD = """
import fcntl, os, signal, time
guard = os.getppid()
fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, 1 << 20)
os.kill(guard, signal.SIGSTOP)
agent = os.getpid()
if os.fork() == 0:
    while os.getppid() == agent:
        time.sleep(0.001)
    os.kill(guard, signal.SIGCONT)
else:
    os.write(1, b"x" * 199_997 + b"end")
"""
"""Program that ends with 200,000 bytes in its pipe, before the guard has read any."""


def test_output_that_is_unread_at_the_end_counts(played):
    command = (sys.executable, "-c", WRITE_UNREAD)
    result = played.play(*command, max_output_bytes=200_000)
    assert (result.reason, result.status, result.output[-4:]) == ("ok", 0, "xend")
    assert played.play(*command, max_output_bytes=199_999).reason == "output limit"


def test_folder_over_its_limits_at_the_end_is_told(played):
    code = "for i in 1 2 3; do echo x > $i; done; mkdir a; head -c 9000 /dev/zero > $TMPDIR/b"
    assert played.play("sh", "-c", code, max_files=5, max_folder_bytes=30_000).reason == "ok"
    assert played.play("sh", "-c", code, max_files=4).reason == "folder limit"
    assert played.play("sh", "-c", code, max_folder_bytes=20_000).reason == "folder limit"


def test_full_folder_ends_an_agent_that_runs(played):
    code = "for i in $(seq 100); do echo x > $i; done; sleep 600"
    result = played.play("sh", "-c", code, max_files=99)
    assert (result.reason, result.status) == ("folder limit", -9)
    assert result.wall_s < 10


def test_single_file_is_bounded_by_the_kernel(played):
    result = played.play("dd", "if=/dev/zero", "of=big", "bs=1M", max_folder_bytes=1 << 20)
    assert (result.reason, result.status) == ("folder limit", -signal.SIGXFSZ)


def test_agents_are_killed_first_when_memory_runs_out(played):
    own = Path("/proc/self/oom_score_adj").read_text()
    code = "cat /proc/self/oom_score_adj; cat /proc/$PPID/oom_score_adj"
    assert played.play("sh", "-c", code).output == f"1000\n{own}"
    assert played.call("read_scores").value == ["1000\n", own]


# What agents leave behind


def test_daemon_in_a_session_of_its_own_is_gone_with_the_play(played, tmp_path):
    code = 'import subprocess, sys; subprocess.Popen([sys.executable, "-c", *sys.argv[1:]])'
    wait = f'{sys.executable} -c \'{code}\' "$0" "$1"; while ! [ -s "$1" ]; do sleep 0.01; done'
    result = played.play("sh", "-c", wait, DAEMON, str(tmp_path / "pid"))
    assert result.reason == "ok"
    (pid,) = map(int, (tmp_path / "pid").read_text().split())
    assert identify(pid) is None
    assert_nothing_left(played)


@pytest.mark.parametrize("code", ["sleep 600 & echo done", "exec >&- 2>&-; sleep 0.01; exit 0"])
def test_output_that_a_child_holds_or_the_agent_closes_delays_nothing(played, code):
    result = played.play("sh", "-c", code)
    assert (result.reason, result.output) == ("ok", "done\n" if "echo" in code else "")
    assert result.wall_s < 5
    assert_nothing_left(played)


def test_many_children_are_gone_with_the_play(played):
    code = "for i in $(seq 50); do setsid sh -c 'trap \"\" TERM; sleep 600 & wait' & done"
    assert played.play("sh", "-c", code).reason == "ok"
    assert_nothing_left(played)


def test_working_folder_is_the_plays_own_and_removed(played):
    code = "pwd; echo $HOME; echo $TMPDIR; echo $XDG_CACHE_HOME; ls -A; umask; mktemp; echo x > a"
    first, second = (played.play("sh", "-c", code).output.split("\n") for _ in range(2))
    work, home, temporary, cache, umask, made, _ = first
    folder = Path(work).parent
    assert [home, temporary, cache] == [f"{folder}/home", f"{folder}/tmp", f"{folder}/home/.cache"]
    assert (umask, Path(made).parent) == ("0022", folder / "tmp")
    assert second[0] != work
    assert not folder.exists()
    assert folder.parent.exists()


def test_function_has_the_folders_too(played):
    _, work, home = played.call("show_variable", "HOME").value
    assert Path(home) == Path(work).parent / "home"
    assert not Path(work).exists()


def test_home_can_be_kept_with_its_caches(played):
    code = "echo $HOME $TMPDIR; echo $XDG_CACHE_HOME"
    home, temporary, *cache = played.play("sh", "-c", code, keep_home=True).output.split()
    assert home == os.environ["HOME"]
    assert temporary != os.environ.get("TMPDIR", "/tmp")
    assert cache == [os.environ[name] for name in ("XDG_CACHE_HOME",) if name in os.environ]
    assert played.play("sh", "-c", "echo $HOME", env={"HOME": "/its/own"}).output == "/its/own\n"


def test_folder_without_permissions_is_removed(tmp_path):
    folder = tmp_path / "play"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "file").write_text("x")
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o755)
    (folder / "a" / "link").symlink_to(outside)
    (folder / "a" / "b").chmod(0)
    (folder / "a").chmod(0o500)

    def remove():
        # With capabilities root needs no permissions, and a program would get them back.
        namespaces._set_capabilities(0)
        assert namespaces.load_libc().prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
        with pytest.raises(PermissionError):
            shutil.rmtree(folder)
        remove_folder(str(folder))
        return folder.exists()

    assert answer_in_fork(remove) is False
    assert outside.stat().st_mode & 0o777 == 0o755


def test_deep_folder_is_removed(played):
    code = "import os\nfor _ in range(3000):\n    os.mkdir('d'); os.chdir('d')"
    assert played.play(sys.executable, "-c", code).status == 0
    assert_nothing_left(played)


# Files


def test_files_are_written_and_collected(played, tmp_path):
    (tmp_path / "outside").write_text("secret")
    code = (
        "cat src/in.txt; echo made > src/out.txt; ln -s src/out.txt link; mkfifo pipe;"
        f"ln -s {tmp_path}/outside leaves; ln -s {tmp_path} folder; head -c 300000 /dev/zero > big"
    )
    collect = ("src/out.txt", "link", "leaves", "folder/outside", "pipe", "src", "none", "big")
    result = played.play("sh", "-c", code, files={"src/in.txt": "né\n"}, collect=collect)
    assert (result.reason, result.output) == ("ok", "né\n")
    assert len(result.files["big"]) == play_folder.MAX_COLLECTED_BYTES == 262_144
    assert {**result.files, "big": ""} == {"src/out.txt": "made\n", "link": "made\n", "big": ""}


def test_files_are_collected_after_a_limit_too(played):
    code = "echo half > answer; exec yes"
    result = played.play("sh", "-c", code, collect=("answer",), max_output_bytes=1000)
    assert (result.reason, result.files) == ("output limit", {"answer": "half\n"})


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../x", "a//b", "./a", "", "a/", "a\0b", 7])
def test_path_outside_of_the_folder_is_refused(path):
    for settings in ({"files": {path: ""}}, {"collect": (path,)}):
        (name,) = settings
        with pytest.raises(
            ValueError, match=rf"^{name}: .* must be a relative path in the working"
        ):
            AgentSpec(**settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"command": "ls -l"}, "command='ls -l' must be a tuple of texts"),
        ({"command": ()}, r"command=\(\) must be a tuple of texts"),
        ({"command": ("a", 1)}, r"command=\('a', 1\) must be a tuple of texts"),
        ({"env": {"A=B": "c"}}, "env={'A=B': 'c'}: name and value must be texts"),
        ({"env": {"A": 1}}, "env={'A': 1}: name and value must be texts"),
        ({"files": {"a": "x", "a/b": "y"}}, "files: 'a' cannot be a file and hold 'a/b'"),
        ({"files": {"a": b"x"}}, r"files\['a'\] must be a text"),
        ({"collect": "a.txt"}, "collect='a.txt' must be a tuple of paths"),
        ({"time_limit_s": 0}, "time_limit_s=0 must be finite and above 0"),
        ({"time_limit_s": float("nan")}, "time_limit_s=nan must be finite and above 0"),
        ({"max_files": 0}, "max_files=0 must be at least 1"),
    ],
)
def test_bad_value_of_a_spec_is_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        AgentSpec(**settings)


def test_secrets_of_the_owner_are_left_out(played):
    names = [*SECRETS]
    result = played.play("env", env={"OPENAI_API_KEY": "of the endpoint"})
    there = dict(line.split("=", 1) for line in result.output.splitlines() if "=" in line)
    assert {name: there[name] for name in names if name in there} == {
        "TEST_KEPT_TOKEN": "kept",
        "TEST_PLAIN": "plain",
        "OPENAI_API_KEY": "of the endpoint",
    }
    assert played.call("show_variable", "TEST_API_KEY").value[0] is None
    assert played.call("show_variable", "TEST_PLAIN").value[0] == "plain"
    assert played.call("show_variable", "OPENAI_API_KEY").value[0] is None


# Ends


def test_cancelled_call_ends_its_agent(played, tmp_path):
    async def cancel():
        spec = AgentSpec(command=(sys.executable, "-c", DAEMON, str(tmp_path / "pid")))
        task = asyncio.create_task(played.agents.play(spec))
        pids = await wait_for_pid(tmp_path / "pid")
        task.cancel()
        await asyncio.wait([task])
        return task, pids

    task, pids = played.run(cancel())
    assert task.cancelled()
    assert are_gone(pids, within_s=0)
    assert_nothing_left(played)


def test_call_that_is_cancelled_at_once_leaves_nothing(played):
    async def cancel_all():
        spec = AgentSpec(command=("sleep", "600"))
        tasks = [asyncio.create_task(played.agents.play(spec)) for _ in range(20)]
        for task in reversed(tasks):
            # At different points of their start, most of them while they wait for it.
            await asyncio.sleep(0)
            task.cancel()
        start_s = time.monotonic()
        await asyncio.wait(tasks)
        return time.monotonic() - start_s

    # Less than the longest wait for the end of one.
    assert played.run(cancel_all()) < process.END_S / 2
    assert_nothing_left(played)


def test_play_ends_while_a_later_one_runs(played, tmp_path):
    async def overlap():
        code = f"while ! [ -e {tmp_path}/pid ]; do sleep 0.01; done"
        first = asyncio.create_task(played.agents.play(AgentSpec(command=("sh", "-c", code))))
        command = ("sh", "-c", f"echo 1 > {tmp_path}/pid; sleep 600")
        # Begun after the first, as requests keep their order.
        second = asyncio.create_task(played.agents.play(AgentSpec(command=command)))
        async with asyncio.timeout(20):
            await first
        assert not second.done()
        second.cancel()
        await asyncio.wait([second])

    played.run(overlap())


def test_event_ends_an_agent_with_its_output(played, tmp_path):
    async def end():
        event = asyncio.Event()
        code = f"echo half > answer; echo started; echo 1 > {tmp_path}/pid; sleep 600"
        spec = AgentSpec(command=("sh", "-c", code), collect=("answer",))
        task = asyncio.create_task(played.agents.play(spec, end=event))
        await wait_for_pid(tmp_path / "pid")
        event.set()
        return await task

    result = played.run(end())
    assert (result.reason, result.status, result.output) == ("ended", -9, "started\n")
    assert result.files == {"answer": "half\n"}


def test_owner_is_not_blocked_while_agents_start_and_flood(played):
    async def measure():
        spec = AgentSpec(command=("yes",), max_output_bytes=4 << 20)
        tasks = [asyncio.create_task(played.agents.play(spec)) for _ in range(8)]
        used_s = time.process_time()
        results = await asyncio.gather(*tasks)
        return results, time.process_time() - used_s

    results, used_s = played.run(measure())
    assert {result.reason for result in results} == {"output limit"}
    assert used_s < 0.5  # 32 MB are read elsewhere


def test_hundred_quick_plays_at_once_finish(played):
    async def play():
        specs = [AgentSpec(argument=("give", i), time_limit_s=50) for i in range(100)]
        return await asyncio.gather(*map(played.agents.play, specs))

    assert [result.value for result in played.run(play())] == list(range(100))
    assert_nothing_left(played)


def test_plays_leave_no_descriptor_open(played):
    played.play("true")
    zygote, _ = find_below(played)
    before = (psutil.Process().num_fds(), zygote.num_fds())
    for _ in range(5):
        played.play("true")
        played.play("no-such-program")
    assert (psutil.Process().num_fds(), zygote.num_fds()) == before


# Lost processes


def test_killed_zygote_fails_what_runs_and_the_next_play_works(fresh, tmp_path):
    async def kill():
        spec = AgentSpec(command=(sys.executable, "-c", DAEMON, str(tmp_path / "pid")))
        task = asyncio.create_task(fresh.agents.play(spec))
        pids = await wait_for_pid(tmp_path / "pid")
        find_below(fresh)[0].kill()
        with pytest.raises(AgentProcessLostError, match="the agent process ended"):
            await task
        return pids

    root = root_of(fresh)
    pids = fresh.run(kill())
    assert fresh.call("give", 3).value == 3
    assert are_gone(pids, within_s=0)
    assert not root.exists()
    find_below(fresh)[0].kill()
    assert fresh.call("give", 4).value == 4


def test_play_that_a_killed_zygote_has_not_begun_is_repeated(fresh):
    async def kill():
        zygote, _ = find_below(fresh)
        zygote.suspend()
        task = asyncio.create_task(fresh.agents.play(AgentSpec(argument=("give", 5))))
        # The first step of the call sends the request.
        await asyncio.sleep(0)
        zygote.kill()
        return await task

    fresh.call("give", 1)
    assert fresh.run(kill()).value == 5


def test_agent_that_kills_its_guard_fails_alone(fresh, tmp_path):
    async def play_two():
        code = f"while ! [ -e {tmp_path}/done ]; do sleep 0.01; done; echo ends by itself"
        other = asyncio.create_task(fresh.agents.play(AgentSpec(command=("sh", "-c", code))))
        with pytest.raises(AgentProcessLostError, match=r"guard of the agent ended \(signal 9\)"):
            await fresh.agents.play(AgentSpec(argument=("kill_parent", str(tmp_path / "pid"))))
        (tmp_path / "done").touch()
        return await other

    first = fresh.play("pwd").output
    assert fresh.run(play_two()).output == "ends by itself\n"
    pids = [int(pid) for pid in (tmp_path / "pid").read_text().split()]
    assert are_gone(pids, within_s=0)
    assert_nothing_left(fresh)
    assert Path(fresh.play("pwd").output).parents[1] == Path(first).parents[1]


def test_guard_that_does_not_answer_is_given_up(fresh, monkeypatch):
    fresh.call("give", 1)
    # Half a second in all: long before the guard would act.
    monkeypatch.setattr(process, "ANSWER_S", -19.5)
    stop = "kill -STOP $PPID; sleep 600"
    with pytest.raises(AgentProcessLostError, match=r"beyond time_limit_s=20"):
        fresh.play("sh", "-c", stop, time_limit_s=20)
    monkeypatch.undo()
    assert fresh.call("give", 3).value == 3
    ends = time.monotonic() + 10
    while find_below(fresh)[1]:
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_sigterm_for_all_processes_of_a_run_does_not_end_guards(fresh):
    fresh.call("give", 1)
    zygote, _ = find_below(fresh)
    guard = psutil.Process(fresh.agents.process.pid)
    code = f"kill -TERM $PPID {zygote.pid} {guard.pid}; echo sent"
    assert fresh.play("sh", "-c", code).output == "sent\n"
    assert fresh.call("give", 2).value == 2
    assert find_below(fresh)[0] == zygote


def test_close_ends_agents_and_refuses_others(tmp_path):
    played = Played(None)

    async def close():
        spec = AgentSpec(command=(sys.executable, "-c", DAEMON, str(tmp_path / "pid")))
        task = asyncio.create_task(played.agents.play(spec))
        pids = await wait_for_pid(tmp_path / "pid")
        await played.agents.close()
        return await task, pids

    root = root_of(played)
    result, pids = played.run(close())
    assert (result.reason, result.status) == ("ended", -9)
    assert are_gone(pids, within_s=0)
    assert not root.exists()
    with pytest.raises(RunError, match="the agent process was closed"):
        played.play("true")
    played.close()  # once more


OWNER = """
import asyncio, sys
from rl.agents.players.plays import AgentSpec
from rl.agents.players.process import AgentProcess
from tests.support.playing_agents import DAEMON
async def play():
    spec = AgentSpec(command=(sys.executable, "-c", DAEMON, sys.argv[1]))
    await AgentProcess().play(spec)
if __name__ == "__main__":
    asyncio.run(play())
"""


def test_killed_owner_leaves_no_process_and_no_folder(tmp_path):
    (tmp_path / "owner.py").write_text(OWNER)
    (tmp_path / "tmp").mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TMPDIR": str(tmp_path / "tmp"),
    }
    command = [sys.executable, str(tmp_path / "owner.py"), str(tmp_path / "pid")]
    with subprocess.Popen(command, env=environment) as owner:
        pids = asyncio.run(wait_for_pid(tmp_path / "pid"))
        pids += [child.pid for child in psutil.Process(owner.pid).children(recursive=True)]
        (root,) = (tmp_path / "tmp").glob("relay-agents-*")
        owner.kill()
    # Guard, zygote, guard of the play, agent; and Python's tracker of shared memory.
    assert len(set(pids)) >= 4
    assert are_gone(pids)
    ends = time.monotonic() + 10
    while root.exists():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match="agents run on Linux only, not on darwin"):
        AgentProcess()
