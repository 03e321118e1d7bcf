"""Weights from files: which files are read, and what is said about tensors that do not match."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from harness.training import ALONE, blobs, train_in
from paceline.config import make_config
from paceline.errors import UsageError
from paceline.training.weight_files import fit_weights, read_weights, start_from


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def state() -> dict[str, torch.Tensor]:
    return {name: torch.rand(value.shape).to(value.dtype) for name, value in net().state_dict().items()}


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth", ".ckpt"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_all_kinds_of_files_and_names_with_the_prefixes_of_wrappers(tmp_path: Path, suffix: str, prefix: str) -> None:
    given, path, model = state(), tmp_path / f"w{suffix}", net()
    named = {f"{prefix}{name}": value for name, value in given.items()}
    if suffix == ".safetensors":
        save_file(named, path)
    else:
        torch.save({"epoch": 3, "state_dict": named} if suffix == ".ckpt" else named, path)
    match = fit_weights(model, read_weights(path))
    assert match.complete
    assert match.describe() == "all 9 tensors"
    assert all(torch.equal(value, given[name]) for name, value in model.state_dict().items()), "buffers of batch norm too"


def test_tensors_that_do_not_match_are_named() -> None:
    given, model = state(), net()
    given["0.weight"] = torch.zeros(8, 4)
    given["head.weight"] = given.pop("2.weight")
    for name in ("0.bias", "1.weight", "1.bias", "1.running_mean"):
        del given[name]
    match = fit_weights(model, given)
    assert match.describe() == (
        "3 of 9 tensors, 5 missing (0.bias, 1.weight, 1.bias and 2 more), 1 unexpected (head.weight), 1 of another shape"
        " (0.weight: 8 x 4 in the file, 8 x 5 in the model)"
    )


def test_tied_weights_are_in_a_file_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight

    saved = {"a.weight": torch.ones(3, 3), "a.bias": torch.ones(3), "b.bias": torch.ones(3)}
    assert fit_weights(Tied(), saved).complete


class Custom:
    """Something that only unpickling with code could make."""


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("w.pt", {"model": Custom()}, "w.pt holds more than weights: unpickling it could run code"),
        ("w.pt", b"not a zip file", "w.pt is not a torch file, or is damaged|w.pt holds more than weights"),
        ("w.pt", {"epoch": 3}, "w.pt holds dict with epoch, no weights: save model.state_dict()"),
        ("w.pt", [1, 2], "w.pt holds list, no weights"),
        ("w.safetensors", b"12345678 garbage", "w.safetensors is not a .safetensors file, or is damaged"),
        ("w.npz", b"x", "w.npz has the suffix '.npz': use .safetensors, or .pt"),
        ("w.pt", {"x.weight": torch.ones(1)}, "no tensor fits this model; the file has x.weight, the model 0.weight, 0.bias,"),
        ("w.pt", {"0.weight": torch.ones(1)}, "no tensor fits this model.*of another shape .0.weight: 1 in the file"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path: Path, name: str, content: Any, says: str) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(UsageError, match=says) as caught:
        start_from(net(), make_config({"init_from": str(path)}), ALONE)
    assert str(caught.value).startswith(f"--init-from {path}: ")
    assert "\n" not in str(caught.value)


def test_a_missing_file_or_record_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "runs" / "cut").mkdir(parents=True)
    (tmp_path / "runs" / "cut" / "metrics.jsonl").touch()
    for given, says in (
        ("nothing.pt", "--init-from nothing.pt: there is no such file"),
        ("nothing", "no record 'nothing'"),
        ("cut", "cut has no model.safetensors: the run is not finished"),
        (str(tmp_path), "is not a record: it has no model.safetensors"),
    ):
        with pytest.raises(UsageError, match=says):
            start_from(net(), make_config({"init_from": given, "runs_dir": str(tmp_path / "runs")}), ALONE)


def test_a_run_starts_from_the_weights_and_says_so(tmp_path: Path) -> None:
    task = blobs(norm=True)
    first = train_in(ALONE, task, {"epochs": 1})
    torch.save({name: torch.as_tensor(value) for name, value in first.weights.items()}, tmp_path / "w.pt")
    model = task.model()  # type: ignore[misc]
    found = start_from(model, make_config({"init_from": str(tmp_path / "w.pt")}), ALONE)
    assert found.about.endswith(f"(sha256 {found.sha256[:16]}), all 9 tensors")
    assert all((value.numpy() == first.weights[name]).all() for name, value in model.state_dict().items())


def test_other_tensors_beside_the_weights_do_not_hide_them(tmp_path: Path) -> None:
    """As torch's imagenet example saves them: the best accuracy is a tensor."""
    torch.save({"epoch": 3, "best_acc1": torch.tensor(71.2), "state_dict": state()}, tmp_path / "w.pth.tar")
    assert read_weights(tmp_path / "w.pth.tar").keys() == state().keys()


def test_the_attribute_that_held_the_model_is_removed_if_nothing_else_fits() -> None:
    """As in Lightning's checkpoints."""
    assert fit_weights(net(), {f"backbone.{name}": value for name, value in state().items()}).complete
    assert not fit_weights(net(), {f"{name}x": value for name, value in state().items()}).loaded


@pytest.mark.parametrize(("change", "says"), [(torch.Tensor.to_sparse, "sparse"), (lambda x: x + 0j, "complex")])
def test_sparse_and_complex_tensors_do_not_match(change: Any, says: str) -> None:
    name = next(name for name, value in state().items() if value.dim() == 2)
    match = fit_weights(net(), {**state(), name: change(state()[name])})
    assert name not in match.loaded
    assert says in match.describe()
