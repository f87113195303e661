"""Optical recognition of handwritten digits: 1,797 images of 8x8 pixels, packaged, as a TFDS builder.

digits.csv.gz has 64 pixels from 0 to 16, then the label: E. Alpaydin and C. Kaynak, UCI Machine Learning Repository,
1998, https://doi.org/10.24432/C50P49, licence CC BY 4.0; of it the test set, as scikit-learn distributes it.
"""

import gzip
import io
from importlib import resources

import numpy as np
import tensorflow_datasets as tfds

from tfdist.config.field_syntax import suggest
from tfdist.errors import UserError

TRAIN = 1437


class Digits(tfds.core.GeneratorBasedBuilder):
    """Images uint8 [8, 8, 1] with values 0 to 16, labels 0 to 9; 1,437 for training, 360 for testing."""

    MAXIMUM = 16.0
    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First release."}

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Tensor(shape=(8, 8, 1), dtype=np.uint8),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="https://doi.org/10.24432/C50P49",
            description="8x8 images of handwritten digits (UCI, CC BY 4.0).",
        )

    def _split_generators(self, dl_manager):
        rows = _rows()
        return {"train": self._generate_examples(rows[:TRAIN]), "test": self._generate_examples(rows[TRAIN:])}

    def _generate_examples(self, rows):
        for i, row in enumerate(rows):
            yield i, {"image": row[:64].reshape(8, 8, 1).astype(np.uint8), "label": int(row[64])}


def some(split: str = "train", first: int = 0, last: int = 9, each: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns only the digits from `first` to `last`, as classes from 0 on: uint8 [n, 8, 8, 1] and int64 [n].

    So a model that some digits have taught can be shown to help with others. To train on, there are `each` pictures of
    each digit, or all if 0; the test split is always whole.
    """
    if split not in ("train", "test"):
        raise UserError(f"unknown split {split!r} of the digits{suggest(split, ('train', 'test'))}")
    if not 0 <= first < last <= 9:
        raise UserError(f"the digits from {first} to {last} are not at least two of 0 to 9", "correct data.options")
    rows = _rows()
    rows = rows[:TRAIN] if split == "train" else rows[TRAIN:]
    most = each if each and split == "train" else None
    chosen = [np.flatnonzero(rows[:, 64] == digit)[:most] for digit in range(first, last + 1)]
    rows = rows[np.sort(np.concatenate(chosen))]
    return rows[:, :64].reshape(-1, 8, 8, 1).astype(np.uint8), rows[:, 64] - first


def _rows() -> np.ndarray:
    """Reads [1797, 65] integers: the pixels of an image, and its label."""
    packed = resources.files(__package__).joinpath("digits.csv.gz").read_bytes()
    return np.loadtxt(io.StringIO(gzip.decompress(packed).decode()), delimiter=",", dtype=np.int64)
