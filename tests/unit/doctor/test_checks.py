"""`paceline doctor`: one line per subject with its fix, a verdict, and never a traceback. Facts are injected."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.doctor import checks as module
from paceline.doctor.checks import Facts, judge_data, judge_device, judge_precision, judge_software, report
from paceline.doctor.cores import Cores
from paceline.doctor.disk import Disk
from paceline.doctor.finding import Finding, line, merge, verdict
from paceline.doctor.probe import Probe
from paceline.errors import DataError
from paceline.training import precision
from paceline.training.precision import TRIAL_THREADS, Trial

TORCH = {"version": "2.11.0", "cuda": None, "backends": ["gloo"], "threads": 2, "start": "fork", "sharing": "file_descriptor"}
GPU = {"name": "NVIDIA H200", "free": 139 << 30, "total": 140 << 30, "capability": [9, 0], "fp32_s": 9e-4, "bf16_s": 1e-4}


def make_facts(*gpus: dict[str, Any], env: dict[str, str] | None = None, **torch: Any) -> Facts:
    """Facts of a machine that works; `torch` changes what torch said."""
    stages = {"torch": {**TORCH, **torch}, "all-reduce": {"s": 0.1, "listening": ["127.0.0.1"]}, "loader": {"batches_s": 0.1}}
    return Facts(
        cores=Cores(total=2, allowed=2, got=2.0),
        disk=Disk(folder=Path("/x"), free_bytes=1 << 40, bytes_per_s=1e9),
        probe=Probe(stages={**stages, "gpus": {"gpus": list(gpus)}}),
        env=env or {},
    )


def broken(after: str, failure: str, **torch: Any) -> Facts:
    """Facts of a machine whose probe ended after this stage."""
    whole = make_facts(**torch)
    names = list(whole.probe.stages)
    kept = {name: whole.probe.stages[name] for name in names[: names.index(after) + 1 if after else 0]}
    return replace(whole, probe=Probe(stages=kept, failure=failure))


def test_findings_become_one_line_per_subject_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    def one() -> Iterator[Finding]:
        yield Finding("ok", "one", "fine")
        yield Finding("ok", "one", "a detail", detail=True)
        yield Finding("slow", "one", "but\nslow", "do this")
        yield Finding("note", "one", "and odd", "do that", detail=True)

    checks = {"one": one, "two": lambda: iter([Finding("note", "two", "y", "z")])}
    assert report(checks) == 0
    assert capsys.readouterr().out.splitlines() == [
        "slow  one       but slow; and odd; fine; fix: do this, and do that",
        "note  two       y; fix: z",
        "will train, but slowly: see one",
    ]
    assert report(checks, verbose=True) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_a_check_that_fails_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> Iterator[Finding]:
        yield Finding("ok", "half", "fine so far")
        raise OSError("the disk is gone")

    assert report({"half": fails, "after": lambda: iter([Finding("ok", "after", "still asked")])}) == 1
    assert capsys.readouterr().out.splitlines() == [
        "wrong half      the check itself failed: OSError: the disk is gone; fine so far",
        "ok    after     still asked",
        "1 problem to fix: half",
    ]


def test_the_verdict() -> None:
    ok, note, slow, wrong = (Finding(level, level, "") for level in ("ok", "note", "slow", "wrong"))  # type: ignore[arg-type]
    assert verdict([ok, note]) == "ready to train"
    assert verdict([ok, slow, note]) == "will train, but slowly: see slow"
    assert verdict([slow, wrong, wrong]) == "2 problems to fix: wrong, wrong"
    assert line(merge("nothing", [])) == "ok    nothing   "


def test_there_are_ten_subjects(tmp_path: Path) -> None:
    assert len(module.make_checks(tmp_path)) == 10


def test_software() -> None:
    merged = merge("software", judge_software(make_facts()))
    assert merged.level == "ok"
    assert merged.text.endswith("torch 2.11.0; backends gloo")
    old = merge("software", judge_software(make_facts(version="2.4.1+cu121")))
    assert (old.level, old.fix) == ("wrong", "pip install 'torch>=2.11'")
    without = merge("software", judge_software(make_facts(backends=["nccl"])))
    assert (without.level, without.fix) == ("wrong", "install a torch built with gloo")
    dead = merge("software", judge_software(broken("", "it was killed by SIGILL")))
    assert (dead.level, dead.text[:43]) == ("wrong", "torch does not work: it was killed by SIGIL")


def test_variables_that_contradict_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    facts = make_facts(env={"RANK": "5", "WORLD_SIZE": "2"})
    assert report({"software": lambda: judge_software(facts)}) == 1
    said = capsys.readouterr().out
    assert "variables contradict each other" in said
    assert "the check itself failed" not in said
    inside = make_facts(env={"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    note = next(each for each in judge_software(inside) if each.level == "note")
    assert note.text == "this is worker 1 of 2 started by torchrun"


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_has_driver", lambda: False)
    assert [each.text for each in judge_device(make_facts())] == ["torch is a CPU build: runs use CPU workers over gloo"]
    assert [each.level for each in judge_device(make_facts(cuda="13.0"))] == ["note"]
    monkeypatch.setattr(module, "_has_driver", lambda: True)
    (lost,) = judge_device(make_facts(cuda="13.0"))
    assert (lost.level, lost.text) == ("wrong", "torch has CUDA 13.0 but sees no GPU")
    assert merge("device", judge_device(make_facts())).fix == "install a torch build with CUDA"


def test_gpus() -> None:
    merged = merge("device", judge_device(make_facts(GPU, GPU, cuda="13.0")))
    assert (merged.level, merged.text) == ("ok", "2 x NVIDIA H200, 139 of 140 GiB free on the fullest, CUDA 13.0")
    full = merge("device", judge_device(make_facts(GPU, {**GPU, "free": 70 << 30}, cuda="13.0")))
    assert full.level == "note"
    assert full.text.startswith("another program uses the memory of GPU 1; 2 x NVIDIA H200, 70 of 140 GiB")
    (hangs,) = judge_device(broken("loader", "it did not finish within 60 s", cuda="13.0"))
    assert (hangs.level, hangs.text) == ("wrong", "GPUs do not work: it did not finish within 60 s")
    (skipped,) = judge_device(broken("torch", "it was killed by SIGSEGV", cuda="13.0"))
    assert (skipped.level, skipped.text) == ("note", "GPUs not tried, because the check of all-reduce failed")


def test_a_driver_is_seen_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    assert not module._has_driver(tmp_path)
    (tmp_path / "proc/driver/nvidia/gpus").mkdir(parents=True)
    assert module._has_driver(tmp_path)


def test_bf16_on_gpus() -> None:
    (new,) = judge_precision(make_facts(GPU))
    assert (new.level, new.text) == ("ok", "bf16, 9.0 times as fast as fp32 in matrix products: --precision auto uses it")
    (old,) = judge_precision(make_facts(GPU, {**GPU, "capability": [7, 5]}))
    assert (old.level, old.text) == ("note", "GPU 1 has no bf16 units: --precision auto uses fp16")


@pytest.mark.parametrize(
    ("trial", "amx", "level", "said", "fix"),
    [
        (Trial(crash="SIGILL"), True, "note", "fp32: ~ was killed by SIGILL", "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"),
        (Trial(ratio=0.42), True, "ok", "bf16: ~ took 0.42 times as long as fp32", ""),
        (Trial(ratio=2.5), True, "ok", "fp32: ~ took 2.5 times as long as fp32", ""),
        (Trial(ratio=0.42), False, "note", "fp32, but ~ took 0.42 times as long as fp32", "try --precision bf16"),
        (Trial(failure="did not finish"), True, "note", "fp32, because ~ did not finish", ""),
    ],
)
def test_bf16_works_crashes_or_is_slower(
    trial: Trial, amx: bool, level: str, said: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def try_it(threads: int, again: bool) -> Trial:
        asked.append((threads, again))
        return trial

    monkeypatch.setattr(precision, "try_bf16", try_it)
    monkeypatch.setattr(precision, "lists_amx", lambda: amx)
    (found,) = judge_precision(make_facts())
    assert (found.level, found.text) == (level, said.replace("~", "a trial of bf16 on this CPU"))
    assert found.fix.startswith(fix)
    assert bool(found.fix) == bool(fix)
    assert asked == [(TRIAL_THREADS, True)], "as a run would try it, but whatever is cached"


def test_data_that_is_missing_or_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(name: str) -> None:
        raise DataError("labels.gz is cut short")

    monkeypatch.setattr(module.fashion_mnist, "find", lambda name: None if name == "fashion-mnist" else "/x")
    monkeypatch.setattr(module.fashion_mnist, "load", damaged)
    missing, bad = judge_data()
    assert (missing.level, missing.fix) == ("note", "paceline data fetch fashion-mnist")
    assert (bad.level, bad.text) == ("wrong", "fashion-mnist-mini: labels.gz is cut short")


class Timer:
    """A timer that is due at once."""

    def __init__(self, seconds: float, function: Callable[[], None]) -> None:
        self.start = function

    def cancel(self) -> None: ...

    join = cancel


def test_progress_is_shown_on_a_terminal_and_removed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module.threading, "Timer", Timer)
    checks = {"slow": lambda: iter([Finding("ok", "slow", "done")])}
    for terminal, said in ((True, "checking slow ...\r\033[K"), (False, "")):
        monkeypatch.setattr(module, "is_terminal", lambda stream, terminal=terminal: terminal)
        assert report(checks) == 0
        assert capsys.readouterr().err == said
