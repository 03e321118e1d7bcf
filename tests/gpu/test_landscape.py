"""On a real GPU: a surface by CUDA graph equals the plain one, for any number of workers, in fp32 and bf16."""

import json
from pathlib import Path

import pytest
import torch

import paceline as package
from harness.processes import paceline
from paceline.landscape.directions import random_direction
from paceline.landscape.points import Points
from paceline.training.after import Request, in_world
from paceline.training.fixed import fixed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: make test ARGS=tests/gpu"),
]
PLACES = [(0.0, 0.0), (0.5, -0.25), (-1.0, 1.0), (0.0, 0.0)]


@pytest.fixture(autouse=True)
def trained(runs: Path) -> None:
    package.train("fashion-mnist-mini", model="resnet:depth=8", epochs=1, name="x", snapshots=4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_graph_computes_what_the_plain_code_does(precision: str) -> None:
    request = Request(record="x", sets=("train", "validation"), precision=precision)
    seen: list[bool] = []

    def work(here: object) -> dict[str, object]:
        with fixed(request, here, samples=1500, seed=0) as model, torch.no_grad():  # type: ignore[arg-type]
            for on in (False, True):
                with model.batch_statistics(on):
                    points = Points(model, [random_direction(model.model, 0, number) for number in (0, 1)])
                    seen.append(points._graph is not None)
                    captured = points.evaluate(PLACES)
                    points._graph = None
                    assert torch.equal(captured, points.evaluate(PLACES))
                    assert torch.equal(captured[0], captured[3])
        return {}

    in_world(request, [], work)  # type: ignore[arg-type]
    assert seen == [True, True], "the model allows a graph"


def test_the_same_surface_on_one_and_two_workers() -> None:
    """Two workers share the GPU, over gloo."""
    found = []
    for more in (("--workers", "1"), ("--workers", "2", "--backend", "gloo")):
        for shape in ("plane", "path"):
            done = paceline("landscape", "x", "--shape", shape, "--points", "9", *more)
            assert done.returncode == 0, done.stderr
        names = ("plane-0", "path")
        found.append([json.loads(Path(f"runs/x/landscape/{name}.json").read_text())["sets"] for name in names])
    assert found[0] == found[1]
