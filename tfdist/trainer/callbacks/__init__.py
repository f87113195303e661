"""What a training calls at each of its moments: the base class of the hooks, and the list in which they are called."""
