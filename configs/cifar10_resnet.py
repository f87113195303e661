"""CIFAR-10 with the ResNet-20 of the paper that introduced it.

    python -m tfdist.train --config=cifar10_resnet

170 MB are downloaded once, to the folder of TFDS. For one GPU or several. He et al., *Deep Residual Learning for
Image Recognition* (2016), report 91.25 % of the test images right for this network, these augmentations and 164
epochs; it has not been run here to its end.
"""

from tfdist.config import Data, Experiment, Model, Optimizer, Train


def get_config() -> Experiment:
    return Experiment(
        name="cifar10_resnet",
        data=Data(name="cifar10", augment="crop(4), flip"),
        model=Model(name="resnet_cifar", options="depth=20"),
        # Their penalty of 1e-4 goes through a momentum of 0.9; ours is taken off the weights, so ten times as much.
        optimizer=Optimizer(
            name="sgd",
            learning_rate=0.1,
            schedule="cosine",
            warmup="2 epochs",
            weight_decay=1e-3,
            decay_exclude="bias, gamma, beta",
            options="momentum=0.9, nesterov=True",
        ),
        train=Train(epochs=164, batch_size=128, label_smoothing=0.0),
    )
