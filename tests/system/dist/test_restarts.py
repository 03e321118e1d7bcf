"""The child process that asks which GPUs work."""

from paceline.dist import restarts
from paceline.dist.restarts import Crew


def test_gpus_are_probed_under_their_visible_names(monkeypatch):
    monkeypatch.setattr(
        restarts, "_PROBE", "import os; print('0 1\\n1 0' if os.environ['CUDA_VISIBLE_DEVICES'] == '4,6' else '')"
    )
    assert restarts._gpus(Crew(2, ("4", "6"))) == (("4", True), ("6", False))
    monkeypatch.setattr(restarts, "_PROBE", "print('0 1\\n1 1')")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert restarts._gpus(Crew(2)) == (("0", True), ("1", True))


def test_without_a_probe_the_crew_stays(monkeypatch):
    monkeypatch.setattr(restarts, "_PROBE", "raise SystemExit(1)")
    assert restarts._gpus(Crew(2)) == ()
