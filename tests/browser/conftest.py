"""A real browser: Debian's chromium, started once per session. Any error that the browser reports fails the test."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.boards import serving
from harness.processes import children

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = "/usr/bin/chromium"
WEBGL = ("--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader")  # on the CPU
FASTER = "--no-enable-lazy-source-positions"  # V8 would parse plotly's script twice: 1.3 s per page instead of 0.8


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "browser" in item.path.parent.parts[-1:]:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser(kept_processes: set[int]) -> Iterator["Browser"]:
    """Chromium without a window."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'paceline[dev]'")
    if shutil.which(CHROMIUM) is None:
        pytest.skip(f"needs {CHROMIUM}: tools/install_system_packages.sh")
    before = children(os.getpid()).keys()
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", f"--js-flags={FASTER}", *WEBGL])
        kept_processes |= children(os.getpid()).keys() - before
        yield chromium
        chromium.close()


@pytest.fixture
def page_options() -> dict[str, Any]:
    """Options of `page`, which a test or a module can override (`viewport`, `color_scheme`, `java_script_enabled` ...)."""
    return {}


@pytest.fixture
def page(browser: "Browser", page_options: dict[str, Any]) -> Iterator["Page"]:
    """A new page in its own context. An error in the console, or an uncaught exception, fails the test."""
    errors: list[str] = []
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce", **page_options})
    context.set_default_timeout(30_000)
    context.on("console", lambda said: errors.append(f"console: {said.text}") if said.type == "error" else None)
    context.on("weberror", lambda error: errors.append(f"uncaught: {error.error}"))
    yield context.new_page()
    context.close()
    assert not errors, "the browser saw errors:\n" + "\n".join(errors)


@pytest.fixture
def no_charts(page: "Page") -> None:
    """Do not load plotly: its script takes most of a page's time."""
    page.route("**/plotly-*", lambda route: route.fulfill(body="", content_type="text/javascript"))


@pytest.fixture
def own(tmp_path: Path) -> Iterator[str]:
    """A board for one test, which changes its records."""
    with serving(tmp_path) as server:
        yield server.url
