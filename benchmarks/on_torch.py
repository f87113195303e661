"""PyTorch: a process that trains one workload, as often as it is asked to (see `serving.py`).

    python benchmarks/on_torch.py WORKLOAD REPLICAS

One thread per replica, fused Adam, rows shuffled each epoch. Several replicas are processes that train by
DistributedDataParallel over Gloo; the first one answers, and starts the others.
"""

import os
import socket
import subprocess
import sys
import time

import serving
import torch
import torch.distributed as dist
import torch_models

NAME, REPLICAS = sys.argv[1], int(sys.argv[2])
EPOCHS = {"mlp": 8, "cnn": 2, "wide": 2}[NAME]
"""As in workloads.py, which cannot be imported without Keras."""


def epochs(rank: int):
    """Returns what trains for the epochs that count, on this process' rows."""
    shape, classes, size, examples = torch_models.SIZES[NAME]
    steps = examples // size
    torch.manual_seed(rank)
    x = torch.randn(steps * size, *shape)
    y = torch.randint(0, classes, (steps * size,))
    model = torch_models.MODELS[NAME]()
    if REPLICAS > 1:
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    loss = torch.nn.CrossEntropyLoss()

    def train():
        for _ in range(EPOCHS):
            order = torch.randperm(len(x))
            for i in range(steps):
                rows = order[i * size : (i + 1) * size]
                optimizer.zero_grad(set_to_none=True)
                loss(model(x[rows]), y[rows]).backward()
                optimizer.step()

    return train, steps * size * REPLICAS * EPOCHS


def main() -> None:
    rank = int(os.environ.get("RANK", "0"))
    torch.set_num_threads(1)
    others = []
    if REPLICAS > 1:
        if rank == 0:
            with socket.create_server(("127.0.0.1", 0)) as free:
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
            os.environ |= {"WORLD_SIZE": str(REPLICAS), "RANK": "0"}
            for other in range(1, REPLICAS):
                env = os.environ | {"RANK": str(other)}
                others.append(subprocess.Popen([sys.executable, *sys.argv], stdin=subprocess.PIPE, env=env))
        dist.init_process_group("gloo")
    train, examples = epochs(rank)

    def run():
        for other in others:
            other.stdin.write(b"\n")
            other.stdin.flush()
        start = time.perf_counter()
        train()
        return time.perf_counter() - start

    if rank == 0:
        serving.serve(run, examples)
        for other in others:
            other.communicate()
    else:
        for _ in sys.stdin:
            train()


if __name__ == "__main__":
    main()
