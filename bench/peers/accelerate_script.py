"""Hugging Face Accelerate, as in its quick tour: `accelerator.prepare`, `accelerator.backward`, `gather_for_metrics`."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from shared import Clock, FashionMNIST, settings
from torch import nn
from torch.utils.data import DataLoader


def main() -> None:
    args = settings()
    clock = Clock()  # bench
    accelerator = Accelerator(
        cpu=args.device == "cpu",
        mixed_precision="bf16" if args.precision == "bf16" else "no",
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
    )
    torch.backends.cudnn.benchmark = True
    train = DataLoader(
        FashionMNIST(args.data, train=True),
        batch_size=args.part_batch,
        shuffle=True,
        num_workers=args.loaders,
        persistent_workers=args.loaders > 0,
        pin_memory=args.device == "cuda",
    )
    validation = DataLoader(FashionMNIST(args.data, train=False), batch_size=250)
    model = args.make_model()
    loss_function = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.peak_lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(  # prepared, it steps once per worker: len(train) is one worker's
        optimizer,
        max_lr=args.peak_lr,
        total_steps=args.epochs * len(train),
        anneal_strategy="linear",
        div_factor=10,
        cycle_momentum=False,
    )
    model, optimizer, train, validation, schedule = accelerator.prepare(model, optimizer, train, validation, schedule)
    for _ in range(args.epochs):
        model.train()
        clock.begin()  # bench
        for images, labels in train:
            optimizer.zero_grad()
            loss = loss_function(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            clock.step(len(labels))  # bench
        clock.end()  # bench
        model.eval()
        right = []
        for images, labels in validation:
            with torch.no_grad():
                hits = model(images).argmax(1) == labels
            right.append(accelerator.gather_for_metrics(hits))
        clock.accuracy(torch.cat(right).float().mean())  # bench
    accelerator.end_training()


if __name__ == "__main__":
    main()
