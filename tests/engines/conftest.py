"""The engines start from a clean slate: nothing about a world is set by hand."""

import os
import subprocess
from pathlib import Path

import pytest

from harness.engines import PACELINE, TRAIN, check_run

_SET_BY_HAND = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # so that every engine trains the same model bit for bit, and 4 workers fit on 2 cores


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable helps the workers to find each other; all use one thread."""
    for name in (*_SET_BY_HAND, *(name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMIX_")))):
        monkeypatch.delenv(name, raising=False)
    for name, value in _ONE_THREAD.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of what `paceline train --workers 2` trains: the same command under any engine must train it too."""
    folder = tmp_path_factory.mktemp("model")
    env = {name: value for name, value in os.environ.items() if name not in _SET_BY_HAND} | _ONE_THREAD
    command = [*PACELINE, *TRAIN, "--workers", "2"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return check_run(Path(folder, "runs"), done.stdout, launcher="started here")
