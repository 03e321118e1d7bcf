"""`paceline doctor` with its real child processes."""

from paceline.doctor import checks as module
from paceline.doctor.checks import doctor


def test_a_machine_that_works_has_one_line_per_check(capsys):
    """All checks, with two real processes that add a tensor."""
    assert doctor() == 0
    lines = capsys.readouterr().out.splitlines()
    whats = [line[6:18].strip() for line in lines[:-1]]
    for what in (
        "python",
        "torch",
        "bf16",
        "backends",
        "cores",
        "launchers",
        "network",
        "data",
        "disk",
        "temp disk",
        "all-reduce",
    ):
        assert what in whats
    assert {line[:5].strip() for line in lines[:-1]} <= {"ok", "note"}
    assert any(line.startswith("ok    all-reduce   2 workers over gloo") for line in lines)
    assert lines[-1] == "ready to train"


def test_workers_that_fail_are_a_finding_with_their_last_line(monkeypatch, tmp_path):
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'first' >&2\necho 'no module named torch' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(module.sys, "executable", str(fake))
    (found,) = module._all_reduce()
    assert (found.level, found.text) == ("wrong", "2 workers failed: no module named torch")


def test_workers_that_hang_are_ended(monkeypatch, tmp_path):
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nexec tail -f /dev/null\n")
    fake.chmod(0o755)
    monkeypatch.setattr(module.sys, "executable", str(fake))
    monkeypatch.setattr(module, "_ALL_REDUCE_S", 0.2)
    (found,) = module._all_reduce()
    assert found.level == "wrong"
    assert "did not connect" in found.text
