"""PyTorch's DistributedDataParallel over Gloo, as its tutorials and those of `torchrun` have it.

    torchrun --standalone --nproc_per_node=N torch_ddp.py [exact]

With `exact`, what an expert writes: no row twice, losses divided by the examples of the whole update, and BatchNorm's
statistics over all ranks by hand, since `SyncBatchNorm` refuses CPUs.
"""

import os
import sys

import problem
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
import torch_net


class NormOverRanks(torch.nn.BatchNorm1d):
    """BatchNorm whose statistics are those of the rows of all ranks."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        sums = torch.cat([x.sum(0), (x * x).sum(0), torch.full((1,), float(len(x)))])
        if dist.is_initialized():
            sums = torch.distributed.nn.functional.all_reduce(sums)
        features = x.shape[1]
        mean, count = sums[:features] / sums[-1], sums[-1].detach()
        variance = sums[features:-1] / count - mean * mean
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


def main(exact: bool) -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    model = torch_net.net()
    if exact and problem.NORM == "batch":
        model[1].__class__ = NormOverRanks
    network = model
    if world > 1:
        dist.init_process_group("gloo")
        network = torch.nn.parallel.DistributedDataParallel(model)
    optimizer, rows = torch_net.sgd(model.parameters()), torch_net.dataset()
    if exact:  # every rank's rows of each micro-batch, of which the last has no filler
        starts = range(0, len(rows), problem.MICRO_BATCH)
        batches = [range(s, min(s + problem.MICRO_BATCH, len(rows)))[rank::world] for s in starts]
        loader = torch.utils.data.DataLoader(rows, batch_sampler=batches)
    else:
        sampler = torch.utils.data.DistributedSampler(rows, world, rank, shuffle=False)
        loader = torch.utils.data.DataLoader(rows, problem.MICRO_BATCH // world, sampler=sampler)
    loss = torch.nn.CrossEntropyLoss(reduction="sum" if exact else "mean")
    epochs = range(1, problem.EPOCHS + 1)
    backup = os.environ.get("BACKUP")
    if backup and os.path.exists(backup):
        state = torch.load(backup)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        epochs = range(state["epoch"] + 1, problem.EPOCHS + 1)
    for epoch in epochs:
        for i, (x, y) in enumerate(loader):
            problem.maybe_kill(epoch, i, rank, world)
            # An expert divides by the examples of this micro-batch on all ranks; DDP divides by the number of ranks.
            examples = min(problem.MICRO_BATCH, len(rows) - i * problem.MICRO_BATCH) / world if exact else 1
            last = (i + 1) % problem.ACCUMULATE == 0
            if world > 1:
                network.require_backward_grad_sync = last
            (loss(network(x), y) / examples / problem.ACCUMULATE).backward()
            if last:
                torch.nn.utils.clip_grad_norm_(model.parameters(), problem.CLIP_NORM)
                optimizer.step()
                optimizer.zero_grad()
        if rank == 0:
            problem.record(epoch, torch_net.weights(model))
            if backup:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, backup + ".new")
                os.replace(backup + ".new", backup)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main("exact" in sys.argv)
