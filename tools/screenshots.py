"""Take the pictures in docs/img, of runs trained for them and of a committed scaling result: `make images`, about 2 minutes.

    python tools/screenshots.py [--runs DIR]      # with DIR, existing records are used again

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
from typing import Literal

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
IMAGES, SCALING = ROOT / "docs" / "img", ROOT / "bench" / "results" / "scale_16_cores.json"
CHROMIUM = "/usr/bin/chromium"
MINI, MLP = "fashion-mnist-mini", ["--model", "mlp:width=1024", "--reference-batch", "64", "--base-lr", "0.02"]
RUNS = {
    "two-workers": ["train", MINI, "--workers", "2", *MLP, "--epochs", "6", "--profile"],
    "four-parts": ["train", MINI, "--virtual-workers", "4", "--epochs", "6", "--measure-noise"],
    "one-worker": ["train", MINI, "--epochs", "6"],
    "high-lr": ["train", MINI, "--epochs", "4", "--base-lr", "0.4"],
}
STUDY = """
task = "fashion-mnist-mini"
seeds = 2
reference = "sgd"
[options]
model = "mlp:width=128"
epochs = 3
[arms.sgd]
[arms.adamw]
optimizer = "adamw"
base_lr = 0.002
[arms."a learning rate that is too high"]
base_lr = 1000.0
"""


def main() -> None:
    """Train the runs that do not exist yet, then take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="", metavar="DIR")
    args = parser.parse_args()
    folder = Path(args.runs or tempfile.mkdtemp(prefix="paceline-images-"))
    runs = folder / "runs"
    try:
        for name, command in RUNS.items():
            if not (runs / name).exists():
                paceline(folder, *command, "--name", name)
        if not (runs / "study-optimizers").exists():
            (folder / "optimizers.toml").write_text(STUDY)
            paceline(folder, "study", "optimizers.toml")
        (runs / "scaling").mkdir(exist_ok=True)
        shutil.copy(SCALING, runs / "scaling" / "scale.json")
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            take(browser, folder)
            browser.close()
    finally:
        if not args.runs:
            shutil.rmtree(folder)


def take(browser: Browser, folder: Path) -> None:
    """Take all pictures."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    paceline(folder, "report", "two-workers")
    with opened(browser, (folder / "runs" / "two-workers" / "report.html").as_uri(), "light", height=1170) as page:
        page.screenshot(path=IMAGES / "report.png")
    paceline(folder, "report", "scaling")
    with opened(browser, (folder / "runs" / "scaling" / "report.html").as_uri(), "light") as page:
        shoot(page, "Scaling", "scaling.png")
        shoot(page, "Where a step's time went", "step_time.png")
    with opened(browser, (folder / "runs" / "two-workers" / "report.html").as_uri(), "dark") as page:
        shoot(page, "Timeline", "timeline.png")
    command = [sys.executable, "-m", "paceline", "board", "--port", "0"]
    board = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    assert board.stdout is not None
    try:
        address = next(word for word in board.stdout.readline().split() if word.startswith("http"))
        compared = "&".join(f"run={name}" for name in ("two-workers", "one-worker", "four-parts"))
        with opened(browser, f"{address}#{compared}", "dark") as page:
            page.screenshot(path=IMAGES / "board.png")
    finally:
        board.terminate()
        board.wait()


@contextmanager
def opened(browser: Browser, address: str, theme: str, height: int = 980) -> Iterator[Page]:
    """A page of a size that suits the README, with all its charts drawn."""
    scheme: Literal["dark", "light"] = "dark" if theme == "dark" else "light"
    context = browser.new_context(viewport={"width": 1180, "height": height}, color_scheme=scheme, reduced_motion="reduce")
    page = context.new_page()
    page.goto(address)
    page.add_style_tag(content=".toolbar { position: static !important }")  # it would cover what is below it
    page.wait_for_timeout(2500)
    yield page
    context.close()


def shoot(page: Page, heading: str, name: str) -> None:
    """Take a picture of the section with this heading."""
    section = page.locator("section", has=page.get_by_role("heading", name=heading, exact=True)).last
    section.scroll_into_view_if_needed()
    page.wait_for_timeout(1000)
    section.screenshot(path=IMAGES / name)


def paceline(folder: Path, *args: str) -> None:
    """Run a command as a user would."""
    print("paceline", *args, flush=True)
    subprocess.run([sys.executable, "-m", "paceline", *args], check=True, cwd=folder, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
