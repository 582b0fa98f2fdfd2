"""What a user reads whose run may not write where it is told to; as an unprivileged process meets it."""

import io
import json
import logging
import re
import shutil
import tempfile
from pathlib import Path

import pytest

from actors.watching import be_watched
from rl.errors import RunError
from rl.observability.logs import setup_logging
from rl.observability.metrics import MetricsWriter
from rl.observability.run_folder import RunFolder, read_status
from tests.support.disks import as_nobody


@pytest.fixture
def folder():
    """One that everybody may enter and write; those of pytest are this user's alone."""
    path = Path(tempfile.mkdtemp(prefix="relay-test-"))
    path.chmod(0o777)
    yield path
    for made in (path, *path.rglob("*")):
        if made.is_dir():
            made.chmod(0o777)
    shutil.rmtree(path)


def said(function):
    try:
        function()
    except (RunError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_dump_folder_that_may_not_be_written_is_named(folder):
    (folder / "outputs").mkdir()
    (folder / "outputs").chmod(0o555)
    answer = as_nobody(lambda: said(lambda: RunFolder.create(folder / "outputs" / "today", "run")))
    path = folder / "outputs"
    assert answer == f"ValueError: {path}/today/run cannot be a run's folder: {path} is not writable"
    assert list(path.iterdir()) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_folder_that_may_not_be_written_is_named_and_stays_as_it_is(folder, overwrite):
    with RunFolder.create(folder, "run") as made:
        made.metrics.write_text("{}\n")
    made.path.chmod(0o555)
    answer = as_nobody(lambda: said(lambda: RunFolder.create(folder, "run", overwrite=overwrite)))
    assert answer == f"ValueError: {made.path} cannot be a run's folder: {made.path} is not writable"
    assert made.metrics.read_text() == "{}\n"
    assert read_status(made.path) == "running"


def test_the_lock_of_another_user_is_refused_by_name(folder):
    with RunFolder.create(folder, "run") as made:
        pass
    made.path.chmod(0o777)
    (made.path / ".lock").chmod(0o400)
    answer = as_nobody(lambda: said(lambda: RunFolder.create(folder, "run", overwrite=True)))
    assert answer == f"ValueError: {made.path} cannot be a run's folder: Permission denied"


def test_a_folder_that_becomes_read_only_stops_the_metrics_and_not_the_logs(folder, capsys):
    def go_on():
        with RunFolder.create(folder, "run") as made:
            made.path.chmod(0o555)
            made.logs.chmod(0o555)
            undo = setup_logging("controller", folder=made.logs)
            answer = said(lambda: MetricsWriter(made.metrics))
            logging.getLogger("rl").warning("seen")
            undo()
            return json.dumps([answer, capsys.readouterr().err])

    answer, console = json.loads(as_nobody(go_on))
    path = folder / "run"
    unwritten = f"{path}/metrics.jsonl was not written, what was there is as it was: Permission denied"
    assert answer == f"UnwrittenError: {unwritten}"
    seen, unwritten = console.splitlines()
    assert seen.endswith("rl: seen")
    says = rf".*WARNING .*{path}/logs/controller-0\.log was not written: Permission denied; all goes on, .*"
    assert re.fullmatch(says, unwritten)


def test_a_process_that_may_not_say_what_it_does_says_so_in_its_log_and_goes_on(folder):
    (folder / "logs").mkdir()
    (folder / "logs").chmod(0o555)

    def act():
        told = io.StringIO()
        logging.getLogger("actors.watching").addHandler(logging.StreamHandler(told))
        be_watched(folder / "logs", role="trainer", rank=1)
        return told.getvalue()

    told = f"{folder}/logs/state: what trainer-1 does is not told: Permission denied\n"
    assert as_nobody(act) == told
