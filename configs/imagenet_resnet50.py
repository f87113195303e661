"""ImageNet with ResNet-50: the yardstick of distributed training.

    python -m tfdist.train --config=imagenet_resnet50 --strategy=mirrored

For eight GPUs. TFDS cannot download the images: register at https://image-net.org, put ILSVRC2012_img_train.tar and
ILSVRC2012_img_val.tar into its folder for manual downloads (the first run names it), and have 300 GB free. Goyal et
al., *Accurate, Large Minibatch SGD* (2017), report 76.3 % of the validation images right with this schedule; it has
not been run here.
"""

from tfdist.config import Data, Experiment, Model, Optimizer, Train


def get_config() -> Experiment:
    return Experiment(
        name="imagenet_resnet50",
        data=Data(
            name="imagenet2012",
            eval_split="validation",
            image_size="224",
            augment="resized_crop(0.08), flip, color(0.4)",
        ),
        model=Model(name="ResNet50"),
        optimizer=Optimizer(
            name="sgd",
            learning_rate=0.1,
            base_batch=256,
            scale_learning_rate="linear",
            schedule="cosine",
            warmup="5 epochs",
            weight_decay=1e-3,
            decay_exclude="bias, gamma, beta",
            options="momentum=0.9, nesterov=True",
        ),
        train=Train(epochs=90, batch_size=1024, precision="mixed_bfloat16", label_smoothing=0.1),
    )
