"""On a real GPU: an NCCL worker, gloo workers sharing one GPU, the CPU's own numbers, no host sync in a step."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.processes import paceline, run
from harness.training import blobs, train_in
from paceline.core.carrier import PAYLOAD, REQUESTS
from paceline.core.determinism import deterministic
from paceline.data.augment import Images
from paceline.data.loaders import Arrays, Resident, Streaming
from paceline.dist.agree import fingerprints
from paceline.dist.world import world
from paceline.training import tasks
from paceline.training.build import build
from paceline.training.capture.captured import capture
from paceline.training.meter import Meter
from paceline.training.plain import make_clock, make_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: make test ARGS=tests/gpu"),
]

TINY = ["train", "fashion-mnist-mini", "--model", "cnn:width=8", "--epochs", "2"]


def result_of(runs: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    (record,) = runs.glob("*")
    environment = json.loads((record / "environment.json").read_text())
    return json.loads((record / "result.json").read_text()), environment["contract"]


def test_one_nccl_worker(runs: Path) -> None:
    done = paceline(*TINY, "--precision", "bf16")
    assert done.returncode == 0, done.stderr
    result, contract = result_of(runs)
    assert contract["backend"] == "nccl"
    assert contract["loader"] == "on the device"
    assert result["metrics"]["accuracy"] > 0.7


def test_two_gloo_workers_share_a_gpu(runs: Path) -> None:
    done = paceline(*TINY, "--workers", "2", "--backend", "gloo")
    assert done.returncode == 0, done.stderr
    result, contract = result_of(runs)
    assert contract["workers"] == 2
    assert "sharing" in contract["devices"] or torch.cuda.device_count() > 1
    assert result["metrics"]["accuracy"] > 0.6


def test_two_gloo_workers_with_sync_norm_on_a_gpu(runs: Path) -> None:
    done = paceline(*TINY[:2], "--model", "cnn:width=8,norm=sync", "--max-steps", "5", "--workers", "2", "--backend", "gloo")
    assert done.returncode == 0, done.stderr


def test_more_workers_than_gpus_is_one_line(runs: Path) -> None:
    workers = torch.cuda.device_count() + 1
    done = paceline(*TINY, "--workers", str(workers))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--backend gloo to share them" in done.stderr


LABELS = """
import torch
from paceline import Arrays, Task, classify

def task():
    labels = torch.arange(512) % 3
    labels[7] = 5
    data = Arrays((torch.randn(512, 10), labels))
    return Task(name="labels", model=lambda: torch.nn.Linear(10, 3), train=data, objective=classify())
