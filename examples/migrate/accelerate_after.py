"""accelerate_before.py on Paceline's core: the same weights, bit for bit, on 1 to 4 workers.

torchrun --nproc-per-node 2 examples/migrate/accelerate_after.py
"""

import torch
import torch.nn.functional as F
from problem import Net, make_data
from torch.utils.data import DataLoader

from paceline import Parts, print, save, world


@world()
def main(epochs=3, path="model.pt"):
    torch.manual_seed(0)
    train_set, test_set = make_data(1000, seed=1), make_data(203, seed=2)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=50)
    team = Parts(model, train_loader, virtual_workers=4, reduce="exact", seed=0)
    for epoch in range(epochs):
        model.train()
        for step in team.epoch(epoch):
            optimizer.zero_grad()
            step.backward(lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
            optimizer.step()
        found = team.evaluate(test_loader, lambda batch: {"accuracy": model(batch[0]).argmax(1) == batch[1]})
        print(f"epoch {epoch}: accuracy {found['accuracy']:.4f} of {len(test_set)} samples")
    save(model.state_dict(), path)


if __name__ == "__main__":
    main()
