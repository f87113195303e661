"""The command `plan`: predicts how fast an experiment trains on several machines."""
