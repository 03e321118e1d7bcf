import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.advise.advise import advise, advise_verb, read_facts
from paceline.errors import RecordError, UsageError
from paceline.plan.plan import Request, make_plan

Make = Callable[..., Path]


def test_the_noise_scale_says_how_many_workers_are_worth_it(make_training: Make) -> None:
    said = "\n".join(advise(make_training(noise=[1.0] * 20 + [1900.0] * 20)))
    assert "The noise scale is 1,900 samples" in said
    assert "15 workers with 128 samples each" in said
    assert "saves at least 25% of the steps (40% at a quarter of that batch). At four times that batch it saves 10%" in said
    assert "--cluster predicts it" in said
    assert "paceline rehearse fashion-mnist-mini --workers 15" in said


def test_the_table_is_relative_to_the_run_that_was_measured(make_training: Make) -> None:
    said = advise(make_training(noise=[1024.0] * 20, virtual_workers=8, global_batch=1024))
    cells = [line.split() for line in "\n".join(said).splitlines()]
    eight = next(row for row in cells if row[:2] == ["8", "1,024"])
    one = next(row for row in cells if row[:2] == ["1", "128"])
    assert eight[2:5] == ["1.00", "1.00", "25%"]
    assert one[2:4] == ["4.50", "0.56"]


def test_a_cluster_adds_speed_and_may_stop_sooner(make_training: Make) -> None:
    record = make_training(noise=[1e6] * 20, train_samples=6_000_000, steps=234_375)
    said = "\n".join(advise(record, cluster="gigabit-lab"))
    stop = make_plan(Request(record=str(record), cluster="gigabit-lab")).returns.stop_at
    assert stop is not None
    assert 8 < stop < 7812
    assert "images/s" in said
    assert "7,812 workers with 128 samples each" in said  # by noise alone
    assert f"Including the cost of communication on gigabit-lab, returns stop at {stop:,} workers:" in said
    assert "(latency-bound)" in said
    assert f"Worth it: up to about {stop:,} workers" in said


def test_parts_smaller_than_the_reference_batch_do_not_set_the_samples_per_worker(make_training: Make) -> None:
    said = "\n".join(advise(make_training(noise=[1900.0] * 20, virtual_workers=8, part_batch=16, reference_batch=128)))
    assert "15 workers with 128 samples each" in said


def test_a_noise_scale_below_one_workers_batch(make_training: Make) -> None:
    said = "\n".join(advise(make_training(noise=[22.5] * 20)))
    assert "One worker's batch of 128 is already beyond it: a second worker saves 7% of the steps." in said
    assert "Worth it: up to about 1 worker." in said
    assert "rehearse" not in said
    assert "25%" not in said.splitlines()[1]


def test_no_advice_beyond_the_training_set(make_training: Make) -> None:
    said = "\n".join(advise(make_training(noise=[1e6] * 20)))
    assert "46 workers with 128 samples each; more would need more than the training set per step)" in said
    assert "Worth it: up to about 46 workers (more would need more than the training set per step)" in said
    assert "4,096" in said  # 32 workers
    assert "8,192" not in said


@pytest.mark.parametrize("health", [True, False])
def test_the_next_command_takes_the_task_as_it_was_given(make_training: Make, health: bool) -> None:
    folder = make_training(noise=[1900.0] * 20, health=health, task="my-task")
    about = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps({**about, "task": "my tasks/my_task.py"}))
    assert "paceline rehearse 'my tasks/my_task.py' --workers 15." in "\n".join(advise(folder))


@pytest.mark.parametrize("speed", [-1.0, 0.0, 1e-300, 1e300])
def test_an_impossible_speed_is_refused_without_a_cluster_too(make_training: Make, speed: float) -> None:
    with pytest.raises(UsageError, match="--speed is"):
        advise(make_training(noise=[1900.0] * 20), speed=speed)


def test_a_speed_needs_a_cluster(make_training: Make) -> None:
    with pytest.raises(UsageError, match="it needs --cluster"):
        advise(make_training(noise=[1900.0] * 20), speed=300.0)


