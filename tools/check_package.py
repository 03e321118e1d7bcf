"""Build the wheel and the sdist, check both, and install the wheel where nothing else is installed.

    python tools/check_package.py [--torch lowest newest]

The wheel is built from the sdist, as an installer would build it. It is installed twice, in new environments: with the lowest
version of every dependency that pyproject.toml allows, and with the newest. In each, from an empty folder: train on two workers
in exact mode, write the report, and check the types of a program that uses Paceline (`py.typed`).

uv installs torch in 15 s, pip in minutes.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM = '''
"""A program of somebody else: mypy must find the types of Paceline's public names."""

import torch

import paceline


def make() -> paceline.Task:
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    return paceline.Task(
        name="line",
        model=lambda: torch.nn.Linear(1, 1),
        train=paceline.Arrays((x, 3 * x + 1)),
        objective=lambda model, batch: {"loss": (model(batch[0]) - batch[1]).square().mean(1)},
    )


result = paceline.train(make(), epochs=1, runs_dir="typed")
sha256: str = result.model_sha256
'''
WRONG = "\nwrong: int = paceline.train(make()).model_sha256\n"
"""mypy must refuse this line: if Paceline's types are missing, everything is Any and nothing is refused."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="*", default=["lowest", "newest"], choices=("lowest", "newest"))
    parser.add_argument("--python", default=sys.executable, help="the Python to install for")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paceline-package-") as folder:
        wheel = build(Path(folder))
        hashes = {which: install(wheel, which, given.python, Path(folder) / which) for which in given.torch}
    print(f"the package is fine; model hashes in exact mode: {hashes}")


def build(folder: Path) -> Path:
    """The sdist, the wheel made from it, and what is in both."""
    source = folder / "source"
    files = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    for name in filter(None, files):  # a clean copy: setuptools would also pack files of earlier builds
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(source))
    (sdist,), (wheel,) = ([*(folder / "dist").glob(pattern)] for pattern in ("*.tar.gz", "*.whl"))
    run(sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel))
    run(sys.executable, "-m", "check_wheel_contents", str(wheel))
    with zipfile.ZipFile(wheel) as archive, tarfile.open(sdist) as packed:
        names, sources = set(archive.namelist()), {name.partition("/")[2] for name in packed.getnames()}
    expected = {name.removeprefix("src/") for name in files if name.startswith("src/paceline/")}
    fail_if(expected - names, "the wheel lacks")
    fail_if({name for name in names if not name.startswith("paceline")}, "the wheel has, besides paceline,")
    fail_if({f"src/{name}" for name in expected} - sources, "the sdist lacks")
    print(f"built {wheel.name} ({wheel.stat().st_size / 2**20:.1f} MiB, {len(names)} files) and {sdist.name}", flush=True)
    return wheel


def install(wheel: Path, which: str, python: str, folder: Path) -> str:
    """Install the wheel in a new environment and use it. Returns the trained model's hash."""
    folder.mkdir()
    here = folder / "bin" / "python"
    lowest = ("--resolution=lowest-direct", "-r", str(ROOT / "pyproject.toml")) if which == "lowest" else ()
    uv = (sys.executable, "-m", "uv")
    run(*uv, "venv", "--quiet", "--python", python, "--clear", str(folder))
    run(*uv, "pip", "install", "--quiet", "--python", str(here), *lowest, str(wheel))
    paceline, empty = str(folder / "bin" / "paceline"), folder / "empty"
    empty.mkdir()
    torch = run(str(here), "-c", "import torch; print(torch.__version__)", cwd=empty).strip()
    train = "train fashion-mnist-mini --workers 2 --reduce exact --epochs 1 --max-steps 4 --model cnn --name first"
    run(paceline, *train.split(), cwd=empty)
    run(paceline, "report", cwd=empty)
    result = json.loads((empty / "runs" / "first" / "result.json").read_text())
    if result["status"] != "done" or not (empty / "runs" / "first" / "report.html").exists():
        sys.exit(f"with torch {torch}: the run ended with {result['status']}")
    program = empty / "program.py"
    program.write_text(PROGRAM)
    check_types = (sys.executable, "-m", "mypy", "--strict", "--python-executable", str(here), "--cache-dir", str(folder / "c"))
    run(*check_types, str(program), cwd=empty)
    run(str(here), str(program), cwd=empty)
    program.write_text(PROGRAM + WRONG)
    refused = subprocess.run([*check_types, str(program)], cwd=empty, capture_output=True, text=True)
    if "Incompatible types in assignment" not in refused.stdout:
        sys.exit(f"with torch {torch}: mypy does not see Paceline's types: {refused.stdout}")
    print(f"installed with torch {torch}: trained, reported, typed", flush=True)
    shutil.rmtree(folder)  # 4 GiB
    return f"{result['model_sha256'][:16]} (torch {torch})"


def fail_if(names: set[str], what: str) -> None:
    if names:
        sys.exit(f"{what} {', '.join(sorted(names)[:5])}")


def run(*command: str, cwd: Path | None = None) -> str:
    """The command's output; ends this program with it if the command fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"failed: {' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
