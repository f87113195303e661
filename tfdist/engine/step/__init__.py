"""The mathematics of one update: losses as sums and counts, the sum over replicas, the optimizer, the metrics."""
