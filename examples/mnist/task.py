"""plain.py as a task: the same model, Adadelta, StepLR, batch sizes and seed.

Paceline prints test loss and accuracy after each epoch, writes the training loss of every 10 steps to metrics.jsonl, and saves
the model in the record.

paceline train examples/mnist/task.py --workers 2 --reduce exact
"""

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR

import paceline.data
from paceline import Arrays, Task


class Net(nn.Module):
    """Two convolutions, two dropouts, two linear layers; log-probabilities out."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(64 * 12 * 12, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images):
        found = F.relu(self.conv2(F.relu(self.conv1(images))))
        found = self.dropout1(F.max_pool2d(found, 2)).flatten(1)
        found = self.dropout2(F.relu(self.fc1(found)))
        return F.log_softmax(self.fc2(found), dim=1)


def objective(model, batch):
    images, labels = batch
    output = model(images)
    return {"loss": F.nll_loss(output, labels, reduction="none"), "accuracy": (output.argmax(1) == labels).float()}


def task(data: str = "fashion-mnist-mini", lr: float = 1.0, gamma: float = 0.7) -> Task:
    images = paceline.data.load(data)
    train, test = (images.train_images, images.train_labels), (images.validation_images, images.validation_labels)
    return Task(
        name="mnist",
        model=Net,
        train=Arrays((torch.tensor(train[0]), torch.tensor(train[1])), images.where),
        validation=Arrays((torch.tensor(test[0]), torch.tensor(test[1])), images.where),
        prepare=lambda batch, samples, epoch: ((batch[0] / 255 - 0.286) / 0.353, batch[1]),
        objective=objective,
        optimizer=lambda model, config: optim.Adadelta(model.parameters(), lr=lr),
        schedule=lambda optimizer: StepLR(optimizer, step_size=1, gamma=gamma),
        defaults={
            **{"global_batch": 64, "reference_batch": 64, "virtual_workers": 4, "eval_batch": 1000},
            **{"epochs": 14, "seed": 1, "log_every": 10},
        },
    )
