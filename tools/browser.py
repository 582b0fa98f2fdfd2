"""Find or install the headless browser of `make test-report`: `python -m tools.browser`.

The browser is the one that RELAY_BROWSER names, a Chromium on PATH, or, for root on Debian, the
package that apt-get installs. Playwright, of the dependency group `report`, drives it and brings no
browser.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
VARIABLE = "RELAY_BROWSER"
PACKAGES = ("chromium", "fonts-noto-core", "fonts-dejavu-core")
APT_DEADLINE_S = 900


class NoBrowserError(Exception):
    """No browser was found; the message says what to do."""


def find_browser(
    *, variables: Mapping[str, str] = os.environ, which: Callable[[str], str | None] = shutil.which
) -> Path:
    """Return the browser's path, or raise NoBrowserError."""
    given = variables.get(VARIABLE)
    if given:
        if os.access(given, os.X_OK) and Path(given).is_file():
            return Path(given)
        raise NoBrowserError(
            f"{VARIABLE}={given}: is no program: name a Chromium, or unset the variable"
        )
    found = next((path for name in NAMES if (path := which(name))), None)
    if found is None:
        raise NoBrowserError(
            f"no browser: none of {', '.join(NAMES)} is on PATH. Install Chromium (Debian, Ubuntu: "
            f"apt-get install chromium), or name one with {VARIABLE}=/path/to/it"
        )
    return Path(found)


def install_browser() -> Path:
    """Return the browser's path, installing Debian's package if there is no browser.

    Raises:
        NoBrowserError: there is no browser and none can be installed.
    """
    try:
        return find_browser()
    except NoBrowserError:
        if os.environ.get(VARIABLE) or os.geteuid() != 0 or not shutil.which("apt-get"):
            raise
    print(f"installing {', '.join(PACKAGES)} with apt-get: some minutes the first time", flush=True)
    apt = ["apt-get", "--yes", "--quiet", "--no-install-recommends"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for argv in ([*apt, "update"], [*apt, "install", *PACKAGES]):
        done = subprocess.run(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=APT_DEADLINE_S,
        )
        if done.returncode:
            raise NoBrowserError(
                f"{' '.join(argv)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
    return find_browser()


def main() -> int:
    """Return the exit status."""
    try:
        print(f"browser: {install_browser()}")
    except (NoBrowserError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
