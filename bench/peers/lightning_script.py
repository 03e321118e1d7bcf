"""Lightning, as in its documentation: a LightningModule and a Trainer; logger, checkpoints and progress bar off."""

import lightning as L
import torch
from shared import Clock, FashionMNIST, Settings, hooks, settings
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Classifier(L.LightningModule):
    def __init__(self, args: Settings) -> None:
        super().__init__()
        self.args, self.model, self.loss_function = args, args.make_model(), nn.CrossEntropyLoss(label_smoothing=0.1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        images, labels = batch
        return self.loss_function(self.model(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.model(images).argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.args.peak_lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=self.args.peak_lr,
            total_steps=self.trainer.estimated_stepping_batches,
            anneal_strategy="linear",
            div_factor=10,
            cycle_momentum=False,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    args = settings()
    train = DataLoader(
        FashionMNIST(args.data, train=True),
        batch_size=args.part_batch,
        shuffle=True,
        num_workers=args.loaders,
        persistent_workers=args.loaders > 0,
        pin_memory=args.device == "cuda",
    )
    validation = DataLoader(FashionMNIST(args.data, train=False), batch_size=250)
    trainer = L.Trainer(
        accelerator=args.device,
        devices=args.workers,
        strategy="ddp" if args.workers > 1 else "auto",
        precision="bf16-mixed" if args.precision == "bf16" else "32-true",
        max_epochs=args.epochs,
        benchmark=True,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[hooks(L.Callback, "on_train_epoch_start", "on_train_batch_end", "on_validation_start")],  # bench
    )
    trainer.fit(Classifier(args), train, validation)
    Clock().accuracy(trainer.callback_metrics["accuracy"])  # bench


if __name__ == "__main__":
    main()
