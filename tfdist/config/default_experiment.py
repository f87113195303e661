"""The experiment that runs without `--config`: digits, as in configs/digits.py."""

from tfdist.config import Experiment


def get_config() -> Experiment:
    """A small CNN on 1,437 handwritten digits, over 97 % right on the other 360."""
    return Experiment()
