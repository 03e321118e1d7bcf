"""plain.py with Accelerate, to compare the number of changed lines.

torchrun --nproc-per-node 2 examples/mnist/with_accelerate.py --epochs 2
"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import paceline.data


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


def load_data(name):
    """The training and the test set, scaled to mean 0 and deviation 1."""
    data = paceline.data.load(name)
    pairs = (data.train_images, data.train_labels), (data.validation_images, data.validation_labels)
    return [TensorDataset((torch.tensor(x) / 255 - 0.286) / 0.353, torch.tensor(y)) for x, y in pairs]


def train(args, model, accelerator, loader, optimizer, epoch):
    model.train()
    for number, (images, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        if number % args.log_interval == 0:
            seen, size, percent = number * args.batch_size, len(loader.dataset), 100 * number / len(loader)
            accelerator.print(f"Train Epoch: {epoch} [{seen}/{size} ({percent:.0f}%)]\tLoss: {loss.item():.6f}")
            if args.dry_run:
                break


def test(model, accelerator, loader):
    model.eval()
    test_loss, correct = 0, 0
    with torch.no_grad():
        for images, labels in loader:
            output, labels = accelerator.gather_for_metrics((model(images), labels))
            test_loss += F.nll_loss(output, labels, reduction="sum").item()
            correct += (output.argmax(1) == labels).sum().item()
    size = len(loader.dataset)
    accelerator.print(f"\nTest set: Average loss: {test_loss / size:.4f}, Accuracy: {correct}/{size} ({correct / size:.0%})\n")


def parse(argv):
    parser = argparse.ArgumentParser(description="Fashion-MNIST")
    parser.add_argument("--data", default="fashion-mnist-mini", help="or fashion-mnist, the full set")
    parser.add_argument("--batch-size", type=int, default=64, help="for training")
    parser.add_argument("--test-batch-size", type=int, default=1000, help="for testing")
    parser.add_argument("--epochs", type=int, default=14, help="epochs to train")
    parser.add_argument("--lr", type=float, default=1.0, help="learning rate")
    parser.add_argument("--gamma", type=float, default=0.7, help="factor of the learning rate after each epoch")
    parser.add_argument("--num-workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--no-cuda", action="store_true", help="do not use a GPU")
    parser.add_argument("--dry-run", action="store_true", help="one step per epoch")
    parser.add_argument("--seed", type=int, default=1, help="random seed")
    parser.add_argument("--log-interval", type=int, default=10, help="batches between log lines")
    parser.add_argument("--save-model", metavar="FILE", help="write the trained weights")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    torch.manual_seed(args.seed)
    accelerator = Accelerator(cpu=args.no_cuda)

    train_set, test_set = load_data(args.data)
    options = {"num_workers": args.num_workers, "pin_memory": accelerator.device.type == "cuda"}
    train_loader = DataLoader(train_set, batch_size=args.batch_size // accelerator.num_processes, shuffle=True, **options)
    test_loader = DataLoader(test_set, batch_size=args.test_batch_size, **options)

    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(args, model, accelerator, train_loader, optimizer, epoch)
        test(model, accelerator, test_loader)
        scheduler.step()

    if args.save_model:
        accelerator.save(accelerator.unwrap_model(model).state_dict(), args.save_model)
    return model


if __name__ == "__main__":
    main()
