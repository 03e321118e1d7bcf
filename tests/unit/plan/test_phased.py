import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.core.sampler import Sampler
from paceline.errors import RecordError, UsageError
from paceline.phases import make_phases, parse_batch_schedule
from paceline.plan.lag import expected_lag
from paceline.plan.measured import read_measured
from paceline.plan.model import rising
from paceline.plan.phased import find_schedule
from paceline.plan.phased_plan import PhasedPlan, conclude_schedule, introduce_schedule, make_scheduled_plan, phased_tables
from paceline.plan.plan import plan_verb
from paceline.plan.request import Request, asks_schedule, read_request

Make = Callable[..., Path]

FREE = "intra = {latency_us = 0.001, bandwidth_GBps = 1000000}"

CLOSE = 1e-4  # what these links cost


@pytest.fixture
def free(tmp_path: Path) -> str:
    """A cluster whose links cost nothing."""
    file = tmp_path / "free.toml"
    file.write_text(f'name = "free"\nworkers_per_node = 64\n{FREE}\n')
    return str(file)


def plan(record: Path, cluster: str, **flags: object) -> PhasedPlan:
    request = Request(record=str(record), cluster=cluster, **flags)
    return make_scheduled_plan(request, read_request(request))


def waits(workers: int, step_s: float) -> float:
    """A step with 2 ms of optimizer whose workers wait for the slowest: compute varies by 3%."""
    return step_s + expected_lag(workers) * 0.03 * (step_s - 0.002)


def test_every_phase_is_a_point(make_phased: Make) -> None:
    found = read_measured(make_phased())
    assert [point.samples for point in found.points] == [1024, 512, 256]
    assert [point.step_s for point in found.points] == pytest.approx([0.016, 0.008, 0.006])
    assert [(phase.start, phase.global_batch, phase.parts) for phase in found.phases] == [
        (0, 256, 8),
        (2, 512, 8),
        (4, 1024, 8),
    ]
    assert (found.epochs, found.steps, found.virtual_workers) == (6, 84, 8)


def test_one_worker_takes_as_long_as_the_record(make_phased: Make, free: str) -> None:
    """2 epochs of 24 steps, of 12 and of 6."""
    row = plan(make_phased(), free, workers="1").rows[0]
    assert row["time_s"] == pytest.approx(48 * 0.006 + 24 * 0.008 + 12 * 0.016)
    assert (row["speedup"], row["speedup_low"], row["speedup_high"]) == pytest.approx((1, 1, 1))


def test_two_workers_have_half_the_samples(make_phased: Make, free: str) -> None:
    """With 128 samples, beyond the range: the line through 256 (6 ms) and 512 (8 ms) leads to 5 ms."""
    found = plan(make_phased(), free, workers="2")
    hand = 48 * waits(2, 0.005) + 24 * waits(2, 0.006) + 12 * waits(2, 0.008)
    assert found.rows[0]["time_s"] == pytest.approx(hand, rel=CLOSE)
    assert found.rows[0]["time_low_s"] < hand < found.rows[0]["time_high_s"]
    assert found.rows[0]["speedup"] == pytest.approx((48 * 0.006 + 24 * 0.008 + 12 * 0.016) / hand, rel=CLOSE)
    assert [row["samples_per_worker"] for row in found.phases] == [128, 256, 512]
    assert [row["steps"] for row in found.phases] == [48, 24, 12]
    assert sum(row["share"] for row in found.phases) == pytest.approx(1)
    assert "128 samples per worker are beyond the 256 to 1,024 that the record measured: times below have" in found.warnings[-1]
    more = plan(make_phased(), free, workers="1", batch_schedule="0:256 1:4096", virtual_workers=1)
    assert "4096 samples per worker are beyond the 256 to 1,024 that the record measured: times above" in more.warnings[-1]
    assert '--batch-schedule "0:4096"' in more.warnings[-1]


def test_times_between_measured_samples_are_interpolated(make_phased: Make, free: str) -> None:
    found = plan(make_phased(), free, batch_schedule="0:768", virtual_workers=1, workers="1")
    assert found.rows[0]["time_s"] == pytest.approx(6 * 8 * (0.008 + 0.016) / 2)
    assert not found.warnings


