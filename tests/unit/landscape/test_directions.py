"""Random directions are filter-normalized and follow from a seed; the plane of a path is its principal components."""

import math

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.landscape.directions import difference, fit_plane, random_direction


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))


def test_each_filter_and_row_gets_the_norm_of_the_models_own() -> None:
    model = small()
    direction = random_direction(model, 3, 0)
    assert list(direction) == ["0.weight", "3.weight"], "biases and norm layers do not move"
    for name, tensor in direction.items():
        own = dict(model.named_parameters())[name].detach().flatten(1).norm(dim=1)
        torch.testing.assert_close(tensor.flatten(1).norm(dim=1), own)


def test_directions_follow_from_the_seed_and_their_number() -> None:
    model = small()
    first = random_direction(model, 3, 0)["0.weight"]
    assert torch.equal(first, random_direction(model, 3, 0)["0.weight"])
    assert not torch.equal(first, random_direction(model, 4, 0)["0.weight"])
    assert not torch.equal(first, random_direction(model, 3, 1)["0.weight"])


def test_frozen_parameters_do_not_move_and_a_filter_of_zeros_stays() -> None:
    model = small()
    model[0].weight.requires_grad_(False)
    with torch.no_grad():
        model[3].weight[1] = 0.0
    direction = random_direction(model, 0, 0)
    assert list(direction) == ["3.weight"]
    assert direction["3.weight"][1].abs().max() == 0


def test_a_model_without_matrices_has_no_random_directions() -> None:
    with pytest.raises(UsageError, match="two or more dimensions, and this model has none"):
        random_direction(nn.BatchNorm1d(3), 0, 0)


def test_the_difference_to_another_model_has_its_statistics_but_no_counts() -> None:
    model, other = small(), {name: value + 1 for name, value in small().state_dict().items()}
    direction = difference(model, other)
    assert "1.running_var" in direction
    assert "1.num_batches_tracked" not in direction
    torch.testing.assert_close(direction["0.weight"], torch.ones(4, 1, 3, 3))


def points_on_a_plane(model: nn.Module, places: list[tuple[float, float]], off: float = 0.0) -> list[dict[str, Tensor]]:
    """Points at `x` along the first weight of the matrix and `y` along its second, alternately `off` along its third."""
    found = []
    for i, (x, y) in enumerate(places):
        point = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        point["3.weight"][0, 0] += x
        point["3.weight"][0, 1] += y
        point["3.weight"][0, 2] += off * (-1) ** i
        found.append(point)
    return found


def test_the_plane_of_a_path_and_the_places_of_its_points() -> None:
    model = small()
    places = [(8.0, 1.0), (6.0, -1.0), (3.0, 1.5), (1.0, -0.5), (0.0, 0.0)]
    plane = fit_plane(model, [points_on_a_plane(model, places)])
    first, second = plane.directions
    assert abs(float(first["3.weight"][0, 0])) > 0.99, "most of the variance is along the first weight"
    dot = sum(float((first[name] * second[name]).sum()) for name in first)
    assert abs(dot) < 1e-5
    assert math.isclose(sum(plane.explained), 1.0, abs_tol=1e-6)
    centered = torch.tensor(places) - torch.tensor(places).mean(0)
    values = torch.linalg.eigvalsh(centered.T @ centered)
    assert plane.explained[0] == pytest.approx(float(values[1] / values.sum()), rel=1e-5)
    for (x, y), (along, across, off) in zip(places, plane.places[0], strict=True):
        assert math.hypot(x, y) == pytest.approx(math.hypot(along, across), abs=1e-5)
        assert off == pytest.approx(0, abs=2e-3)
    assert plane.places[0][0][0] > 0, "a path starts on the positive side"


def test_distance_from_the_plane_and_several_paths() -> None:
    model = small()
    places = [(8.0, 1.0), (6.0, -2.0), (3.0, 2.5), (1.0, -0.5), (0.0, 0.5), (2.0, 2.0)]
    plane = fit_plane(model, [points_on_a_plane(model, places[:3], 0.01), points_on_a_plane(model, places[3:], 0.01)])
    assert [len(path) for path in plane.places] == [3, 3]
    assert 0.9999 < sum(plane.explained) < 1 - 1e-7
    found = [place for path in plane.places for place in path]
    assert max(off for _, _, off in found) > 0.01
    for (x, y), place in zip(places, found, strict=True):
        assert math.hypot(*place) == pytest.approx(math.hypot(x, y, 0.01), rel=1e-6)


def test_points_that_span_no_plane_are_refused() -> None:
    model = small()
    with pytest.raises(UsageError, match="at least 3 snapshots, and there are 2"):
        fit_plane(model, [points_on_a_plane(model, [(1.0, 0.0), (0.0, 0.0)])])
    with pytest.raises(UsageError, match="lie on one point or line"):
        fit_plane(model, [points_on_a_plane(model, [(2.0, 0.0), (1.0, 0.0), (0.0, 0.0)])])
    with pytest.raises(UsageError, match="not finite: its run diverged"):
        fit_plane(model, [points_on_a_plane(model, [(math.nan, 0.0), (1.0, 0.0), (0.0, 1.0)])])
