"""The pictures in docs/img, of real runs made for them: `make images`, about three minutes.

    python tools/screenshots.py [--runs DIR]      # with DIR, records that are there are not made again

Needs Debian's chromium (tools/install_system_packages.sh) and playwright.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "img"
CHROMIUM = "/usr/bin/chromium"
MINI, MLP = "fashion-mnist-mini", ["--model", "mlp:width=1024", "--reference-batch", "64", "--base-lr", "0.02"]
RUNS = {
    "two-workers": ["train", MINI, "--workers", "2", *MLP, "--epochs", "6", "--profile"],
    "four-parts": ["train", MINI, "--virtual-workers", "4", "--epochs", "6", "--measure-noise"],
    "one-worker": ["train", MINI, "--epochs", "6"],
    "high-lr": ["train", MINI, "--epochs", "4", "--base-lr", "0.4"],
    "scaling": ["scale", MINI, "--workers", "1,2,4", *MLP[:2]],
}


def main() -> None:
    """Make the runs that are not there, then take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="", metavar="DIR")
    args = parser.parse_args()
    runs = Path(args.runs or tempfile.mkdtemp(prefix="paceline-images-"))
    try:
        for name, command in RUNS.items():
            if not (runs / name).exists():
                paceline(*command, "--name", name, "--runs-dir", str(runs))
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            take(browser, runs)
            browser.close()
    finally:
        if not args.runs:
            shutil.rmtree(runs)


def take(browser: Browser, runs: Path) -> None:
    """All pictures."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    report = runs / "all.html"
    paceline("report", *(str(runs / name) for name in RUNS if name != "high-lr"), "--out", str(report))
    with opened(browser, report.as_uri(), "light") as page:
        page.screenshot(path=IMAGES / "report.png")
        shoot(page, "Scaling", "scaling.png")
    with opened(browser, report.as_uri(), "dark") as page:
        shoot(page, "Timeline", "timeline.png")
    board = subprocess.Popen(
        [sys.executable, "-m", "paceline", "board", str(runs), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert board.stdout is not None
    try:
        address = next(word for word in board.stdout.readline().split() if word.startswith("http"))
        with opened(browser, address, "dark") as page:
            for name in ("two-workers", "four-parts"):
                page.get_by_role("row", name=name).get_by_role("checkbox").check()
            page.wait_for_timeout(1500)
            page.screenshot(path=IMAGES / "board.png")
    finally:
        board.terminate()
        board.wait()


@contextmanager
def opened(browser: Browser, address: str, theme: str) -> Iterator[Page]:
    """A page of the size that a README shows, with all its charts drawn."""
    scheme = "dark" if theme == "dark" else "light"
    context = browser.new_context(viewport={"width": 1180, "height": 980}, color_scheme=scheme, reduced_motion="reduce")
    page = context.new_page()
    page.goto(address)
    page.wait_for_timeout(2500)
    yield page
    context.close()


def shoot(page: Page, heading: str, name: str) -> None:
    """The section with this heading."""
    section = page.locator("section", has=page.get_by_role("heading", name=heading, exact=True)).last
    section.scroll_into_view_if_needed()
    page.wait_for_timeout(1000)
    section.screenshot(path=IMAGES / name)


def paceline(*args: str) -> None:
    """Run a command as a user would."""
    print("paceline", *args, flush=True)
    subprocess.run([sys.executable, "-m", "paceline", *args], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