def test_workers_beyond_the_parts_of_a_phase_idle(make_phased: Make, free: str) -> None:
    """256 samples in 2 parts of 128: with 4 workers, two of them idle, and two wait for each other."""
    flags = {"batch_schedule": "0:256 1:1024", "virtual_workers": 4, "smallest_part": 128, "epochs": 2}
    found = plan(make_phased(), free, workers="4", **flags)
    assert [(row["parts"], row["samples_per_worker"], row["idle_workers"]) for row in found.phases] == [
        (2, 128, 2),
        (4, 256, 0),
    ]
    assert found.rows[0]["time_s"] == pytest.approx(24 * waits(2, 0.005) + 6 * waits(4, 0.006), rel=CLOSE)
    assert "some idle in phases that take" in "\n".join(conclude_schedule(found))


def test_uneven_parts_wait_for_the_worker_with_the_most(make_phased: Make, free: str) -> None:
    """8 parts of 128 on 3 workers: the slowest has 3, so 384 samples, half way between 256 and 512."""
    found = plan(make_phased(), free, batch_schedule="0:1024", workers="3")
    assert found.phases[0]["samples_per_worker"] == 384
    assert found.rows[0]["time_s"] == pytest.approx(36 * waits(3, 0.007), rel=CLOSE)


def test_several_parts_are_assumed_to_cost_as_much_as_one(make_phased: Make, free: str) -> None:
    """The record of 8 parts on one worker measured several parts. One with a part per worker did not."""
    assert "several parts" not in "\n".join(introduce_schedule(plan(make_phased(), free, workers="1,8")))
    single = make_phased("single", phases=((0, 256, 1), (2, 512, 1), (4, 1024, 1)))
    asked = {"batch_schedule": "0:256 2:512", "virtual_workers": 4, "smallest_part": 16}
    said = "\n".join(introduce_schedule(plan(single, free, workers="1,2,4", **asked)))
    assert "assumed: several parts of a worker, as with 1 and 2 workers, take as long as one part of as many samples" in said
    assert "several parts" not in "\n".join(introduce_schedule(plan(single, free, workers="4", **asked)))


def test_the_steps_are_those_of_the_sampler(make_phased: Make) -> None:
    """An epoch that its batches do not fill ends with smaller steps: they count with their own size."""
    text = "0:256 0.3:512 1:1000"
    schedule = find_schedule(read_measured(make_phased()), text, virtual_workers=8, epochs=5)
    phases = make_phases(parse_batch_schedule(text), 8, 32)
    sampler = Sampler(6144, 1000, 8, 0, phases=phases)
    assert [schedule.steps(i) for i in range(3)] == sampler.count_by_phase(sampler.first_step(5))
    assert sum(size * count for sizes in schedule.sizes for size, count in sizes) == 5 * 6144
    assert dict(schedule.sizes[2]) == {1000: 20, 572: 8}, "four epochs of 6,144: five whole steps, then two that share the rest"


def test_a_run_that_ended_within_an_epoch_has_no_more_steps(make_phased: Make) -> None:
    folder = make_phased()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[-1]["step"] = 80
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    schedule = find_schedule(read_measured(folder))
    assert [schedule.steps(i) for i in range(3)] == [48, 24, 8]


def test_an_automatic_run_that_stayed_small_can_be_planned(make_phased: Make, free: str) -> None:
    """Its largest batch has 2 of the 64 parts that --global-batch would have, and does not divide into 64."""
    sizes = {"virtual_workers": 64, "global_batch": 1024}
    record = make_phased(phases=((0, 32, 2), (2, 96, 3)), step_s=lambda samples: 0.004 + 1e-5 * samples, **sizes)
    found = plan(record, free, workers="1,3")
    assert [row["workers"] for row in found.rows] == [1, 3]
    assert [(row["global_batch"], row["parts"], row["steps"]) for row in found.phases] == [(32, 2, 384), (96, 3, 256)]


