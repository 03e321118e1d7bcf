"""`paceline doctor`: one line per check, a fix if something is wrong, and never a traceback."""

import pytest

from paceline.doctor import checks as module
from paceline.doctor.checks import Finding, doctor
from paceline.errors import DataError
from paceline.training.precision import TRIAL_THREADS, Trial


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch):
    """Run these checks and no others."""
    return lambda *checks: monkeypatch.setattr(module, "_CHECKS", checks)


def test_a_check_that_fails_is_a_finding(only, capsys):
    def _broken():
        yield Finding("ok", "half", "fine so far")
        raise OSError("the disk is gone")

    def _after():
        yield Finding("ok", "after", "still asked")

    only(_broken, _after)
    assert doctor() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "ok    half         fine so far",
        "wrong broken       the check itself failed: OSError: the disk is gone",
        "ok    after        still asked",
        "1 problem to fix",
    ]


def test_a_note_is_not_wrong(only, capsys):
    only(lambda: iter([Finding("note", "x", "y", "z")]))
    assert doctor() == 0
    assert capsys.readouterr().out.splitlines() == ["note  x            y; fix: z", "ready to train"]


def test_an_interface_that_is_not_there(only, capsys, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    only(module._network)
    assert doctor() == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("wrong network")
    assert "GLOO_SOCKET_IFNAME=nowhere0 is not one of them; fix: unset GLOO_SOCKET_IFNAME" in line


def test_an_interface_that_is_there(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    (found,) = module._network()
    assert found.level == "ok"
    assert "lo 127.0.0.1" in found.text


def test_no_loopback(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(module, "interfaces", lambda: {"eth0": "10.0.0.1"})
    (found,) = module._network()
    assert (found.level, found.fix) == ("wrong", "ip link set lo up")


def test_an_old_torch(monkeypatch):
    monkeypatch.setattr(module.torch, "__version__", "2.4.1+cu121")
    (found,) = module._torch()
    assert (found.level, found.fix) == ("wrong", "pip install 'torch>=2.11'")


@pytest.mark.parametrize(
    ("trial", "amx", "level", "said"),
    [
        (Trial(crash="SIGILL"), True, "note", "crashes: ~ was killed by SIGILL; --precision auto uses fp32"),
        (Trial(ratio=0.42), True, "ok", "works: ~ took 0.42 times as long as fp32; --precision auto uses it"),
        (Trial(ratio=2.5), True, "ok", "slower: ~ took 2.5 times as long as fp32; --precision auto uses fp32"),
        (
            Trial(ratio=0.42),
            False,
            "ok",
            "works: ~ took 0.42 times as long as fp32; --precision auto uses fp32 on CPUs without AMX",
        ),
        (Trial(failure="did not finish"), True, "note", "unknown: ~ did not finish; --precision auto uses fp32"),
    ],
)
def test_bf16_works_crashes_or_is_slower(trial, amx, level, said, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "try_bf16", lambda threads, again: asked.append(again) or trial)
    monkeypatch.setattr(module, "lists_amx", lambda: amx)
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: False)
    (found,) = module._bf16()
    assert (found.level, found.text) == (level, said.replace("~", "a trial of bf16 on this CPU"))
    assert found.fix.startswith("set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" if trial.crash else "")
    assert asked == [True]  # doctor measures again, whatever is cached


def test_a_disk_that_is_nearly_full(monkeypatch):
    monkeypatch.setattr(module, "_FREE_BYTES", 1 << 80)
    assert [finding.level for finding in module._disk()] == ["wrong", "wrong"]


def test_data_that_is_missing_or_damaged(monkeypatch):
    def damaged(name):
        raise DataError("labels.gz is cut short")

    monkeypatch.setattr(module.fashion_mnist, "find", lambda name: None if name == "fashion-mnist" else "/x")
    monkeypatch.setattr(module.fashion_mnist, "load", damaged)
    missing, broken = module._data()
    assert (missing.level, missing.fix) == ("note", "paceline data fetch fashion-mnist")
    assert (broken.level, broken.text) == ("wrong", "fashion-mnist-mini: labels.gz is cut short")


def test_variables_that_contradict_each_other(only, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "2")
    only(module._launcher)
    assert doctor() == 1
    assert "variables contradict each other" in capsys.readouterr().out


def test_bf16_is_tried_as_a_run_would_try_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def try_it(threads: int, again: bool) -> Trial:
        asked.append(threads)
        return Trial(ratio=0.5)

    monkeypatch.setattr(module, "try_bf16", try_it)
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: False)
    list(module._bf16())
    assert asked == [TRIAL_THREADS]
