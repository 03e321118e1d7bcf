import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.advise.advise import advise
from paceline.advise.growing import Course, rehearsal, suggest_schedule
from paceline.core.sampler import Sampler
from paceline.errors import RecordError
from paceline.phases import make_phases, noise_ratio, parse_batch_schedule

Make = Callable[..., Path]


def course(*values: float, ratio: float = 2.0) -> Course:
    """One value per eighth of an epoch."""
    return Course(epochs=tuple((i + 1) / 8 for i in range(len(values))), values=values, ratio=ratio, phases=())


def test_the_batch_doubles_when_the_noise_scale_exceeds_the_ratio() -> None:
    assert suggest_schedule(course(100, 256, 257, 500, 513, 600), 128, None) == ((0.0, 128), (0.375, 256), (0.625, 512))
    assert suggest_schedule(course(100, 256, 200), 128, None) == ()
    assert suggest_schedule(course(), 128, None) == ()


def test_it_doubles_once_per_place_and_not_beyond_the_most() -> None:
    assert suggest_schedule(course(9e9, 9e9, 9e9, 9e9), 128, None) == ((0.0, 128), (0.125, 256), (0.25, 512), (0.375, 1024))
    assert suggest_schedule(course(9e9, 9e9, 9e9, 9e9), 128, 300) == ((0.0, 128), (0.125, 256))


def test_the_ratio_is_that_of_the_optimizer() -> None:
    assert (noise_ratio("sgd"), noise_ratio("muon"), noise_ratio("muon", 3.0)) == (2.0, 0.25, 3.0)
    assert suggest_schedule(course(40, 40, ratio=0.25), 128, None) == ((0.0, 128), (0.125, 256))


@pytest.mark.parametrize("first", [128, 100, 24])
def test_the_rehearsal_can_be_trained(first: int) -> None:
    words = shlex.split(rehearsal([(0.0, first), (0.5, 2 * first), (1.0, 4 * first)], 3))
    given = dict(zip(words[::2], words[1::2], strict=True))
    pairs = parse_batch_schedule(given["--batch-schedule"])
    phases = make_phases(pairs, int(given["--workers"]), int(given.get("--smallest-part", 32)))
    Sampler(6000, int(given["--global-batch"]), int(given["--workers"]), 0, phases=phases)
    assert given["--epochs"] == "3"


def test_a_constant_batch_gets_a_schedule_if_the_noise_scale_grew(make_training: Make) -> None:
    """235 steps are 5 epochs. The noise scale is above 2 x 128 from epoch 2.1 on, and above 2 x 256 from epoch 4.2 on."""
    record = make_training(noise=[100.0] * 10 + [300.0] * 10 + [900.0] * 3)
    said = "\n".join(advise(record))
    assert "The noise scale grew from 100 to 900 samples during the run." in said
    assert '--batch-schedule "0:128 2.375:256 4.5:512"' in said
    assert "paceline rehearse fashion-mnist-mini --epochs 5 --workers 4 --global-batch 512 --batch-schedule" in said


def test_a_noise_scale_that_did_not_grow_suggests_nothing(make_training: Make) -> None:
    assert "--batch-schedule" not in "\n".join(advise(make_training(noise=[600.0] * 10 + [1100.0] * 10)))


def test_a_noise_scale_that_grew_below_the_batch_suggests_no_larger_one(make_training: Make) -> None:
    said = "\n".join(advise(make_training(noise=[10.0] * 10 + [50.0] * 10)))
    assert "never more than 2 times a batch of 128: it does not suggest a larger batch" in said


def test_a_changing_batch_is_told_by_phase(make_phased: Make) -> None:
    """The noise scale is 100 x epoch: medians of 112.5, 312.5 and 512.5 in the phases."""
    record = make_phased(noise=lambda epoch: 100 * epoch)
    said = "\n".join(advise(record))
    rows = [line.split() for line in said.splitlines()[2:5]]
    assert [row[:3] for row in rows] == [["0", "256", "112"], ["2", "512", "312"], ["4", "1,024", "512"]]
    assert [row[-1] for row in rows] == ["0.44", "0.61", "0.5"]
    assert "What follows is about the last phase, at a batch of 1,024." in said
    assert "The noise scale is 512 samples (quartiles over the last phase" in said
    assert "relative to a run at a constant global batch of 1,024" in said
    assert "--batch-schedule" in said


def test_a_cluster_predicts_the_whole_schedule(make_phased: Make) -> None:
    said = "\n".join(advise(make_phased(noise=lambda epoch: 100 * epoch), cluster="dgx-h100"))
    assert "the whole run, with its batch schedule:" in said
    assert "the phases with 8 workers:" in said
    assert "on dgx-h100, returns stop at" in said or "they continue up to 8 workers" in said


def test_broken_phases_are_one_line(make_phased: Make) -> None:
    folder = make_phased(noise=lambda epoch: 100 * epoch)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[0]["global_batch"] = 0
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(RecordError, match="global_batch is 0: it must be a whole number") as caught:
        advise(folder)
    assert "\n" not in str(caught.value)
