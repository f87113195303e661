"""Everything that replaces Keras or touches its private names: losses, metrics, optimizer updates, layer state.

How an update is computed from these is in `step`; when it happens, in `trainer`.
"""
