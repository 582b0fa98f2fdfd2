"""The wall clock may jump by hours either way: it stamps what people read and decides nothing.

Every use of it in the library is listed here with what it is for; whatever measures or waits uses a monotonic
clock. That a whole run does not mind is shown in tests/runs/test_clock.py.
"""

import ast
import datetime
from pathlib import Path

from rl.observability.run_folder import RunFolder

ROOT = Path(__file__).parent.parent
FLOORS = ("losses", "rl", "actors", "configs")

STAMPS = {
    "rl/observability/activity.py": "since when, for readers on other machines",
    "rl/observability/span_file.py": "where the times of spans begin; they go on by the monotonic clock",
    "rl/observability/process_state.py": "for how long, as other machines tell it",
    "rl/observability/events.py": "the stamps of events",
    "rl/observability/health.py": "how long ago the last step was, as the doctor shows it",
    "actors/fault_injection.py": "the stamp of what was done, for tests",
    "rl/observability/run_folder.py": "the name of a run's folder; since when its status holds",
    "rl/report.py": "when a report was written, as it says",
    "rl/tinker/service/service.py": "the clock of stamps that the API shows",
    "rl/tinker/service/sessions.py": "a stamp in an answer",
    "rl/tinker/service/storage.py": "stamps in answers; when a checkpoint with a time to live ends",
    "rl/tinker/service/catalogue.py": "a stamp in an answer",
}
"""Files that look at the wall clock, and what for."""

WALL_CLOCKS = {
    "time": ("time", "time_ns", "localtime", "gmtime", "ctime", "strftime", "CLOCK_REALTIME"),
    "datetime": ("now", "utcnow", "today", "fromtimestamp"),
    "date": ("today", "fromtimestamp"),
}
FILE_TIMES = ("st_mtime", "st_mtime_ns", "st_ctime", "st_ctime_ns", "getmtime", "getctime")


def wall_clock_uses(source: str) -> list[int]:
    """Lines that name a wall clock, or the times of files, which are of one."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
            if node.attr in WALL_CLOCKS.get(owner, ()) or node.attr in FILE_TIMES:
                found.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [node.lineno for name in node.names if name.name in WALL_CLOCKS["time"]]
    return sorted(found)


def test_uses_are_found_however_they_are_written():
    uses = (
        "import time, datetime, os",
        "time.time()",
        "clock = time.time",
        "datetime.datetime.now()",
        "datetime.now()",
        "from time import time as now",
        "os.stat('x').st_mtime",
        "time.clock_gettime(time.CLOCK_REALTIME)",
    )
    assert wall_clock_uses("\n".join(uses)) == [2, 3, 4, 5, 6, 7, 8]
    assert wall_clock_uses("import time\ntime.monotonic() + time.perf_counter() + loop.time()") == []


def test_the_library_looks_at_the_wall_clock_only_to_stamp():
    files = [path for floor in FLOORS for path in (ROOT / floor).rglob("*.py")]
    using = {str(path.relative_to(ROOT)) for path in files if wall_clock_uses(path.read_text())}
    assert using == set(STAMPS)


def test_a_clock_that_is_set_back_names_no_folder_twice(tmp_path):
    times = iter([14, 9, 14, 9, 14])
    paths = []
    for _ in range(5):
        with RunFolder.create(
            tmp_path, "run", time_stamp=True, wall_clock=lambda: datetime.datetime(2026, 3, 29, next(times))
        ) as folder:
            folder.mark_finished()
            paths.append(folder.path.name)
    first, earlier = "run-20260329-140000", "run-20260329-090000"
    assert paths == [first, earlier, f"{first}-2", f"{earlier}-2", f"{first}-3"]
