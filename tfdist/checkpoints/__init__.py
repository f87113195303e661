"""What outlives the process: the run folder, checkpoints and what is in them, and the choice which one to resume."""
