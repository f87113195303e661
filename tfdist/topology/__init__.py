"""The command `topology`: what compiles a training for TPUs and GPUs that are not here, and which of them it knows."""
