"""MosaicML Composer, as in its getting-started page: a ComposerClassifier and a Trainer; run with `composer -n WORKERS`."""

from functools import partial

import torch
import torch.nn.functional as F
from composer import Callback, Trainer
from composer.models import ComposerClassifier
from composer.utils import dist
from shared import Clock, FashionMNIST, hooks, settings
from torch.utils.data import DataLoader


def main() -> None:
    args = settings()
    torch.backends.cudnn.benchmark = True
    train_data, validation_data = FashionMNIST(args.data, train=True), FashionMNIST(args.data, train=False)
    dist.initialize_dist("gpu" if args.device == "cuda" else "cpu")
    train = DataLoader(
        train_data,
        batch_size=args.part_batch,
        sampler=dist.get_sampler(train_data, shuffle=True),
        num_workers=args.loaders,
        persistent_workers=args.loaders > 0,
        pin_memory=args.device == "cuda",
    )
    validation = DataLoader(validation_data, batch_size=250, sampler=dist.get_sampler(validation_data))
    model = ComposerClassifier(args.make_model(), num_classes=10, loss_fn=partial(F.cross_entropy, label_smoothing=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.peak_lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=args.peak_lr,
        total_steps=args.epochs * len(train),
        anneal_strategy="linear",
        div_factor=10,
        cycle_momentum=False,
    )
    trainer = Trainer(
        model=model,
        train_dataloader=train,
        eval_dataloader=validation,
        optimizers=optimizer,
        schedulers=schedule,
        step_schedulers_every_batch=True,
        max_duration=f"{args.epochs}ep",
        precision="amp_bf16" if args.precision == "bf16" else "fp32",
        device="gpu" if args.device == "cuda" else "cpu",
        progress_bar=False,
        callbacks=[hooks(Callback, "epoch_start", "batch_end", "epoch_end")],  # bench
    )
    trainer.fit()
    Clock().accuracy(trainer.state.eval_metrics["eval"]["MulticlassAccuracy"].compute())  # bench


if __name__ == "__main__":
    main()
