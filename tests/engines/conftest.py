"""Fixtures for engines: no rank or address variable is set beforehand."""

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from pathlib import Path

import pytest

from harness.engines import PACELINE, TRAIN, check_run, model_of, wait_for
from harness.faults import FLAGS, TASK, left_behind, variables

_SET_BY_HAND = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # so that every engine trains the same model bit for bit, and 4 workers fit on 2 cores


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers find each other without the help of variables; all use one thread."""
    for name in (*_SET_BY_HAND, *(name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMIX_")))):
        monkeypatch.delenv(name, raising=False)
    for name, value in _ONE_THREAD.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the model that `paceline train --workers 2` trains: every engine must train the same model."""
    folder = tmp_path_factory.mktemp("model")
    done = _run_in(folder, [*PACELINE, *TRAIN, "--workers", "2"], {})
    return check_run(Path(folder, "runs"), done.stdout, launcher="started here")


@pytest.fixture(scope="session")
def calm_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the model that the task of harness/faults.py trains on one worker without faults."""
    folder = tmp_path_factory.mktemp("calm")
    with chdir(folder):
        env = variables()
    _run_in(folder, [*PACELINE, "train", TASK, *FLAGS, "--name", "calm"], env)
    return model_of(folder / "runs" / "calm")


@pytest.fixture
def uninterrupted(runs: Path, calm_model: str) -> Iterator[str]:
    """That hash; after the test, no process of its runs may be left, orphans included."""
    yield calm_model
    wait_for(lambda: not left_behind(), 10, lambda: f"processes left behind: {left_behind()}")


def _run_in(folder: Path, command: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in _SET_BY_HAND} | _ONE_THREAD
    done = subprocess.run(command, cwd=folder, env={**clean, **env}, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return done
