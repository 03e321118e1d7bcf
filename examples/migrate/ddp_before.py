"""A plain DistributedDataParallel script.

torchrun --nproc-per-node 2 examples/migrate/ddp_before.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from problem import Net, make_data
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main(epochs=3, path="model.pt"):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_set, test_set = make_data(1000, seed=1), make_data(203, seed=2)
    model = Net()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = DistributedSampler(train_set, seed=0)
    train_loader = DataLoader(train_set, batch_size=64 // dist.get_world_size(), sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=50, sampler=DistributedSampler(test_set, shuffle=False))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(ddp(x), y).backward()
            optimizer.step()
        model.eval()
        found = torch.zeros(2)
        with torch.no_grad():
            for x, y in test_loader:
                found += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
        dist.all_reduce(found)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {found[0] / found[1]:.4f} of {found[1]:.0f} samples")
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
