"""The wall clock, which may jump by hours, only makes time stamps for people.

Every use in the product is listed here with its purpose; measuring and waiting use a monotonic
clock.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PRODUCT = ("losses", "rl", "actors", "configs")

STAMPS = {
    "rl/agents/endpoint/answering.py": "when a reply was given, as clients are told",
    "rl/observability/spans.py": "the origin of spans; they go on by the monotonic clock",
    "rl/observability/events.py": "the stamps of events",
    "rl/doctor.py": "how long ago the last step was, as the doctor shows it",
    "rl/observability/run_folder.py": "the name of a run's folder; since when its status holds",
    "rl/report.py": "when a report was written, as it says",
    "rl/tinker/service/service.py": "stamps in answers, and the clock of checkpoints that expire",
}
"""Purpose of each file's use of the wall clock."""

WALL_CLOCKS = {
    "time": ("time", "time_ns", "localtime", "gmtime", "ctime", "strftime", "CLOCK_REALTIME"),
    "datetime": ("now", "utcnow", "today", "fromtimestamp"),
    "date": ("today", "fromtimestamp"),
}
FILE_TIMES = ("st_mtime", "st_mtime_ns", "st_ctime", "st_ctime_ns", "getmtime", "getctime")


def wall_clock_uses(source: str) -> list[int]:
    """Return the lines that use a wall clock, or the times of files."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
            if node.attr in WALL_CLOCKS.get(owner, ()) or node.attr in FILE_TIMES:
                found.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [node.lineno for name in node.names if name.name in WALL_CLOCKS["time"]]
    return sorted(found)


def test_the_wall_clock_is_used_only_where_listed():
    files = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]
    using = {str(path.relative_to(ROOT)) for path in files if wall_clock_uses(path.read_text())}
    assert using == set(STAMPS)
