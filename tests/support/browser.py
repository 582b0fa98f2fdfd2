"""Headless browser pages that record their errors, dialogs and requests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.browser import find_browser

if TYPE_CHECKING:  # Only `make test-report` needs Playwright.
    from playwright.sync_api import Browser, Dialog, Page

WAIT_MS = 20_000
"""Time limit for anything that a page is to show, in milliseconds."""


@dataclass
class Opened:
    """A page and the errors, dialogs and requests it has produced."""

    page: Page
    errors: list[str] = field(default_factory=list)
    """Exceptions, and errors and warnings on the console."""
    requests: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)
    ready_s: float = 0.0
    """Time from the request to the first curve."""

    def dismiss(self, dialog: Dialog) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def texts(self, selector: str) -> list[str]:
        """Return the texts of all matching elements, in order."""
        return self.page.locator(selector).all_inner_texts()

    def count(self, selector: str) -> int:
        return self.page.locator(selector).count()

    def numbers(self, selector: str, attribute: str) -> list[int]:
        """Return a numeric attribute of all matching elements."""
        return [
            int(element.get_attribute(attribute) or "")
            for element in self.page.locator(selector).all()
        ]

    def until(self, expression: str) -> None:
        """Wait until the expression is true; `Page.wait_for_function` is forbidden by the page's
        policy.

        Raises:
            TimeoutError: it never was.
        """
        deadline = time.monotonic() + WAIT_MS / 1000
        while not self.page.evaluate(expression):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {WAIT_MS} ms: {expression}")
            self.page.wait_for_timeout(20)

    def go(self, section: str, until: str) -> None:
        """Open a section of the report and wait until an element of it is there."""
        self.page.evaluate("name => document.getElementById(name).scrollIntoView()", section)
        self.page.wait_for_selector(f"#{section} {until}")


@contextmanager
def browser() -> Iterator[Browser]:
    """Yield a headless browser that is closed at the end of the block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Containers lack the user namespaces that Chromium's sandbox needs, and room in /dev/shm;
        # only our own files are opened.
        launched = playwright.chromium.launch(
            executable_path=str(find_browser()), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        try:
            yield launched
        finally:
            launched.close()


@contextmanager
def opened(
    browser: Browser, file: Path, *, width: int = 1360, drawn: bool = True, **options: Any
) -> Iterator[Opened]:
    """Open the file and wait for its first curve, or for its body if it has no curves.

    Args:
        drawn: False: the curves are below the window, and not waited for.
        options: of the browser's context, such as `color_scheme`.
    """
    context = browser.new_context(viewport={"width": width, "height": 900}, **options)
    context.set_default_timeout(WAIT_MS)
    try:
        page = context.new_page()
        seen = Opened(page=page)
        page.on("request", lambda request: seen.requests.append(request.url))
        page.on("pageerror", lambda error: seen.errors.append(str(error)))
        page.on(
            "console",
            lambda said: (
                seen.errors.append(said.text) if said.type in ("error", "warning") else None
            ),
        )
        page.on("dialog", seen.dismiss)
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready]")
        if drawn and "reward" in page.locator("#overview").inner_text():
            page.wait_for_selector("#curves [data-drawn]")
        seen.ready_s = page.evaluate("performance.now()") / 1000
        yield seen
    finally:
        context.close()
