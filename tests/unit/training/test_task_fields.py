"""A mistake in a task is one line, as early as it can be seen. What is clearly meant is accepted."""

import copy
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from harness.training import ALONE, train_in
from paceline.config import Config
from paceline.data.augment import Images
from paceline.data.loaders import Arrays
from paceline.errors import UsageError
from paceline.training import tasks
from paceline.training.sampling import balanced
from paceline.training.task import Task, classify

X, Y = torch.randn(32, 5, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 3
ONE = {"epochs": 1, "max_steps": 2, "global_batch": 8, "loader_workers": 0}


class Net(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(5, width)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)


class Wide(Net):
    def __init__(self, width: int) -> None:
        super().__init__(width)


class Items(Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return X[index], Y[index]


class Callable(Items):
    def __call__(self, index: int) -> Any:
        return self[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield X[0], Y[0]


class Endless(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return X[0]


LAZY = nn.LazyBatchNorm1d(affine=False)  # only its buffers are lazy


class Counted(Items):
    def __init__(self, count: Any) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count


def make(**fields: Any) -> Task:
    usual = {"name": "mine", "model": Net, "train": Items, "validation": Items, "objective": classify()}
    return Task(**{**usual, **fields})


def run(**fields: Any) -> Any:
    return train_in(ALONE, make(**fields), ONE)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": Net()}, r"mine: model is a Net that is already made, .*--seed.* model=lambda: Net\(...\)"),
        ({"model": nn.Sequential()}, r"model is a Sequential that is already made"),
        ({"model": "resnet"}, r"model is text, 'resnet': .*leave it out, and give classes=N and defaults=\{'model': NAME\}"),
        ({"model": 3}, r"model is an int: it must be a function; write model=lambda: Net\(...\)"),
        ({"model": Wide}, r"model, Wide\(width.*cannot be called with no arguments .*write model=lambda: Wide\(...\)"),
        ({"train": None}, r"train is None: give Arrays\(\(inputs, targets\)\), a map-style Dataset or a Stream, or a function"),
        ({"train": Net()}, "train is a Net: give Arrays"),
        ({"train": nn.Sequential()}, "train is a Sequential: give Arrays"),
        ({"train": "data/"}, "train is text: give Arrays"),
        ({"train": {"x": X}}, "train is a dict: give Arrays"),
        ({"train": X}, r"train is a Tensor: give Arrays\(\(x,\)\), or Arrays\(\(x, y\)\)"),
        ({"train": X.numpy()}, r"train is a numpy array: give Arrays\(\(x,\)\)"),
        ({"train": [Items(), Items()]}, "train is a list of 2 data sets: give one of them"),
        (
            {"train": DataLoader(Items())},
            r"train is a DataLoader: give its Dataset instead, and its collate_fn as Task\(collate=...\); --global-batch",
        ),
        ({"validation": DataLoader(Items())}, "validation is a DataLoader: give its Dataset"),
        ({"train": Stream()}, r"is an iterable data set, Stream, without __len__: .* as in train=Stream\(data, samples=N\)"),
        ({"validation": Stream()}, r"validation is an iterable data set, .* as in validation=Stream\(data, samples=N\)"),
        ({"collate": 3}, "collate is an int: it must be a function; write def collate"),
        ({"collate": lambda a, b: a}, "collate, .* cannot be called with \\(samples\\)"),
        ({"sampling": "balanced"}, r"sampling is text: give one weight per training sample, balanced\(labels\), or a function"),
        ({"sampling": [1.0, -1.0]}, "the weight of sample 1 is -1: weights must be finite and not negative"),
        ({"sampling": [0, 0]}, "all weights for sampling are 0"),
        ({"sampling": [[1.0], [1.0]]}, r"the weights for sampling have shape \(2, 1\)"),
        ({"sampling": 3}, "sampling is an int"),
        ({"sampling": balanced}, r"sampling=balanced is not called: write sampling=balanced\(labels\)"),
        ({"collate_fn": list}, "Task has no field 'collate_fn': did you mean 'collate'"),
        ({"sampler": [1.0]}, "Task has no field 'sampler': did you mean 'sampling'"),
        ({"train": Endless()}, "is an Endless without __len__, which must return the number of samples"),
        ({"train": 3}, "is an int without __len__"),
        ({"train": (X, Y[:3])}, "have 32, 3 samples: they must have the same length"),
        ({"train": lambda count: Items()}, r"train, <lambda>\(count\), cannot be called with no arguments"),
        ({"objective": classify}, r"objective=classify is not called: write objective=classify\(\)"),
        ({"objective": None}, r"objective is None: it must be a function; write def objective\(model, batch\)"),
        ({"objective": "classify"}, "objective is text: it must be a function"),
        (
            {"objective": F.cross_entropy},
            r"objective is torch's cross_entropy: an objective gets \(model, batch\)",
        ),
        ({"objective": nn.CrossEntropyLoss()}, "objective is torch's CrossEntropyLoss"),
        ({"objective": nn.CrossEntropyLoss}, "objective is torch's CrossEntropyLoss"),
        ({"objective": lambda model: 3}, r"<lambda>\(model\), cannot be called with \(model, batch\) \(too many"),
        ({"objective": lambda model, x, y: 3}, "missing a required argument: 'y'"),
        ({"prepare": 3}, r"prepare is an int: it must be a function; write def prepare\(batch, samples, epoch\)"),
        ({"prepare": lambda batch: batch}, r"prepare, <lambda>\(batch\), cannot be called with \(batch, samples, epoch\)"),
        ({"prepare": Images}, r"prepare, Images\(.*cannot be called with"),
        ({"classes": "ten"}, "classes is text: it must be the number of classes, a whole number"),
        ({"classes": 10.0}, "classes is 10.0: it must be the number of classes"),
        ({"classes": -1}, "classes is -1"),
        ({"name": 3}, "a task's name is an int: it must be text"),
        ({"name": "a/b"}, "is 'a/b': it must be a plain name"),
        ({"unit": 3}, "unit is an int: it must be text"),
        ({"defaults": ["epochs", 3]}, r"defaults is a list: it must be a dict of options, as in \{'epochs': 10\}"),
        ({"defaults": None}, "defaults is None: it must be a dict"),
        ({"defaults": {1: 2}}, "defaults has the key 1: keys are options"),
        ({"defaults": {"epoch": 1}}, "task mine, its defaults: unknown key 'epoch': did you mean 'epochs'"),
        ({"defaults": {"epochs": "many"}}, "task mine, its defaults: --epochs is 'many': it must be a whole number"),
        ({"defaults": {"epochs": -3}}, "task mine, its defaults: --epochs is -3"),
        ({"defaults": Config(workers=2)}, "task mine: 'workers' says where a run happens"),
        ({"dataset": Items()}, "Task has no field 'dataset': did you mean 'train'"),
        ({"val": Items()}, "Task has no field 'val': did you mean 'validation'"),
        ({"loss": F.cross_entropy}, "Task has no field 'loss': did you mean 'objective'"),
        ({"epochs": 3}, r"Task has no field 'epochs': it is an option; give it as defaults=\{'epochs': ...\}"),
        ({"modle": Net}, "unknown field of Task 'modle': did you mean 'model'"),
    ],
)
def test_a_task_checks_itself(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make(**fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"train": lambda: None}, "train returned None: its function must return the data; is a `return` missing"),
        ({"validation": lambda: None}, r"validation returned None: .*give validation=None for a run without validation"),
        ({"train": Net}, "train is a Net: give Arrays"),
        ({"train": lambda: Items}, "train is the class Items: give Arrays"),
        ({"train": lambda: X}, "train is a Tensor: give Arrays"),
        ({"train": lambda: DataLoader(Items())}, "train is a DataLoader: give its Dataset"),
        ({"train": Stream}, "is an iterable data set, Stream, without __len__"),
        ({"train": Endless}, "is an Endless without __len__"),
        ({"train": lambda: iter([])}, "is a list_iterator without __len__"),
        ({"train": Counted(0)}, "its training data is empty, a Counted of 0 samples: check for a wrong folder"),
        (
            {"train": Counted(2.5)},
            r"is a Counted whose __len__ failed \('float' object cannot be interpreted .*\): it must return the number",
        ),
        ({"train": Counted(-1)}, r"whose __len__ failed \(__len__\(\) should return >= 0\)"),
        ({"train": [torch.zeros(9, 2), torch.zeros(9)]}, r"is a list of 2 arrays: give Arrays\(\(x, y\)\), or a tuple of them"),
        ({"model": lambda: None}, "its model function returned None: it must return an nn.Module, .*`return` missing"),
        ({"model": lambda: (Net(), 3)}, "returned a tuple: it must return an nn.Module, the model itself"),
        ({"model": lambda: Net}, "returned the class Net: it must return an nn.Module"),
        ({"model": lambda: nn.DataParallel(Net())}, "returned a DataParallel: return the model that it wraps"),
        (
            {"model": lambda: nn.Sequential(nn.Linear(4, 3), LAZY)},
            "whose 1.running_mean has no shape yet",
        ),
        ({"model": lambda: nn.LazyLinear(3)}, r"LazyLinear whose weight has no shape yet, .* model\(torch.zeros\(2, ...\)\)"),
        ({"model": lambda: Net().requires_grad_(False)}, r"a Net, and all 2 of its parameters are frozen .*at least one"),
        ({"model": nn.ReLU}, "a ReLU, and it has no parameters: at least one parameter must be trainable"),
        ({"prepare": lambda batch, samples, epoch: None}, "prepare returned None: it must return the batch"),
        ({"train": lambda: (X, [1] * 32)}, "array 1 of Arrays is a list"),
    ],
)
def test_what_a_factory_returns_is_checked(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run(**fields)


@pytest.mark.parametrize(
    "train",
    [
        Items,
        Items(),
        Callable(),
        functools.partial(TensorDataset, X, Y),
        Arrays((X, Y)),
        lambda: Arrays((X.numpy(), Y.numpy())),
        (X, Y),
        lambda: (X.numpy(), Y),
        [(x, y) for x, y in zip(X, Y, strict=True)],
    ],
)
def test_data_may_be_given_as_it_is(train: Any) -> None:
    """All of these are the same data, so they train the same model."""
    weights = [run(train=given, validation=given).weights for given in (train, lambda: Arrays((X, Y)))]
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_config_as_defaults_stands_for_its_given_options() -> None:
    task = make(defaults=Config(epochs=7))
    assert task.defaults == {"epochs": 7}
    assert tasks.configure(task, {}).epochs == 7


def test_a_task_can_be_copied() -> None:
    assert copy.copy(make()).name == "mine"


def test_a_task_object_or_function_as_a_task() -> None:
    assert tasks.resolve(make(), {})[0].name == "mine"
    with pytest.raises(UsageError, match=r"paceline\.train got a function: give a paceline\.Task"):
        tasks.resolve(make, {})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"paceline\.train got a function: give a paceline\.Task"):
        tasks.check(make, {})  # type: ignore[arg-type]


