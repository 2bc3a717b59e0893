"""Open a report in headless Chromium, driven by Playwright: what it shows, how fast, and what went wrong."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def chromium_path() -> str | None:
    """The installed Chromium, the system's or `playwright install chromium`'s; None if there is none."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is not None:
        return found
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    return own if Path(own).exists() else None


@contextmanager
def open_page(
    path: Path, chromium: str, *, width: int = 1500, height: int = 1000
) -> Iterator[tuple[Page, list[str], float]]:
    """(the page, errors and requests so far, milliseconds until the report was ready).

    The list gets an entry for each error of a script, each message of the console that is an error or a
    warning, and each request beyond the file itself.
    """
    with sync_playwright() as playwright:
        # No sandbox: containers run as root. No GPU: what a server has not.
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": width, "height": height})
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("console", lambda message: _note(problems, message))
        page.on("request", lambda request: _outside(problems, request.url, path))
        page.set_default_timeout(60_000)
        began = time.perf_counter()
        page.goto(path.resolve().as_uri())
        page.wait_for_function("window.report && window.report.ready > 0")
        load_ms = (time.perf_counter() - began) * 1e3
        page.set_default_timeout(10_000)
        yield page, problems, load_ms
        browser.close()


def _note(problems: list[str], message) -> None:
    if message.type in ("error", "warning"):
        problems.append(f"{message.type}: {message.text}")


def _outside(problems: list[str], url: str, path: Path) -> None:
    if url != path.resolve().as_uri() and not url.startswith(("data:", "blob:")):
        problems.append(f"request: {url}")
