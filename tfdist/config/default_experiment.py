"""The experiment that runs without `--config`: digits, as in configs/digits.py."""

from tfdist.config import Experiment


def get_config() -> Experiment:
    """Returns the digits experiment: a small CNN on 1,437 images, over 97 % right on the other 360."""
    return Experiment()
