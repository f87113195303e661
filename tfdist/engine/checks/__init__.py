"""What is looked at before and during a training, so that a wrong result is refused and not given."""
