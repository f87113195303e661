"""Connections between processes of a run: who is let in at a port, and what messages may hold. No TensorFlow."""
