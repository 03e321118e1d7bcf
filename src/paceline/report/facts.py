"""What a record says of itself before the first step, in words: its contract, and where it ran."""

import shlex
from collections.abc import Mapping
from typing import Any

from paceline.report.series import text


def contract_lines(facts: Mapping[str, Any]) -> list[list[str]]:
    """A contract as its run printed it, from what of it is there."""
    known = {name: value for name, value in facts.items() if isinstance(value, str | int | float) and value is not None}
    parts = "{virtual_workers:,} part" + ("s" if known.get("virtual_workers") != 1 else "")
    forms = (
        ("task", "{task}: {train_samples:,} training and {validation_samples:,} validation samples"),
        ("data", "{data} ({loader})"),
        ("model", "{model}, {parameters:,} parameters"),
        ("reference", "batch {reference_batch:,} at lr {base_lr:g}"),
        ("workers", f"P = {{workers:,}} (V = {parts}, {{parts}}), {{launcher}}, {{nodes:,}} node(s)"),
        ("global batch", f"{{global_batch:,}} = {parts} of {{part_batch:,}}"),
        ("scale", "k = {k:g}, rule {lr_rule}: peak lr {peak_lr:g}"),
        ("optimizer", "{optimizer}, {schedule}, warm-up {warmup}"),
        ("steps", "{steps_per_epoch:,} an epoch, {epochs:,} epochs, {total_steps:,} in all"),
        ("device", "{devices}, backend {backend}, {precision}, reduce {reduce}"),
        ("seed", "{seed}"),
    )
    lines = []
    for what, form in forms:
        try:
            said = form.format(**known)
        except (KeyError, ValueError, TypeError):  # a field that is missing, or no number
            names = [name for name in _FIELDS[what] if name in known]
            said = ", ".join(f"{name.replace('_', ' ')} {text(known[name], 200)}" for name in names)
        if said:
            lines.append([what, text(said)])
    return lines


def environment_lines(about: Mapping[str, Any], resumed: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Where and how a run was started, and resumed, as text by name: versions, machine, commands, git revision."""
    found = {name: about.get(name) for name in ("when", "python", "system", "machine", "processor", "cores", "git", "devices")}
    for name, command in (("command", about.get("command")), ("resumed with", (resumed or {}).get("command"))):
        if isinstance(command, list):
            found[name] = shlex.join(text(word, 500) for word in command[:200])
    versions = about.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    found |= {name: versions[name] for name in list(versions)[:30]}
    if "task" in about:
        found["task"] = about["task"]
    if isinstance(found["devices"], list):
        found["devices"] = ", ".join(text(each, 200) for each in found["devices"][:20])
    return {text(name, 60): text(value) for name, value in found.items() if value not in (None, "", [])}


_FIELDS = {
    "task": ("task", "train_samples", "validation_samples"),
    "data": ("data", "loader"),
    "model": ("model", "parameters"),
    "reference": ("reference_batch", "base_lr"),
    "workers": ("workers", "virtual_workers", "nodes", "launcher"),
    "global batch": ("global_batch", "part_batch"),
    "scale": ("k", "lr_rule", "peak_lr"),
    "optimizer": ("optimizer", "schedule", "warmup"),
    "steps": ("steps_per_epoch", "epochs", "total_steps"),
    "device": ("devices", "backend", "precision", "reduce"),
    "seed": ("seed",),
}