def objective_of(value: Any) -> Any:
    """An objective that returns what `value` makes of a correct one's values."""
    return lambda model, batch: value(classify()(model, batch))


@pytest.mark.parametrize("options", [{}, {"virtual_workers": 2}, {"sam_rho": 0.1}, {"virtual_workers": 2, "reduce": "exact"}])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda good: None, "objective returned None: it must return a dict of tensors, .*`return` missing"),
        (lambda good: good["loss"], "objective returned a Tensor: it must return a dict"),
        (lambda good: (good["loss"], 3), "objective returned a tuple: it must return a dict"),
        (lambda good: {"los": good["loss"]}, "returned a dict with 'los': it must have 'loss'"),
        (lambda good: {}, "returned a dict with nothing"),
        (lambda good: {"loss": good["loss"][:-1]}, r"'loss' as a tensor of shape \(\d+,\): it must hold one value per sample"),
        (lambda good: {"loss": good["loss"][:, None]}, r"shape \(\d+, 1\): .*; use .flatten\(1\).mean\(1\)"),
        (lambda good: {**good, "error": 0.5}, "'error' as a float: it must be a tensor; leave out .item()"),
        (lambda good: {**good, "weight": 3}, "'weight' as an int: it must be a tensor; leave out .item()"),
        (
            lambda good: {**good, "weight": good["loss"].sum()},
            "'weight' as one number for the batch, and 'loss' with one value",
        ),
        (
            lambda good: {**good, "weight": good["loss"][:, None]},
            r"'weight' .* shape \(\d+, 1\): .*; use .flatten\(1\).sum\(1\)",
        ),
        (lambda good: {**good, "weight": -torch.ones_like(good["loss"])}, "a 'weight' that is negative or nan"),
        (lambda good: {**good, "weight": good["loss"] * torch.nan}, "a 'weight' that is negative or nan"),
        (
            lambda good: {**good, "outputs": good["loss"][1:]},
            r"'outputs' with a tensor of shape \(\d+,\): it must have one row",
        ),
        (lambda good: {**good, "outputs": good["loss"].mean()}, r"'outputs' with a tensor of shape \(\): it must have one row"),
        (lambda good: {**good, "outputs": (good["loss"], [1])}, "'outputs' with a list in it: it must be a tensor, or a tuple"),
        (lambda good: {**good, "outputs": ()}, "'outputs' that is empty"),
        (lambda good: {"loss": good["loss"].long()}, "'loss' as int64: use a real floating-point type"),
        (lambda good: {"loss": good["loss"] + 0j}, "'loss' as complex64: use a real floating-point type"),
        (lambda good: {"loss": good["loss"].to("meta")}, "'loss' on meta: it must stay on the model's device, cpu"),
    ],
)
def test_an_objective_keeps_its_promise(value: Any, words: str, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=words):
        train_in(ALONE, make(objective=objective_of(value)), {**ONE, **options})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"train": Arrays((X, Y, Y))},
            r"needs batches of two tensors, \(inputs, labels\): this batch is a tuple of a",
        ),
        ({"train": list(X)}, "this batch is a Tensor"),
        ({"train": [(x, "cat") for x in X]}, "this batch is a tuple of a Tensor, a tuple"),
        ({"model": lambda: nn.LSTM(5, 3)}, r"a model that returns logits, .*: it returned a tuple of a Tensor, a tuple"),
        ({"train": (X, Y + 1)}, "found labels from 1 to 3, but the model has 3 outputs: labels must be from 0 to 2"),
        ({"train": (X, Y - 1)}, "found labels from -1 to 1, but the model has 3 outputs"),
        ({"train": (X, Y.float())}, r"needs one label per sample, a whole number \(int64\): labels are float32"),
        ({"train": (X, Y[:, None])}, r"labels are int64 of shape \(8, 1\)"),
        ({"model": lambda: nn.Sequential(Net(1), nn.Flatten(0))}, r"the model returned shape \(8,\)"),
        ({"train": (X.double(), Y)}, "the first tensor of the batch is float64, and the model's weights are float32; convert"),
        ({"train": (X.byte(), Y)}, "the first tensor of the batch is uint8"),
    ],
)
def test_classify_says_what_does_not_fit(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        train_in(ALONE, make(**fields), {**ONE, "seed": 1, "global_batch": 32 if "labels from" in words else 8})


def test_classify_compiles_without_a_break() -> None:
    """A GPU's step is compiled as one graph: the checks must not cut it."""
    explained = torch._dynamo.explain(classify(0.1))(Net(), (X, Y))
    assert (explained.graph_break_count, explained.graph_count) == (0, 1)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("workers", "Task has no field 'workers': it says where a run happens; use --workers"),
        ("lr", r"Task has no field 'lr': use base_lr .*; options go into defaults=\{...\}"),
    ],
)
def test_an_option_of_another_tool_as_a_field_is_answered(field: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Task(name="x", train=[1], objective=lambda model, batch: {}, **{field: 2})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.bool])
def test_classify_takes_labels_of_any_whole_type(dtype: torch.dtype) -> None:
    labels = torch.tensor([0, 1, 1])
    found = classify()(nn.Identity(), (torch.tensor([[2.0, 0.0], [0.0, 2.0], [3.0, 0.0]]), labels.to(dtype)))
    expected = classify()(nn.Identity(), (torch.tensor([[2.0, 0.0], [0.0, 2.0], [3.0, 0.0]]), labels))
    assert torch.equal(found["loss"], expected["loss"])
    assert found["accuracy"].tolist() == [1.0, 1.0, 0.0]
