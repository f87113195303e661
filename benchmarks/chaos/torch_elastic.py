"""A network of the same size by PyTorch DDP under torchrun, as its documentation writes elastic training.

It loads the newest checkpoint when it starts, and saves one after the epochs, at most every 10 seconds.
"""

import os
import pathlib
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EXAMPLES, BATCH, EVERY_S = 1437, 48, 10
CHECKPOINT, LOG = pathlib.Path("checkpoint.pt"), os.environ["UPDATES_LOG"]


def data():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(EXAMPLES, 64)).astype("float32")
    y = (x @ draw.normal(size=(64, 10))).argmax(1)
    return TensorDataset(torch.from_numpy(x), torch.from_numpy(y))


def main(epochs: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    many = "RANK" in os.environ
    if many:
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if many else (0, 1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10))
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    loss_of = torch.nn.CrossEntropyLoss()
    examples, first, update = data(), 0, 0
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, update = state["epoch"], state["update"]
    trained = DistributedDataParallel(model) if many else model
    sampler = DistributedSampler(examples, world, rank)
    loader = DataLoader(examples, BATCH // world, sampler=sampler)
    saved = written = time.time()
    for epoch in range(first, epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(trained(x), y).backward()
            optimizer.step()
            update += 1
            now = time.time()
            if rank == 0 and now > written + 0.1:
                written = now
                with open(LOG, "a") as log:
                    log.write(f"{now:.3f} {update}\n")
        if rank == 0 and now > saved + EVERY_S:
            saved = now
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"epoch": epoch + 1, "update": update}, "checkpoint.new")
            os.replace("checkpoint.new", CHECKPOINT)
    if rank == 0:
        with open(LOG, "a") as log:
            log.write(f"{time.time():.3f} {update}\n")
        np.save("weights.npy", torch.cat([p.detach().flatten() for p in model.parameters()]).numpy())
    if many:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
