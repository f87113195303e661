"""Checks that replicas and strategies give one result: equivalence probe, replica sync, weight distance."""
