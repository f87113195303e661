"""How a step gets its global batches, by the kind of source."""
