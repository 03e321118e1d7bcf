"""Plain torch, as in pytorch.org's DDP tutorials: torchrun, DistributedDataParallel, DistributedSampler, DataLoader."""

import os

import torch
import torch.distributed as dist
from shared import Clock, FashionMNIST, settings
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    args = settings()
    clock = Clock()  # bench
    cuda = args.device == "cuda"
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    train_data, validation_data = FashionMNIST(args.data, train=True), FashionMNIST(args.data, train=False)
    sampler = DistributedSampler(train_data)
    train = DataLoader(
        train_data,
        batch_size=args.part_batch,
        sampler=sampler,
        num_workers=args.loaders,
        persistent_workers=args.loaders > 0,
        pin_memory=cuda,
    )
    validation = DataLoader(validation_data, batch_size=250, sampler=DistributedSampler(validation_data, shuffle=False))
    model = DistributedDataParallel(args.make_model().to(device), device_ids=[device.index] if cuda else None)
    loss_function = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.peak_lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=args.peak_lr,
        total_steps=args.epochs * len(train),
        anneal_strategy="linear",
        div_factor=10,
        cycle_momentum=False,
    )
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        clock.begin()  # bench
        for images, labels in train:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.precision == "bf16"):
                loss = loss_function(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            clock.step(len(labels))  # bench
        clock.end()  # bench
        model.eval()
        right = torch.zeros(2, device=device)
        with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.precision == "bf16"):
            for images, labels in validation:
                hits = model(images.to(device)).argmax(1) == labels.to(device)
                right += torch.tensor([hits.sum(), len(hits)], device=device)
        dist.all_reduce(right)
        clock.accuracy(right[0] / right[1])  # bench
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
