"""Which precision a run gets: on CPUs by a trial in a real child process, which may crash, hang or be slow."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.training import ALONE
from paceline.config import make_config
from paceline.dist.world import World
from paceline.errors import UsageError
from paceline.training import precision
from paceline.training.precision import Trial, choose_precision, lists_amx, try_bf16

SIGILL = """
import ctypes, mmap, os, platform, signal
illegal = {"x86_64": b"\\x0f\\x0b", "aarch64": bytes(4)}.get(platform.machine())
try:
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(illegal)
    ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
except (OSError, TypeError):  # another processor, or no such pages here
    pass
os.kill(os.getpid(), signal.SIGILL)
"""
"""A child's code that executes an illegal instruction, as oneDNN's kernels do on some virtual machines."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, and nothing remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(precision, "_known", {})
    return tmp_path / "cache" / "paceline" / "bf16"


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU whose flags claim AMX."""
    monkeypatch.setattr(precision, "lists_amx", lambda: True)


def choose(asked: str, trial: Trial | None = None, here: World = ALONE, **options: Any) -> tuple[str, tuple[str, ...]]:
    """What `asked` comes to where a trial would find this; without a trial, none may run."""

    def try_it(threads: int, limit_s: float) -> Trial:
        assert trial is not None, "a trial ran"
        return trial

    return choose_precision(make_config({"precision": asked, **options}), here, try_it)


@pytest.mark.usefixtures("amx")
def test_flags_alone_choose_nothing() -> None:
    """auto is bf16 where a trial ran and was clearly not slower than fp32; all else is fp32 with a line that says why."""
    assert choose("auto", Trial(ratio=0.4)) == ("bf16", ())
    assert choose("auto", Trial(ratio=0.9)) == ("bf16", ())
    found = {
        "took 0.95 times as long as fp32": Trial(ratio=0.95),
        "was killed by SIGILL": Trial(crash="SIGILL"),
        "took 1.3 times as long as fp32": Trial(ratio=1.3),
        "did not finish in 60 s": Trial(failure="did not finish in 60 s"),
    }
    for why, trial in found.items():
        assert choose("auto", trial) == ("fp32", (f"bf16 is off: a trial of bf16 on this CPU {why}; using fp32",))


def test_no_trial_where_bf16_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose("fp32") == ("fp32", ())
    monkeypatch.setattr(precision, "lists_amx", lambda: False)
    assert choose("auto") == ("fp32", ())


def test_asking_for_bf16_where_it_crashes_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for amx, hint in ((True, ", or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 so that torch does not use AMX"), (False, "")):
        monkeypatch.setattr(precision, "lists_amx", lambda amx=amx: amx)
        with pytest.raises(UsageError) as caught:
            choose("bf16", Trial(crash="SIGILL"))
        said = "--precision bf16: a trial of bf16 on this CPU was killed by SIGILL, and so would the run; use --precision fp32"
        assert str(caught.value) == said + hint


def test_asking_for_bf16_gets_it_where_it_works() -> None:
    assert choose("bf16", Trial(ratio=0.4)) == ("bf16", ())
    chosen, notes = choose("bf16", Trial(ratio=27.1))
    assert (chosen, len(notes)) == ("bf16", 1)
    assert notes[0].endswith("took 27 times as long as fp32; consider --precision fp32")
    assert choose("bf16", Trial(failure="did not finish in 60 s"))[0] == "bf16"


@pytest.mark.parametrize(
    ("capability", "chosen"), [((8, 0), "bf16"), ((9, 0), "bf16"), ((7, 5), "fp16"), ((7, 0), "fp16"), ((6, 1), "fp32")]
)
def test_gpus_go_by_their_compute_capability(capability: tuple[int, int], chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gpu = replace(ALONE, device=torch.device("cuda", 0))
    assert choose("auto", here=gpu) == (chosen, ())
    assert choose("bf16", here=gpu) == ("bf16", ())
    assert choose("fp16", here=gpu) == ("fp16", ())


def test_fp16_is_never_automatic_on_a_cpu_and_refuses_local_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that train by themselves would need a scale each: refused if asked for, and auto is fp32 with a note."""
    assert choose("auto") == ("fp32", ())
    assert choose("fp16", Trial(ratio=0.5)) == ("fp16", ())
    chosen, (note,) = choose("fp16", Trial(ratio=7.0))
    assert (chosen, note) == (
        "fp16",
        "--precision fp16: a trial of fp16 on this CPU took 7 times as long as fp32; consider --precision fp32",
    )
    with pytest.raises(UsageError, match=r"--precision fp16: a trial of fp16 on this CPU was killed by SIGILL, and so would"):
        choose("fp16", Trial(crash="SIGILL"))
    with pytest.raises(
        UsageError, match=r"--precision fp16 cannot train with --local-steps, .*: use --precision fp32, or bf16"
    ):
        choose("fp16", local_steps=2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    chosen, (note,) = choose("auto", here=replace(ALONE, device=torch.device("cuda", 0)), local_steps=2)
    assert chosen == "fp32"
    assert note.startswith("fp16 is off: it cannot train with --local-steps")


def test_the_trial_has_one_thread_whatever_the_run_has_and_less_time_than_the_others_wait() -> None:
    asked = []

    def try_it(threads: int, limit_s: float) -> Trial:
        asked.append((threads, limit_s))
        return Trial(ratio=0.5)

    for options in ({}, {"reduce": "exact"}, {"timeout_s": 8}):
        choose_precision(make_config({"precision": "bf16", **options}), ALONE, try_it)
    assert asked == [(1, 60.0), (1, 60.0), (1, 4.0)]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Trial], list[int]]:
    """Replace the child by an answer; gives the list that each trial adds its threads to."""

    def replace_child(found: Trial) -> list[int]:
        trials: list[int] = []

        def run(threads: int, code: str, limit_s: float) -> Trial:
            trials.append(threads)
            return found

        monkeypatch.setattr(precision, "run_trial", run)
        return trials

    return replace_child


