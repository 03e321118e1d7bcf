"""The contract's lines: from a complete contract, and from whatever an old or edited record holds."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from harness.pages import CONTRACT, make_train
from paceline.contract import Contract, contract_lines
from paceline.report.read import read_source

FULL = Contract(**{**CONTRACT, "unit": "images", "record": "runs/demo"})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"workers": 1, "virtual_workers": 1, "nodes": 1, "epochs": 1},
        {"accumulate": 4, "lr_rule": "adascale", "global_batch": 16384},
        {"resumed_at": 20},
    ],
)
def test_the_report_shows_the_lines_that_the_run_printed(tmp_path: Path, changes: dict[str, Any]) -> None:
    contract = dataclasses.replace(FULL, **changes)
    kept = json.loads(json.dumps(contract.as_dict()))
    shown = dict(read_source(make_train(tmp_path / "demo", **kept))["contract"])
    printed = contract.lines()
    assert {what: shown[what] for what, _ in printed} == dict(printed)
    if contract.resumed_at is None:
        assert list(shown.items()) == printed


def test_one_is_not_plural() -> None:
    lines = dict(dataclasses.replace(FULL, workers=1, virtual_workers=1, epochs=1).lines())
    assert lines["workers"] == "P = 1 (V = 1 part, one per worker), started here, 1 node"
    assert lines["global batch"] == "256 = 1 part of 128"
    assert lines["steps"] == "20 per epoch, 1 epoch, 60 in total"


PHASE = {"virtual_workers": 2, "part_batch": 64, "steps": 40, "peak_lr": 0.1, "samples_per_worker": 64}


def test_each_phase_has_a_line_and_epochs_of_several_lengths_are_not_multiplied() -> None:
    phases = ({**PHASE, "start": 0.0, "global_batch": 128}, {**PHASE, "start": 1.5, "global_batch": 256, "part_batch": 128})
    lines = dict(dataclasses.replace(FULL, phases=phases).lines())
    assert lines["phase 2"] == "from epoch 1.5: batch 256 = 2 parts of 128, 40 steps, lr 0.1, 64 samples per worker"
    assert lines["steps"] == "60 in total, up to 3 epochs"
    assert "later" not in lines


def test_a_batch_that_may_still_grow_is_announced() -> None:
    lines = dict(dataclasses.replace(FULL, phases=({**PHASE, "start": 0.0, "global_batch": 128},)).lines())
    assert lines["later"] == "doubled up to 256 as the noise scale grows: then fewer steps"
    assert lines["steps"] == "at most 60 in total, up to 3 epochs"


def test_a_resumed_run_prints_only_what_may_have_changed() -> None:
    lines = dataclasses.replace(FULL, resumed_at=20).lines()
    assert [what for what, _ in lines] == ["resumed", "workers", "device"]
    assert lines[0] == ("resumed", "runs/demo, from step 20 of 60")


def test_a_line_with_a_missing_or_strange_field_lists_the_others() -> None:
    facts = {"model": "cnn", "parameters": "many", "workers": 2, "base_lr": None, "reference_batch": [1], "seed": 0, "k": "nan"}
    facts |= {"total_steps": 60, "record": "runs/x"}
    assert contract_lines({**facts, "of_another_program": 1}) == [
        ("model", "cnn, parameters many"),
        ("workers", "2"),
        ("scale", "k nan"),
        ("steps", "total steps 60"),
        ("seed", "0"),
        ("record", "runs/x"),
    ]
    assert contract_lines({}) == []


def test_frozen_parameters_are_counted() -> None:
    assert dict(contract_lines({"model": "cnn", "parameters": 1200, "frozen": 1000}))["model"] == (
        "cnn, 1,200 parameters, 1,000 of them frozen"
    )
    assert dict(contract_lines({"model": "cnn", "parameters": 1200, "frozen": 0}))["model"] == "cnn, 1,200 parameters"
    assert dict(contract_lines({"model": "cnn", "parameters": 1200}))["model"] == "cnn, 1,200 parameters"
