"""ddp_before.py on Paceline's core: the same weights, bit for bit, on 1 to 4 workers.

torchrun --nproc-per-node 2 examples/migrate/ddp_after.py
"""

import torch
import torch.nn.functional as F
from problem import Net, make_data
from torch.utils.data import DataLoader

from paceline import Parts, print, save, total, world


@world()
def main(epochs=3, path="model.pt"):
    torch.manual_seed(0)
    train_set, test_set = make_data(1000, seed=1), make_data(203, seed=2)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    team = Parts(model, DataLoader(train_set, batch_size=64), virtual_workers=4, reduce="exact", seed=0)
    test_loader = DataLoader(test_set, batch_size=50)
    for epoch in range(epochs):
        model.train()
        for step in team.epoch(epoch):
            optimizer.zero_grad()
            step.backward(lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
            optimizer.step()
        model.eval()
        found = torch.zeros(2)
        with torch.no_grad():
            for x, y in team.deal(test_loader):
                found += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
        found = total(found)
        print(f"epoch {epoch}: accuracy {found[0] / found[1]:.4f} of {found[1]:.0f} samples")
    save(model.state_dict(), path)


if __name__ == "__main__":
    main()