@pytest.mark.parametrize("found", [Trial(ratio=0.5), Trial(crash="SIGILL")])
def test_an_answer_is_kept(found: Trial, counted: Callable[[Trial], list[int]], cache: Path, tmp_path: Path) -> None:
    trials = counted(found)
    assert [try_bf16(1), try_bf16(1)] == [found, found]
    assert len(trials) == 1
    precision._known.clear()  # as in another process
    assert try_bf16(1) == found
    assert len(trials) == 1
    (file,) = cache.iterdir()
    (tmp_path / "plain").touch()
    assert (file.suffix, file.stat().st_mode) == (".json", (tmp_path / "plain").stat().st_mode)
    assert try_bf16(1, again=True) == found
    assert len(trials) == 2


def test_another_machine_or_setting_is_tried_by_itself(
    counted: Callable[[Trial], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = counted(Trial(ratio=0.5))
    changes: list[Callable[[], None]] = [
        lambda: monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2"),
        lambda: monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2"),
        lambda: monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2"),
        lambda: monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "AVX2"),
        lambda: monkeypatch.setattr("torch.__version__", "9.9.9"),
        lambda: monkeypatch.setattr(precision, "_cpu", lambda: {"model name": "Other", "flags": "fpu"}),
        lambda: monkeypatch.setattr(precision.platform, "node", lambda: "elsewhere"),
    ]
    for change in changes:
        change()
        try_bf16(1)
        try_bf16(1)
    try_bf16(2)
    assert trials == [1] * len(changes) + [2]


def test_no_answer_is_not_kept(counted: Callable[[Trial], list[int]], cache: Path) -> None:
    trials = counted(Trial(failure="did not finish in 60 s"))
    for _ in range(2):
        try_bf16(1)
        precision._known.clear()
    assert len(trials) == 2
    assert not cache.exists()


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "null", '{"ratio": 0.5}', '{"ratio": "0.5", "crash": ""}', '{"ratio": -1.0, "crash": ""}'),
        *('{"ratio": NaN, "crash": ""}', '{"ratio": null, "crash": ""}', '{"ratio": null, "crash": ["x"]}', "\xff"),
    ],
)
def test_an_odd_cache_file_is_as_good_as_none(content: str, counted: Callable[[Trial], list[int]], cache: Path) -> None:
    trials = counted(Trial(ratio=0.5))
    try_bf16(1)
    (file,) = cache.iterdir()
    file.write_text(content, encoding="latin-1")
    precision._known.clear()
    assert try_bf16(1) == Trial(ratio=0.5)
    assert len(trials) == 2


def test_a_cache_that_cannot_be_is_no_error(
    counted: Callable[[Trial], list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = counted(Trial(ratio=0.5))
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert try_bf16(1) == Trial(ratio=0.5)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    precision._known.clear()
    assert try_bf16(1) == Trial(ratio=0.5)
    assert len(trials) == 2


def test_a_cpu_that_claims_to_multiply_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("processor : 0\nflags : fpu avx512f avx512_bf16\n\nprocessor : 1\nflags : amx_bf16\n")
    new.write_text("model name : X\nflags : fpu avx512f amx_bf16 amx_tile\n")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert [lists_amx(path) for path in (old, new, tmp_path / "none")] == [False, True, False]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    assert not lists_amx(new)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "all")
    assert lists_amx(new)
