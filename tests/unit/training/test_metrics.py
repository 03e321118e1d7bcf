"""Metrics of whole validation sets, several sets, and an objective for validation alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.training import ALONE, blobs, first_two, train_in
from paceline.data.loaders import Arrays
from paceline.errors import UsageError
from paceline.training.metrics import WholeSet
from paceline.training.task import Task, classify

OPTIONS = {"epochs": 2, "eval_batch": 10}


def with_outputs(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Any]:
    values: dict[str, Any] = first_two(classify())(model, batch)
    return {**values, "outputs": (model(batch[0]).argmax(1), batch[1], batch[2])}


def hits(found: Tensor, labels: Tensor, numbers: Tensor) -> float:
    assert numbers.equal(torch.arange(41)) or len(numbers) == 10, "the whole set, in sample order, after a trial on one chunk"
    assert not torch.is_grad_enabled()
    return float((found == labels).double().mean())


class Counter:
    """An object as torchmetrics has them."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.log: list[str] = []

    def reset(self) -> None:
        self.seen.clear()

    def update(self, found: Tensor, labels: Tensor, numbers: Tensor) -> None:
        self.seen += numbers.tolist()

    def compute(self) -> dict[str, Any]:
        return {"count": len(self.seen), "sorted": torch.tensor(self.seen == sorted(self.seen))}


def test_functions_and_objects_see_the_whole_set_in_order() -> None:
    counter = Counter()
    counter.seen.append(99)
    task = blobs(objective=with_outputs, metrics={"hits": hits, "seen": counter})
    trained = train_in(ALONE, task, OPTIONS)
    for row in trained.watcher.epochs:
        assert row["val_hits"] == pytest.approx(row["val_accuracy"], abs=1e-12)
        assert (row["val_seen_count"], row["val_seen_sorted"]) == (41.0, 1.0), "nothing is left from the epoch before"
        assert "train_hits" not in row
    assert trained.result.metrics["hits"] == trained.watcher.epochs[-1]["val_hits"]
    assert counter.seen == [99], "the user's own object stays as it is"


def test_torchmetrics() -> None:
    torchmetrics = pytest.importorskip("torchmetrics", reason="install paceline[metrics]")
    from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

    several = torchmetrics.MetricCollection({"micro": MulticlassF1Score(3, average="micro"), "acc": MulticlassAccuracy(3)})
    task = blobs(
        objective=lambda model, batch: {**first_two(classify())(model, batch), "outputs": (model(batch[0]), batch[1])},
        metrics={"f1": MulticlassF1Score(3, average="micro"), "all": several},
    )
    for row in train_in(ALONE, task, OPTIONS).watcher.epochs:
        assert row["val_f1"] == row["val_all_micro"] == pytest.approx(row["val_accuracy"], abs=1e-6)
        assert 0 < row["val_all_acc"] <= 1


def test_outputs_by_name() -> None:
    def objective(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Any]:
        return {"loss": classify()(model, batch[:2])["loss"], "outputs": {"target": batch[1], "preds": model(batch[0])}}

    def error(preds: Tensor, target: Tensor) -> Tensor:
        return (preds.argmax(1) != target).float().mean()

    assert 0 <= train_in(ALONE, blobs(objective=objective, metrics={"error": error}), OPTIONS).result.metrics["error"] <= 1


def broken(*outputs: Tensor) -> float:
    raise KeyError("nothing here")


