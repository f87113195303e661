"""A global batch in shards: the same bits on any number of devices."""
