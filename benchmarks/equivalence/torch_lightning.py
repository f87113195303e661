"""Lightning's Trainer, as its documentation has it: `python torch_lightning.py N` starts the other processes."""

import os
import pathlib
import sys

import lightning
import problem
import torch
import torch_net

WORLD = int(sys.argv[1])
torch.set_num_threads(1)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch_net.net()
        self.loss = torch.nn.CrossEntropyLoss()

    def training_step(self, batch, i):
        problem.maybe_kill(self.current_epoch + 1, i, self.global_rank, self.trainer.world_size)
        x, y = batch
        return self.loss(self.net(x), y)

    def configure_optimizers(self):
        return torch_net.sgd(self.parameters())

    def on_train_epoch_end(self):
        if self.global_rank == 0:
            problem.record(self.current_epoch + 1, torch_net.weights(self.net))


backup = os.environ.get("BACKUP")
save = lightning.pytorch.callbacks.ModelCheckpoint(dirpath=backup, save_last=True)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=WORLD,
    strategy="ddp" if WORLD > 1 else "auto",
    max_epochs=problem.EPOCHS,
    accumulate_grad_batches=problem.ACCUMULATE,
    gradient_clip_val=problem.CLIP_NORM,
    callbacks=[save] if backup else [],
    enable_checkpointing=bool(backup),
    logger=False,
    enable_progress_bar=False,
)
loader = torch.utils.data.DataLoader(torch_net.dataset(), problem.MICRO_BATCH // WORLD, shuffle=False)
resume = "last" if backup and list(pathlib.Path(backup).glob("*.ckpt")) else None
trainer.fit(Module(), loader, ckpt_path=resume)
