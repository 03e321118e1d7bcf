"""The numbers a run is about to use, worked out by hand."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.config import Config
from paceline.contract import Contract
from paceline.dist.world import World
from paceline.errors import UsageError
from paceline.training.terms import describe_batch, describe_idle, describe_phases, make_contract, make_steps

ABOUT = {
    "task": "mine",
    "unit": "images",
    "model": "cnn",
    "parameters": 1234567,
    "data": "noise",
    "train_samples": 60_000,
    "validation_samples": 10_000,
    "loader": "on the device",
    "parts": "one per worker",
    "record": "runs/x",
}


def world(size: int = 1, launcher: str = "paceline") -> World:
    return World(
        rank=0,
        local_rank=0,
        node=0,
        size=size,
        local_size=size,
        nodes=1,
        device=torch.device("cpu"),
        backend="gloo",
        launcher=launcher,
    )


def contract(config: Config, here: World, samples: int = 60_000) -> Contract:
    sampler, schedule = make_steps(config, here, samples)
    return make_contract(config, here, sampler, schedule, ABOUT)


def phases(config: Config, here: World, at_once: int = 1) -> tuple[dict[str, Any], ...]:
    return describe_phases(config, here, *make_steps(config, here, 960), at_once)


def test_the_default_batch_is_the_reference_for_each_worker():
    found = contract(Config(reference_batch=128, base_lr=0.05, epochs=5), world(4))
    assert (found.global_batch, found.part_batch, found.k, found.virtual_workers) == (512, 128, 4, 4)
    assert found.peak_lr == pytest.approx(0.2)
    assert found.steps_per_epoch == 118  # 117 x 512 = 59,904; the last 608 of 60,000 are shared by two steps
    assert found.total_steps == 590


def test_a_batch_of_ones_own_and_the_square_root():
    config = Config(reference_batch=100, global_batch=400, base_lr=0.1, lr_rule="sqrt", epochs=3)
    found = contract(config, world(2), samples=1200)
    assert (found.k, found.part_batch, found.steps_per_epoch, found.total_steps) == (4, 200, 3, 9)
    assert found.peak_lr == pytest.approx(0.2)


def test_k_may_be_a_fraction():
    found = contract(Config(reference_batch=128, global_batch=32, base_lr=0.1), world())
    assert found.k == 0.25
    assert found.peak_lr == pytest.approx(0.025)


def test_the_same_batch_on_any_number_of_workers_is_the_same_mathematics():
    several = [contract(Config(global_batch=512), world(size)) for size in (1, 2, 4)]
    assert len({(c.k, c.peak_lr, c.steps_per_epoch, c.total_steps) for c in several}) == 1
    assert [c.part_batch for c in several] == [512, 256, 128]


def test_a_step_limit_shortens_the_schedule():
    _, schedule = make_steps(Config(epochs=5, max_steps=7), world(), 1280)
    assert schedule.total_steps == 7
    _, schedule = make_steps(Config(epochs=5, max_steps=700), world(), 1280)
    assert schedule.total_steps == 50


def test_a_batch_that_does_not_divide():
    with pytest.raises(UsageError, match="use 99 or 102"):
        make_steps(Config(global_batch=100), world(3), 1000)


def test_too_few_samples():
    with pytest.raises(UsageError, match="2 training samples cannot feed 4 virtual workers"):
        make_steps(Config(), world(4), 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "constant"}, "none"),
        ({"schedule": "cosine", "warmup_epochs": 2.0}, "over 20 steps from 0.25 of the peak, by step"),
        (
            {"schedule": "linear", "warmup_steps": 5, "warmup_from": 0.5, "schedule_by": "epoch"},
            "over 5 steps from 0.5 of the peak",
        ),
        ({"schedule": "one-cycle", "peak_at": 0.2}, "over 10 steps from 0.1 of the peak"),
    ],
)
def test_warm_up_in_words(options, words):
    found = contract(Config(epochs=5, global_batch=512, **options), world(4), samples=5120)
    assert found.warmup.startswith(words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "sgd Nesterov 0.9, weight decay 0.0005"),
        ({"nesterov": False}, "sgd momentum 0.9, weight decay 0.0005"),
        ({"momentum": 0.0, "weight_decay": 0.0}, "sgd plain, weight decay 0"),
        ({"optimizer": "adamw", "clip_norm": 1.0}, "adamw betas 0.9 and 0.999, weight decay 0.0005, clipped to norm 1"),
        ({"optimizer": "lars"}, "lars momentum 0.9, trust 0.001, weight decay 0.0005"),
        ({"optimizer": "lamb", "beta2": 0.99}, "lamb betas 0.9 and 0.99, weight decay 0.0005"),
        (
            {"optimizer": "novograd", "beta2": 0.0, "grad_averaging": True, "weight_decay": 0.0},
            "novograd betas 0.95 and 0, gradients averaged, weight decay 0",
        ),
        (
            {"optimizer": "muon", "fixed_norm": True, "rest": "adamw", "rest_lr": 0.01},
            "muon momentum 0.9, fixed norm, adamw at base lr 0.01 for the rest, weight decay 0.0005",
        ),
        (
            {"sam_rho": 0.05, "gradient_noise": 0.3, "ema": 0.9},
            "sgd Nesterov 0.9, weight decay 0.0005, sharpness-aware within 0.05, gradient noise 0.3, weights averaged by 0.9",
        ),
        (
            {"local_steps": 4, "virtual_workers": 2},
            "sgd Nesterov 0.9, weight decay 0.0005, 4 local steps between averagings after 50% of the run",
        ),
    ],
)
def test_the_optimizer_in_words(options, words):
    assert contract(Config(**options), world()).optimizer == words


def test_adascale_says_how_far_the_learning_rate_may_grow():
    lines = dict(contract(Config(lr_rule="adascale", global_batch=1024, base_lr=0.1), world(4)).lines())
    assert lines["scale"] == "k = 8, rule adascale: peak lr 0.1, times a gain from 1 to 8"


def test_lines_say_all_of_it():
    lines = dict(contract(Config(precision="fp32", accumulate=2, seed=11), world(4)).lines())
    assert lines["task"] == "mine: 60,000 training and 10,000 validation samples"
    assert lines["data"] == "noise (on the device)"
    assert lines["model"] == "cnn, 1,234,567 parameters"
    assert lines["reference"] == "batch 128 at lr 0.05"
    assert lines["workers"] == "P = 4 (V = 4 parts, one per worker), started here, 1 node"
    assert lines["global batch"] == "512 = 4 parts of 128, each in 2 micro-batches"
    assert lines["scale"] == "k = 4, rule linear: peak lr 0.2"
    assert lines["steps"] == "118 per epoch, 5 epochs, 590 in total"
    assert "4 CPU workers" in lines["device"]
    assert "backend gloo, fp32" in lines["device"]
    assert lines["seed"] == "11"
    assert lines["record"] == "runs/x"


@pytest.mark.parametrize(
    ("launcher", "words"), [("alone", "in this process"), ("srun", "by srun"), ("torchrun", "by torchrun")]
)
def test_the_launcher_in_words(launcher, words):
    assert contract(Config(), world(launcher=launcher)).launcher == words


def test_the_record_can_hold_it():
    found = contract(Config(), world(2))
    assert json.loads(json.dumps(found.as_dict()))["peak_lr"] == found.peak_lr


def test_a_global_batch_larger_than_the_data_is_said():
    def notes(samples: int, **options: Any) -> tuple[str, ...]:
        config = Config(**options)
        return describe_batch(config, *make_steps(config, world(), samples))

    assert notes(1000, global_batch=1000) == ()
    (said,) = notes(1000, global_batch=4096, virtual_workers=8)
    assert said == (
        "the global batch of 4,096 is larger than the 1,000 training samples: every epoch is a single step of 1,000 (each part"
        " has 125 samples, not 512), with a learning rate for 4,096; use --global-batch 1000 or less"
    )
    (said,) = notes(100, reference_batch=128)
    assert "(each part" not in said


def test_a_drop_after_the_end_is_said():
    config = Config(schedule="step", step_at="2,30", epochs=5, global_batch=10)
    sampler, schedule = make_steps(config, world(), 100)
    assert describe_batch(config, sampler, schedule) == (
        "--step-at 30: the run ends after epoch 5, before the learning rate drops there",
    )
    found = make_contract(config, world(), sampler, schedule, ABOUT)
    assert found.schedule == "step by step (times 0.1 after epoch 2, 30)"


def test_one_step_is_not_steps():
    found = contract(Config(schedule="cosine", warmup_steps=1), world())
    assert found.warmup.startswith("over 1 step from")


def test_phases_say_what_the_busiest_worker_computes():
    """Three parts on two workers: one of them has two. With fewer parts, the second worker may have none."""
    config = Config(batch_schedule="0:24 1:96", virtual_workers=3, smallest_part=16, epochs=2)
    first, second = phases(config, world(2))
    assert (first["virtual_workers"], first["samples_per_worker"], first["steps"]) == (1, 24, 40)
    assert (second["virtual_workers"], second["samples_per_worker"], second["steps"]) == (3, 64, 10)


def test_phases_know_that_exact_sums_deal_whole_groups():
    """Eight parts in two groups of four: one of three workers has four parts, not three, and one has none."""
    config = Config(batch_schedule="0:32 1:64", virtual_workers=8, smallest_part=4, epochs=2, reduce="exact")
    assert [each["samples_per_worker"] for each in phases(config, world(3), at_once=4)] == [16, 32]
    assert [each["samples_per_worker"] for each in phases(config, world(3))] == [12, 24]
    assert [each["samples_per_worker"] for each in phases(replace(config, reduce="fast"), world(3), at_once=4)] == [12, 24]


def test_phases_know_that_gradients_that_are_compared_come_from_two_passes():
    config = Config(batch_schedule="0:32 1:64", virtual_workers=8, smallest_part=4, epochs=2, reduce="exact")
    assert [each["samples_per_worker"] for each in phases(config, world(2), at_once=8)] == [32, 64]
    assert [each["samples_per_worker"] for each in phases(replace(config, measure_noise=True), world(2), at_once=8)] == [16, 32]


def test_phases_have_the_workers_of_their_time():
    config = Config(batch_schedule="0:32 1:64", virtual_workers=8, smallest_part=4, epochs=2, workers_schedule="0:1 1:4")
    assert [each["samples_per_worker"] for each in phases(config, world(1))] == [32, 16]


def test_the_contract_counts_the_warm_up_of_a_growing_batch_in_its_steps():
    """Two epochs of 60 and 15 steps; a fifth of the samples of both is 24 steps of the first."""
    config = Config(batch_schedule="0:16 1:64", epochs=2, schedule="one-cycle", peak_at=0.2)
    assert contract(config, world(), samples=960).warmup == "over 24 steps from 0.1 of the peak"
    config = Config(batch_schedule="0:16 1:64", epochs=2, schedule="cosine", warmup_epochs=0.5)
    assert contract(config, world(), samples=960).warmup.startswith("over 30 steps from ")


def test_idle_workers_are_a_note_with_the_most_that_workers_can_gain():
    def notes(workers: int, **options: Any) -> tuple[str, ...]:
        config = Config(batch_schedule="0:24 1:96", epochs=2, **options)
        return describe_idle(config, *make_steps(config, world(workers), 960), workers)

    (said,) = notes(4, virtual_workers=4, smallest_part=24)  # 960 samples on one worker, then 240 on each of four
    assert said.startswith("4 workers are at most 1.6 times as fast as one: the batch of 24 has only 1 part;")
    assert notes(1, virtual_workers=4, smallest_part=24) == ()
    assert notes(4, virtual_workers=4, smallest_part=6) == ()
    assert "at most 1.0 times" in notes(4, virtual_workers=4, smallest_part=24, max_steps=9)[0], "it ends in the first phase"
    assert notes(3, virtual_workers=4, smallest_part=8, max_steps=9) == ()


def test_workers_without_a_phase_to_idle_in_are_no_note():
    """The phase with one part has no step: the run ends before it."""
    config = Config(batch_schedule="0:96 1:24", epochs=2, virtual_workers=4, smallest_part=24, max_steps=10)
    assert describe_idle(config, *make_steps(config, world(4), 960), 4) == ()
    config = replace(config, max_steps=11)
    assert describe_idle(config, *make_steps(config, world(4), 960), 4)


def test_workers_that_idle_because_parts_run_at_once_are_a_note():
    """Four parts of 8 in one group, then eight in two: the second worker has nothing to do at first."""
    config = Config(batch_schedule="0:32 1:64", virtual_workers=8, smallest_part=4, epochs=2, reduce="exact")
    large = replace(config, smallest_part=8)
    (said,) = describe_idle(large, *make_steps(large, world(2), 960), 2, 4)
    assert said == (
        "2 workers are at most 1.3 times as fast as one: the batch of 32 has only 1 group of parts that run at once; a smaller"
        " --parts-at-once makes more"
    )
    assert describe_idle(config, *make_steps(config, world(2), 960), 2, 4) == (), "eight parts of 4 are two groups"


def test_a_phase_that_no_step_has_is_a_note():
    def notes(schedule: str, **options: Any) -> tuple[str, ...]:
        config = Config(batch_schedule=schedule, epochs=2, smallest_part=1, **options)
        return describe_batch(config, *make_steps(config, world(), 960))

    assert notes("0:16 1:64") == ()
    assert notes("0:16 1:64", max_steps=20)[0].startswith("no step has the global batch of 64 from epoch 1 on: the run ends")
    assert notes("0:16 1.99:960")[0].startswith("no step has the global batch of 960 from epoch 1.99 on")
    (large,) = notes("0:16 1:1920")
    assert "while it is used, every epoch is a single step of 960" in large
    assert "use --global-batch" not in large


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_schedule": "auto:32", "global_batch": 32}, "start lower, or use a larger --global-batch"),
        ({"batch_schedule": "auto", "global_batch": 64}, "use a larger --global-batch, or a smaller --smallest-part than 32"),
        ({"batch_schedule": "auto", "global_batch": 66}, "use a larger --global-batch, whose half has parts of equal size"),
    ],
)
def test_an_automatic_schedule_that_cannot_start_lower_says_what_helps(options, says):
    config = Config(virtual_workers=2, smallest_part=1 if options["global_batch"] == 66 else 32, **options)
    (note,) = describe_batch(config, *make_steps(config, world(), 640))
    assert note.startswith(f"--batch-schedule {options['batch_schedule']} starts at the global batch of")
    assert note.endswith(f"so the batch does not grow: {says}")


def test_a_warm_up_in_steps_is_exact_also_with_auto():
    options = {"batch_schedule": "auto", "global_batch": 64, "virtual_workers": 2, "smallest_part": 4, "schedule": "linear"}
    for warmup, said in (({"warmup_steps": 4}, "over 4 steps"), ({"warmup_epochs": 0.5}, "over at most 80 steps")):
        config = Config(**options, **warmup)
        assert make_contract(config, world(), *make_steps(config, world(), 1280), ABOUT).warmup.startswith(said)