class Broken(Counter):
    def update(self, *outputs: Any) -> None:
        raise RuntimeError("cannot update")


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (broken, "metric 'mine' failed: KeyError: 'nothing here'"),
        (Broken(), "metric 'mine' failed: RuntimeError: cannot update"),
        (lambda *outputs: outputs[0], r"metric 'mine' returned a tensor of shape \(41,\): it must return one number"),
        (lambda *outputs: None, "metric 'mine' returned None: it must return one number"),
        (lambda *outputs: "good", "metric 'mine' returned text: it must return one number"),
        (
            lambda one: 1.0,
            "metric 'mine' failed: .*takes 1 positional argument but 3 were given; its arguments are.* here 3 values",
        ),
        (lambda *outputs: {"a": 1.0, "b": outputs[0]}, "metric 'mine_b' returned a tensor of shape"),
    ],
)
def test_a_metric_that_fails_is_named(metric: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        train_in(ALONE, blobs(objective=with_outputs, metrics={"mine": metric}), OPTIONS)


def test_a_name_is_used_once() -> None:
    with pytest.raises(UsageError, match="metric 'accuracy': there is already a metric of this name"):
        train_in(ALONE, blobs(objective=with_outputs, metrics={"accuracy": hits}), OPTIONS)


def test_metrics_need_outputs_and_say_so_before_the_first_step() -> None:
    seen: list[bool] = []

    def objective(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        seen.append(model.training)
        return classify()(model, batch[:2])

    with pytest.raises(UsageError, match="task blobs has metrics, but its objective returned no 'outputs' in validation"):
        train_in(ALONE, blobs(objective=objective, metrics={"hits": hits}), OPTIONS)
    assert True not in seen


def test_a_metric_that_fails_is_tried_before_the_first_step() -> None:
    """A few samples may be too few for it, so this is only a note."""

    def at_least_20(found: Tensor, labels: Tensor, numbers: Tensor) -> float:
        if len(found) < 20:
            raise ValueError("too few")
        return 1.0

    trained = train_in(ALONE, blobs(objective=with_outputs, metrics={"mine": at_least_20}), OPTIONS)
    assert trained.watcher.notes[0] == (
        "in a trial on the first 10 validation samples, metric 'mine' failed: ValueError: too few"
    )
    assert trained.result.metrics["mine"] == 1.0


def test_a_metric_may_be_the_accuracy_of_a_target() -> None:
    def only_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Any]:
        values = with_outputs(model, batch)
        return {"loss": values["loss"], "outputs": values["outputs"]}

    task = blobs(objective=only_loss, metrics={"accuracy": hits})
    assert train_in(ALONE, task, {**OPTIONS, "target_accuracy": 0.1}).result.epochs == 1


def test_shapes_that_differ_between_chunks() -> None:
    whole = WholeSet({"mean": lambda rows: rows.mean()})
    whole.feed(torch.zeros(2, 3))
    whole.feed(torch.zeros(2, 4))
    with pytest.raises(UsageError, match=r"rows of shape \(3,\) and of \(4,\) were found; pad them"):
        whole.finish(ALONE, {})
    whole.feed(torch.ones(2, 3))
    assert whole.finish(ALONE, {}) == {"mean": 1.0}, "an error does not stay"


def points(count: int, shift: float) -> Arrays:
    return Arrays((torch.full((count, 5), shift), torch.arange(count) % 3, torch.arange(count)))


def test_several_validation_sets() -> None:
    sets = {"test": lambda: points(41, 0.0), "shifted": points(17, 1.0), "far": points(3, 9.0)}
    task = blobs()
    named = Task(
        name="named",
        model=task.model,
        train=task.train,
        validation=sets,
        objective=lambda model, batch: {**with_outputs(model, batch), "input": batch[0][:, 0]},
        metrics={"samples": lambda found, labels, numbers: len(numbers)},
        defaults=task.defaults,
    )
    trained = train_in(ALONE, named, OPTIONS)
    metrics = trained.result.metrics
    assert [name for name in metrics if "/" not in name] == ["loss", "accuracy", "input", "samples"]
    assert (metrics["input"], metrics["shifted/input"], metrics["far/input"]) == (0.0, 1.0, 9.0)
    assert (metrics["samples"], metrics["shifted/samples"], metrics["far/samples"]) == (41, 17, 3)
    assert trained.watcher.epochs[-1]["val_shifted/loss"] == metrics["shifted/loss"] != metrics["loss"]


def test_an_objective_for_validation() -> None:
    def other(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        assert not model.training
        return {"loss": classify()(model, batch[:2])["loss"], "number": batch[2]}

    row = train_in(ALONE, blobs(validation_objective=other), OPTIONS).watcher.epochs[0]
    assert row["val_number"] == 20.0
    assert "train_number" not in row
    assert "val_accuracy" not in row


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"metrics": [hits]}, r"metrics is a list: it must be a dict, as in \{'f1': F1Score\(...\)\}"),
        ({"metrics": {"hits": Counter}}, r"metrics\['hits'\] is the class Counter: give an object, as in Counter\(...\)"),
        ({"metrics": {"hits": 3}}, r"metrics\['hits'\] is an int: it must be a function of the outputs, or an object with"),
        ({"metrics": {"a/b": hits}}, r"metrics\['a/b'\]: the name of a metric must be plain text without a slash"),
        ({"metrics": {3: hits}}, r"metrics\[3\]: the name of a metric must be plain text"),
        ({"metrics": {"hits": hits}, "validation": None}, "metrics are computed from validation data, and the task has none"),
        ({"validation_objective": 3}, "validation_objective is an int: it must be a function"),
        ({"validation_objective": classify}, r"validation_objective=classify is not called"),
        ({"validation_objective": classify(), "validation": None}, "validation_objective needs validation data"),
        ({"validation": {}}, "validation is an empty dict"),
        ({"validation": {3: points(3, 0.0)}}, "validation has the key 3: keys name the sets"),
        ({"validation": {"a/b": points(3, 0.0)}}, "the name of a validation set is 'a/b': it must be a plain name"),
        ({"validation": {"test": None}}, "validation set 'test' is None: give Arrays"),
        ({"validation": {"test": torch.zeros(3)}}, "validation set 'test' is a Tensor: give Arrays"),
    ],
)
def test_fields_that_cannot_be(fields: dict[str, Any], words: str) -> None:
    given = {"name": "t", "model": lambda: nn.Linear(5, 3), "train": points(12, 0.0), "validation": points(3, 0.0)}
    with pytest.raises(UsageError, match=words):
        Task(**{**given, "objective": first_two(classify()), **fields})


def test_an_empty_set_is_named() -> None:
    task = Task(
        name="t",
        model=lambda: nn.Linear(5, 3),
        train=points(12, 0.0),
        validation={"test": points(3, 0.0), "none": lambda: points(0, 0.0)},
        objective=first_two(classify()),
    )
    with pytest.raises(UsageError, match="its validation set 'none' data is empty"):
        train_in(ALONE, task, OPTIONS)
