"""Examples as global batches: sources, their layout over replicas, and the feeds that the compiled step reads.

`datasets/` finds and reads data by name, `augmentation/` changes images. Nothing here knows of models or strategies.
"""
