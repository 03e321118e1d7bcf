"""Studies in processes: killed, in several slots, with another process at work."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from harness.processes import paceline, run
from paceline import cli
from paceline.study.runs import Call, claim
from paceline.study.study import list_runs, read_study
from unit.study import test_study as unit_tests
from unit.study.test_study import POINTS, TINY, made, results, write, write_task


@pytest.fixture(autouse=True)
def own_process(runs: Path) -> Iterator[None]:
    """Reset what would otherwise leak from one call into the next: each has its own process in real use."""
    path = list(sys.path)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.path[:] = path
    sys.modules.pop("my_task", None)


trained = unit_tests.trained


def test_a_killed_study_can_be_continued(trained):
    write_task("samples == 16 and training and once('killed') and os.kill(os.getpid(), signal.SIGKILL)")
    done = paceline("study", write(POINTS))
    assert done.returncode == -signal.SIGKILL, done
    assert cli.run(["study", "tiny.toml"]) == 0
    assert trained == ["large-seed0 resumed", "small-seed1", "large-seed1"]


@pytest.mark.parametrize("when", ["the slots have skipped it", "the study waits for it"])
def test_slots_resume_runs_abandoned_by_another_process(trained, when):
    runs = list_runs(read_study(Path(write(TINY))))
    folder = Path("runs/study-tiny")
    (folder / ".claims").mkdir(parents=True)
    theirs = claim(Call(folder, "theirs"), runs[0])
    assert theirs.__enter__()
    options = [sys.executable, "-m", "paceline", "study", "tiny.toml", "--per-device", "2"]
    with subprocess.Popen(options, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True) as study:
        if when == "the study waits for it":
            assert study.stdout
            assert any("another process is training the remaining runs" in line for line in study.stdout)
        else:
            while len(list(folder.glob("*.run.json"))) < 2 and study.poll() is None:
                time.sleep(0.01)
        theirs.__exit__(None, None, None)
        study.communicate(timeout=300)
    assert study.returncode == 0
    assert [run["status"] for run in results()["runs"]] == ["done"] * 4


def test_two_slots_train_each_run_once_even_if_one_slot_dies():
    write_task("samples == 16 and training and once('killed') and os.kill(os.getpid(), signal.SIGKILL)")
    done = paceline("study", write(POINTS), "--per-device", "2", env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done
    assert "2 at a time" in done.stdout
    assert [line[:5] for line in done.stdout.splitlines()[1:5]] == [f"[{i}/4]" for i in range(1, 5)], done.stdout
    assert [run["status"] for run in results()["runs"]] == ["done"] * 4
    tries = {path.name: json.loads(path.read_text())["tries"] for path in Path("runs/study-tiny").glob("*.run.json")}
    assert sorted(tries.values()) == [1, 1, 1, 2]
    assert results()["per_device"] == 2
    assert "2 runs shared each device" in done.stdout
    folders = {path.name for path in Path("runs/study-tiny").iterdir() if path.is_dir()} - {".claims"}
    assert folders == {"small-seed0", "small-seed1", "large-seed0", "large-seed1"}
    ends = [len(re.findall(r"^done: ", path.read_text(), re.M)) for path in Path("runs/study-tiny").glob("*seed*.log")]
    assert ends == [1] * 4


def test_a_mistake_in_one_slot_ends_them_all():
    text = TINY.replace("global_batch = 32", "global_batch = 1024").replace("virtual_workers = 4", "virtual_workers = 512")
    flags = ("--per-device", "2", "--set", "epochs=100000", "--seeds", "1")
    done = paceline("study", write(text), *flags, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 2, done
    assert done.stderr.startswith("paceline: arm 'V = 4', seed 0: 128 training samples cannot feed 512"), done
    assert len(done.stderr.splitlines()) == 1


def test_slots_end_with_the_study_and_their_runs_can_be_continued():
    """A run sends SIGINT to the study, as Ctrl-C at a terminal would: the slots are in sessions of their own."""
    write_task("training and once('stopped') and os.kill(os.getppid(), signal.SIGINT)")
    done = paceline("study", write(POINTS), "--per-device", "2", "--set", "epochs=2000", env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 130, done
    assert done.stderr.startswith("paceline: stopped by Ctrl-C: 0 of 4 runs are done; run the same command"), done
    states = [json.loads(path.read_text())["status"] for path in Path("runs/study-tiny").glob("*.run.json")]
    assert "interrupted" in states
    assert "running" not in states


def test_the_table_needs_no_torch_and_no_run():
    Path("x.json").write_text(json.dumps(made(("one", [0.94]), ("other", [0.93]))))
    for argv in (["study", "x.json", "--table"], ["study", "no.toml", "--table", "--out", "x.json"]):
        light = "sys.exit(code or bool({'torch', 'numpy'} & set(sys.modules)))"
        code = f"import sys\nfrom paceline import cli\ncode = cli.run({argv!r})\n{light}"
        done = run([sys.executable, "-c", code])
        assert done.returncode == 0, done
        assert done.stdout.startswith("arm     difference from one")