"""


def test_a_label_out_of_range_ends_the_run_in_one_line(runs: Path) -> None:
    Path("labels_task.py").write_text(LABELS)
    done = paceline("train", "labels_task.py")
    assert done.returncode == 1, done.stderr
    ours = [line for line in done.stderr.splitlines() if "Assertion" not in line]  # the GPU prints one line per bad label
    assert len(ours) == 1
    assert "an index is out of range on the GPU" in ours[0]


def test_torchrun_with_one_nccl_worker(runs: Path) -> None:
    done = run(["torchrun", "--standalone", "--nproc-per-node", "1", "-m", "paceline", *TINY])
    assert done.returncode == 0, done.stderr
    assert result_of(runs)[1]["launcher"] == "by torchrun"


def test_the_course_net_trains(runs: Path) -> None:
    done = paceline("train", "fashion-mnist-mini", "--model", "course_wide_resnet", "--max-steps", "10", "--precision", "bf16")
    assert done.returncode == 0, done.stderr
    assert result_of(runs)[1]["parameters"] == 17_117_466


def test_augmentation_and_fingerprints_have_the_same_bits_as_on_the_cpu() -> None:
    pixels = torch.randint(0, 256, (64, 3, 16, 16), dtype=torch.uint8)
    samples, labels = torch.arange(64) * 7919, torch.arange(64)
    prepare = Images(mean=0.3, deviation=0.4, crop=2, flip=True, erase=0.5, seed=5)
    here, _ = prepare((pixels, labels), samples, 3)
    there, _ = prepare((pixels.cuda(), labels.cuda()), samples.cuda(), 3)
    torch.testing.assert_close(there.cpu(), here, rtol=1e-6, atol=1e-6)  # one multiply-add may be fused on the GPU
    assert (there.cpu() == 0).equal(here == 0)
    assert fingerprints([here]).equal(fingerprints([here.cuda()]).cpu())


def test_both_loaders_bring_the_same_batches() -> None:
    device = torch.device("cuda", 0)
    data = Arrays((torch.randint(0, 256, (100, 1, 8, 8), dtype=torch.uint8), torch.arange(100)))
    prepare = Images(crop=1, flip=True, seed=1)
    plan = [np.arange(start, start + 20)[::-1].copy() for start in range(0, 100, 20)]
    resident, streaming = Resident(data, prepare, device), Streaming(data, prepare, device, workers=1, seed=1)
    for epoch in (0, 1, None):
        pairs = zip(resident.batches(plan, epoch), streaming.batches(plan, epoch), strict=True)
        for ours, theirs in pairs:
            assert all(a.device == device and a.equal(b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("parts", [{}, {"virtual_workers": 4}, {"virtual_workers": 4, "reduce": "exact"}])
@pytest.mark.parametrize("fast", ["auto", "off"])
def test_a_step_never_waits_for_the_gpu(parts: dict[str, Any], fast: str) -> None:
    options = {"precision": "bf16", "clip_norm": 1.0, "label_smoothing": 0.1, "global_batch": 128, "fast": fast, **parts}
    with world() as here:
        task, config = tasks.resolve("fashion-mnist-mini", options)
        ready = build(task, config, here)
        with deterministic(config.reduce == "exact"):
            steps = ready.steps(0, range(8))
            inputs = ready.train.inputs([item.samples for step in steps for item in step.passes], 0)
            plain, meter, reads = make_step(ready, make_clock(ready)), Meter(here), []
            executor = capture(ready, plain, 0, print)
            assert (executor is plain) == (fast == "off")
            executor(steps[0], inputs)  # the first step allocates, and looks at the metrics' names
            torch.cuda.set_sync_debug_mode("error")
            try:
                for step in steps[1:5]:
                    reads += meter.push(step.number, executor(step, inputs, (step.number == 2, step.number == 3)))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            reads += meter.flush()
    requests = [tuple(value > 0 for value in values[PAYLOAD - REQUESTS : PAYLOAD]) for _, values in reads]
    assert requests == [(False, False), (True, False), (False, True), (False, False)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_exact_mode_gives_the_same_bits_for_workers_sharing_a_gpu(runs: Path, precision: str) -> None:
    flags = ["--virtual-workers", "4", "--reduce", "exact", "--crop", "2", "--max-steps", "20", "--precision", precision]
    found = []
    for workers in ("1", "2", "3", "4"):
        done = paceline(*TINY[:4], *flags, "--workers", workers, "--backend", "gloo", "--name", workers)
        assert done.returncode == 0, done.stderr
        result = json.loads((runs / workers / "result.json").read_text())
        found.append((result["model_sha256"], result["metrics"]))
    assert found == [found[0]] * 4


def test_killed_and_resumed_on_a_gpu(runs: Path) -> None:
    flags = ["--virtual-workers", "4", "--reduce", "exact", "--epochs", "3", "--checkpoint-every", "5", "--backend", "gloo"]
    calm = paceline(*TINY[:4], *flags, "--name", "calm")
    assert calm.returncode == 0, calm.stderr
    command = [sys.executable, "-m", "paceline", *TINY[:4], *flags, "--name", "x"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 90
    while not list(runs.glob("x/checkpoints/step-*")) and time.monotonic() < end:
        time.sleep(0.01)
    process.kill()
    process.wait()
    done = paceline(*TINY[:2], "--resume", "x", "--workers", "3", "--backend", "gloo")
    assert done.returncode == 0, done.stderr
    results = [json.loads((runs / name / "result.json").read_text()) for name in ("calm", "x")]
    assert results[0]["model_sha256"] == results[1]["model_sha256"]


def test_it_repeats_and_learns() -> None:
    with world() as here:
        first, second = (train_in(here, blobs(600), {"epochs": 4}) for _ in range(2))
    assert [row["loss"] for row in first.watcher.steps] == [row["loss"] for row in second.watcher.steps]
    assert first.result.metrics["accuracy"] > 0.6
