"""What tests share that is no test and no fixture."""
