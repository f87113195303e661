"""The run folder, its checkpoints and their content, and the choice of the checkpoint to resume."""
