"""Hugging Face Accelerate, as its guide to gradient accumulation has it.

torchrun --standalone --nproc_per_node=N torch_accelerate.py
"""

import os
import pathlib

import accelerate
import problem
import torch
import torch_net

accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=problem.ACCUMULATE)
world, rank = accelerator.num_processes, accelerator.process_index
torch.set_num_threads(1)
net = torch_net.net()
loader = torch.utils.data.DataLoader(torch_net.dataset(), problem.MICRO_BATCH // world, shuffle=False)
model, optimizer, loader = accelerator.prepare(net, torch_net.sgd(net.parameters()), loader)
loss, first = torch.nn.CrossEntropyLoss(), 1
backup = os.environ.get("BACKUP")
if backup and pathlib.Path(backup, "epoch").exists():
    accelerator.load_state(backup)
    first = int(pathlib.Path(backup, "epoch").read_text()) + 1
for epoch in range(first, problem.EPOCHS + 1):
    for i, (x, y) in enumerate(loader):
        problem.maybe_kill(epoch, i, rank, world)
        with accelerator.accumulate(model):
            accelerator.backward(loss(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), problem.CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
    if accelerator.is_main_process:
        problem.record(epoch, torch_net.weights(accelerator.unwrap_model(model)))
    if backup:
        accelerator.save_state(backup)
        if accelerator.is_main_process:
            pathlib.Path(backup, "epoch").write_text(str(epoch))
accelerator.end_training()
