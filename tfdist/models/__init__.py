"""What is trained: models by name, their losses, optimizers and weights; an update is computed in `step`."""
