"""Handwritten digits with a small CNN: what `python -m tfdist.train` trains without a config.

    python -m tfdist.train --config=digits

1,437 images of 8x8 pixels to train on, the other 360 (other writers) to test.
98.1 % of the test images right after 30 epochs, about 11 s on two cores.
"""

from tfdist.config import Data, Experiment, Model, Optimizer, Train


def get_config() -> Experiment:
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