def test_a_constant_record_can_be_asked_about_a_schedule(make_training: Make, free: str) -> None:
    """128 samples take 34 ms, of which 3 ms do not depend on them; half as many take 15.5 ms less, or as long (high)."""
    found = plan(make_training(), free, batch_schedule="0:128", epochs=1, virtual_workers=2, workers="2")
    step = 0.003 + 0.031 / 2 + expected_lag(2) * 0.03 * 0.015
    assert found.rows[0]["time_s"] == pytest.approx(47 * step, rel=0.02)  # its last two steps are smaller
    assert found.rows[0]["time_high_s"] > 47 * 0.030
    assert "compute is proportional" in "\n".join(introduce_schedule(found))


def test_compute_never_falls_with_more_samples() -> None:
    assert rising([1.0, 2.0, 3.0], [1, 1, 1]) == [1, 2, 3]
    assert rising([4.0, 2.0, 6.0], [1, 1, 1]) == [3, 3, 6]
    assert rising([3.0, 2.0, 1.0], [1, 1, 1]) == [2, 2, 2]
    assert rising([4.0, 2.0, 6.0], [1, 3, 1]) == [2.5, 2.5, 6]


def test_the_bars_are_those_of_draws(make_phased: Make, free: str) -> None:
    """One worker at measured samples: the windows do not vary, so neither does the time."""
    row = plan(make_phased(), free, workers="1").rows[0]
    assert row["time_low_s"] == pytest.approx(row["time_high_s"])


