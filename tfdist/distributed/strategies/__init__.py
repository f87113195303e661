"""Builders of `Distribution`: `local` for a process alone, `multi_worker` and `horovod` for several processes."""
