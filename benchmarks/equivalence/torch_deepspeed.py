"""DeepSpeed with ZeRO stage 1 on CPUs over Gloo: `torchrun --nproc_per_node=N torch_deepspeed.py`."""

import os
import pathlib

import deepspeed
import problem
import torch
import torch_net

os.environ |= {k: os.environ.get(k, v) for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))}
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", os.environ.get("FREE_PORT", "29511"))
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
deepspeed.init_distributed("gloo")
net = torch_net.net()
config = {
    "train_micro_batch_size_per_gpu": problem.MICRO_BATCH // world,
    "gradient_accumulation_steps": problem.ACCUMULATE,
    "gradient_clipping": problem.CLIP_NORM,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}
engine, _, loader, _ = deepspeed.initialize(
    model=net, optimizer=torch_net.sgd(net.parameters()), training_data=None, config=config
)
rows = torch_net.dataset()
sampler = torch.utils.data.DistributedSampler(rows, world, rank, shuffle=False)
loader = torch.utils.data.DataLoader(rows, problem.MICRO_BATCH // world, sampler=sampler)
loss, first, backup = torch.nn.CrossEntropyLoss(), 1, os.environ.get("BACKUP")
if backup and pathlib.Path(backup, "latest").exists():
    first = engine.load_checkpoint(backup)[1]["epoch"] + 1
for epoch in range(first, problem.EPOCHS + 1):
    for i, (x, y) in enumerate(loader):
        problem.maybe_kill(epoch, i, rank, world)
        engine.backward(loss(engine(x), y))
        engine.step()
    if rank == 0:
        problem.record(epoch, torch_net.weights(net))
    if backup:
        engine.save_checkpoint(backup, client_state={"epoch": epoch})