def test_against_another_run(make_phased: Make, free: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record, other = make_phased(), make_phased("other", phases=((0, 128, 1),), epochs=4)  # 4 x 48 steps of 5 ms
    out = tmp_path / "plan.json"
    flags = {"record": str(record), "cluster": free, "workers": "1,2", "against": str(other), "price": 3600.0, "json": str(out)}
    assert plan_verb(**flags) == 0
    said = capsys.readouterr().out
    hand = 48 * waits(2, 0.005) + 24 * waits(2, 0.006) + 12 * waits(2, 0.008)
    written = json.loads(out.read_text())
    assert written["rows"][1]["times_as_fast"] == pytest.approx(4 * 48 * 0.005 / hand, rel=CLOSE)
    assert written["rows"][1]["cost"] == pytest.approx(2 * hand, rel=CLOSE)
    assert written["schedule"]["batch_schedule"] == "0:256 2:512 4:1024"
    assert f"With 2 workers: {0.96 / hand:.2f} times as fast as other (" in said
    assert "which trained for 960 ms (sgd at a batch of 128" in said
    assert "the phases with 2 workers:" in said


def test_against_a_run_whose_workers_changed_says_what_its_time_leaves_out(make_phased: Make, free: str) -> None:
    other = make_phased("other")
    with (other / "metrics.jsonl").open("a") as rows:
        rows.write(json.dumps({"kind": "join", "step": 24, "workers": 2, "was": 1, "join_s": 2.5}) + "\n")
    found = plan(make_phased(), free, against=str(other)).other
    assert found is not None
    assert found.about.startswith("sgd at a changing batch on a changing number of workers, without 2.5 s for 1 join")


def test_another_device_is_a_warning(make_phased: Make, free: str) -> None:
    other = make_phased("other", devices="1 CPU worker, 2 threads (2 cores, no GPU)")
    assert "other trained on CPU" in plan(make_phased(), free, against=str(other)).warnings[-1]


def test_returns_stop_where_workers_do(make_phased: Make, free: str) -> None:
    """At 8 workers, hardly anything is left that shrinks."""
    found = plan(make_phased(step_s=lambda n: 0.02 + 1e-9 * n), free)
    assert [row["workers"] for row in found.rows] == [1, 2, 4, 8]
    assert (found.returns.stop_at, found.returns.bound) == (1, "overhead")
    assert "Returns stop at 1 worker: 2 save none of the time" in conclude_schedule(found)[0]
    assert phased_tables(found).count("low to high") == 2


def test_phases_within_an_epoch_need_rows_of_their_own(make_phased: Make) -> None:
    """Older records have no `steps`: a row is about the steps since the last one. Rows with two batches do not count."""
    folder = make_phased()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("steps", None)
    next(row for row in rows if row["kind"] == "phase" and row["step"] == 48)["step"] = 36
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_measured(folder)
    assert {point.samples: len(point.windows) for point in found.points} == {1024: 2, 512: 2, 256: 1}


def test_a_record_whose_rows_are_all_mixed_is_one_line(make_phased: Make) -> None:
    folder = make_phased()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [row for row in rows if row["kind"] != "health"] + [{**rows[-2], "steps": 84}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    with pytest.raises(RecordError, match="each of its health rows has steps of several batches; train again with phases"):
        read_measured(folder)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"batch_schedule": "0:256 1:x"}, "--batch-schedule is '0:256 1:x': it must be epoch:batch pairs"),
        ({"batch_schedule": "1:256"}, "the first phase must start at epoch 0"),
        ({"batch_schedule": "auto"}, "its phases are known only after training: give them as epoch:batch pairs"),
        ({"batch_schedule": "0:256 9:512"}, "a phase from epoch 9 on, but the run has 6 epochs: give more --epochs"),
        ({"batch_schedule": "0:1020"}, "1,020, does not divide into 8 equal parts: use 1016 or 1024"),
        ({"batch_schedule": "0:260 1:1024", "smallest_part": 1}, "260 from epoch 0 on does not divide into 8 equal parts"),
        ({"workers": "16"}, "--workers asks for 16, but the schedule has at most 8 parts: ask for fewer, or give --virtual"),
        ({"workers": "0"}, "--workers is '0'"),
        ({"mode": "strong"}, "--mode strong is for a constant batch"),
        ({"samples": 64}, "--samples is for a constant batch"),
        ({"target_steps": 5}, "--target-steps is for a constant batch"),
        ({"noise": "100"}, "leave it out, or give --batch-schedule none"),
        ({"epochs": 0}, "--epochs is 0: it must be a number above 0"),
        ({"virtual_workers": -1}, "--virtual-workers is -1"),
        ({"batch_schedule": "none", "against": "x"}, "--against is for a batch schedule: also give --batch-schedule"),
        ({"against": "nowhere"}, "no record 'nowhere'"),
        ({"links": "self"}, "timed no all-reduces: give a record of paceline scale fashion-mnist-mini --workers 1,2"),
    ],
)
def test_mistakes_are_one_line(make_phased: Make, free: str, flags: dict[str, object], says: str) -> None:
    record = str(make_phased())
    flags = {name: record if value == "self" else value for name, value in flags.items()}
    with pytest.raises(UsageError) as caught:
        plan_verb(record=record, cluster=free, **flags)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_against_without_times_is_one_line(make_phased: Make, free: str) -> None:
    other = make_phased("other")
    (other / "metrics.jsonl").write_text("")
    with pytest.raises(RecordError, match=r"other does not say how long it trained \(it has no epoch rows\): give a record"):
        plan(make_phased(), free, against=str(other))


def test_a_constant_batch_can_be_asked_of_a_phased_record(make_phased: Make, free: str) -> None:
    """It is the same epochs at the largest batch; half of its samples are as measured."""
    from paceline.plan.plan import make_plan

    request = Request(record=str(make_phased()), cluster=free, batch_schedule="none", samples=512, workers="1,2")
    assert not asks_schedule(request, read_request(request))
    found = make_plan(request)
    assert found.rows[0]["step_s"] == pytest.approx(0.008)
    assert found.rows[1]["global_batch"] == 1024
    assert found.rows[1]["steps"] == 36


def test_links_of_another_record(make_phased: Make, make_scale: Make) -> None:
    """`here` needs all-reduces; those of two workers also say how long all-reduces take in training."""
    record = make_phased()
    with pytest.raises(RecordError, match="timed no all-reduces, which --cluster here needs"):
        plan(record, "here")
    found = plan(record, "here", links=str(make_scale()), workers="1,2")
    assert found.rows[0]["time_s"] == pytest.approx(48 * 0.006 + 24 * 0.008 + 12 * 0.016)
    for row in found.phases:  # one bucket, which is ready at the end of the backward pass
        assert row["components_s"]["communication"] == pytest.approx(2 * (1e-4 + 2e6 / 1e9), rel=0.05)
