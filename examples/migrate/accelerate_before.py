"""The same training with Accelerate.

accelerate launch --cpu --num_processes 2 examples/migrate/accelerate_before.py
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from problem import Net, make_data
from torch.utils.data import DataLoader


def main(epochs=3, path="model.pt"):
    accelerator = Accelerator()
    torch.manual_seed(0)
    train_set, test_set = make_data(1000, seed=1), make_data(203, seed=2)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_loader = DataLoader(train_set, batch_size=64 // accelerator.num_processes, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=50)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    for epoch in range(epochs):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
        model.eval()
        hits = []
        with torch.no_grad():
            for x, y in test_loader:
                hits.append(accelerator.gather_for_metrics(model(x).argmax(1) == y))
        accelerator.print(f"epoch {epoch}: accuracy {torch.cat(hits).float().mean():.4f} of {len(test_set)} samples")
    accelerator.save(accelerator.unwrap_model(model).state_dict(), path)
    accelerator.end_training()


if __name__ == "__main__":
    main()
