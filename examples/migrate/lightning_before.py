"""The same training with Lightning, and a learning rate that falls after each epoch.

python examples/migrate/lightning_before.py 2
"""

import sys

import lightning
import torch
import torch.nn.functional as F
from problem import Net, make_data
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader


class Points(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        logits = self.net(x)
        self.log("val_loss", F.cross_entropy(logits, y), sync_dist=True)
        self.log("val_accuracy", (logits.argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [StepLR(optimizer, step_size=1, gamma=0.7)]


def main(workers=1, epochs=3):
    lightning.seed_everything(0)
    train_loader = DataLoader(make_data(1000, seed=1), batch_size=64 // workers, shuffle=True)
    val_loader = DataLoader(make_data(203, seed=2), batch_size=50)
    strategy = "ddp" if workers > 1 else "auto"
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", devices=workers, strategy=strategy, log_every_n_steps=10)
    trainer.fit(Points(), train_loader, val_loader)
    return trainer.callback_metrics


if __name__ == "__main__":
    print(main(*map(int, sys.argv[1:])))