def test_the_advice_is_what_its_table_says(make_training: Make) -> None:
    """Doubling one worker's batch of 128 saves 33% of the steps at a noise scale of 240: two are worth it, with or without
    knowing how fast they are.
    """
    record = make_training(noise=[240.0] * 20)
    said = "\n".join(advise(record))
    assert "33% of the steps" in said
    assert "2 workers with 128 samples each" in said
    assert "Worth it: up to about 2 workers." in said
    stop = make_plan(Request(record=str(record), cluster="aws-p5")).returns.stop_at
    assert stop is not None
    assert stop > 2
    assert f"Worth it: up to about {stop} workers. To measure their accuracy: paceline rehearse" in "\n".join(
        advise(record, cluster="aws-p5")
    )


def test_the_next_command_trains_the_same_model(make_training: Make) -> None:
    folder = make_training(noise=[1900.0] * 20)
    about = json.loads((folder / "environment.json").read_text())
    contract = {**about["contract"], "model": "resnet:depth=8"}
    (folder / "environment.json").write_text(json.dumps({**about, "contract": contract}))
    assert "paceline rehearse fashion-mnist-mini --model resnet:depth=8 --workers 15." in "\n".join(advise(folder))


@pytest.mark.parametrize(
    ("contract", "says"),
    [
        ("abc", "contract is 'abc': it must be a table"),
        ({}, "no 'part_batch'"),
        ({"part_batch": 0}, "part_batch is 0: it must be a whole number, 1 or above"),
        ({"part_batch": "x"}, "part_batch is 'x'"),
    ],
)
def test_a_broken_contract_is_one_line(make_training: Make, contract: object, says: str) -> None:
    folder = make_training(noise=[1900.0] * 20)
    (folder / "environment.json").write_text(json.dumps({"contract": contract}))
    with pytest.raises(RecordError) as caught:
        advise(folder)
    assert says in str(caught.value)


def test_every_worker_gets_a_part_however_many_workers_the_run_had(make_training: Make) -> None:
    """The probe had eight parts on one worker; eight workers have one each, and an eighth of its compute."""
    record = make_training(noise=[1024.0] * 20, virtual_workers=8, global_batch=1024)
    facts = read_facts(record, cluster="dgx-h100")
    assert facts.plan is not None
    eight = next(row for row in facts.plan.rows if row["workers"] == 8)
    assert eight["global_batch"] == 1024
    assert eight["steps"] == 235
    assert eight["components_s"]["compute"] == pytest.approx(facts.plan.model.measured.base.components_s["compute"] / 8)


def test_measured_communication_is_reported(make_training: Make) -> None:
    said = "\n".join(advise(make_training(noise=[500.0] * 20, workers=2)))
    assert "communication and waiting took 0% of a step with 2 workers" in said


def test_advice_says_which_steps_count_if_the_workers_changed(make_training: Make) -> None:
    record = make_training(noise=[500.0] * 20)
    rows = [json.loads(line) for line in (record / "metrics.jsonl").read_text().splitlines()]
    resume = {"kind": "resume", "step": 400, "contract": {"workers": 2, "devices": "2 x NVIDIA H200"}}
    health = next(row for row in rows if row["kind"] == "health")
    (record / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (*rows, resume, health)))
    said = advise(record)
    assert "The steps that count are those on 1 x NVIDIA H200; the run was also on 2 x NVIDIA H200." in said
    assert any(line.startswith("These steps had one worker, so the cost") for line in said)


def test_a_record_without_components_works(make_training: Make, capsys: pytest.CaptureFixture[str]) -> None:
    assert advise_verb(str(make_training(noise=[500.0] * 20, health=False))) == 0
    assert "The noise scale is 500 samples" in capsys.readouterr().out


@pytest.mark.parametrize("noise", [None, ["inf", "nan"]])
def test_a_record_without_a_noise_scale_says_how_to_get_one(make_training: Make, noise: list[str] | None) -> None:
    with pytest.raises(RecordError, match="did not measure the noise scale: train with --measure-noise --virtual-workers 8"):
        advise(make_training(noise=noise))


def test_a_missing_record_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="is not a record of paceline train"):
        advise(tmp_path / "nowhere")
