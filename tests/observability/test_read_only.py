"""Errors and warnings of a run without write permission, in an unprivileged process."""

import io
import json
import logging
import re
import shutil
import tempfile
from pathlib import Path

import pytest

from actors.recording import record_process
from rl.observability.logs import setup_logging
from rl.observability.metrics import MetricsWriter
from rl.observability.run_folder import RunFolder
from rl.utils.errors import RunError
from tests.support.disks import run_unprivileged


@pytest.fixture
def folder():
    """Yield a folder that everybody can enter and write to, unlike pytest's own folders."""
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


def test_read_only_dump_folder_is_refused(folder):
    (folder / "outputs").mkdir()
    (folder / "outputs").chmod(0o555)
    answer = run_unprivileged(lambda: said(lambda: RunFolder.create(folder / "outputs" / "today", "run")))
    path = folder / "outputs"
    assert answer == f"ValueError: {path}/today/run cannot be a run's folder: {path} is not writable"
    assert list(path.iterdir()) == []


def test_folder_that_becomes_read_only_stops_the_metrics(folder, capsys):
    def go_on():
        with RunFolder.create(folder, "run") as made:
            made.path.chmod(0o555)
            made.logs.chmod(0o555)
            undo = setup_logging("controller", folder=made.logs)
            answer = said(lambda: MetricsWriter(made.metrics))
            logging.getLogger("rl").warning("seen")
            undo()
            return json.dumps([answer, capsys.readouterr().err])

    answer, console = json.loads(run_unprivileged(go_on))
    path = folder / "run"
    unwritten = f"{path}/metrics.jsonl was not written, its previous content is intact: Permission denied"
    assert answer == f"UnwrittenError: {unwritten}"
    seen, unwritten = console.splitlines()
    assert seen.endswith("rl: seen")
    says = (
        rf".*WARNING .*{path}/logs/controller-0\.log was not written: Permission denied; the run goes on, .*"
    )
    assert re.fullmatch(says, unwritten)


def test_process_that_cannot_record_logs_a_warning(folder):
    (folder / "logs").mkdir()
    (folder / "logs").chmod(0o555)

    def act():
        told = io.StringIO()
        logging.getLogger("actors.recording").addHandler(logging.StreamHandler(told))
        record_process(folder / "logs", role="trainer", rank=1)
        return told.getvalue()

    told = f"{folder}/logs: trainer-1 is not recorded: Permission denied\n"
    assert run_unprivileged(act) == told
