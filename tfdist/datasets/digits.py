"""Optical recognition of handwritten digits: 1,797 images of 8x8 pixels, as a TFDS builder.

The data is packaged (digits.csv.gz: 64 pixels from 0 to 16, then the label), so
that nothing is downloaded. Source: E. Alpaydin and C. Kaynak, "Optical
Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998,
https://doi.org/10.24432/C50P49, licence CC BY 4.0; the 1,797 images are its
test set, as scikit-learn distributes it.
"""

from __future__ import annotations

import gzip
import io
from importlib import resources

import numpy as np
import tensorflow_datasets as tfds

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
        del dl_manager
        packed = resources.files(__package__).joinpath("digits.csv.gz").read_bytes()
        rows = np.loadtxt(io.StringIO(gzip.decompress(packed).decode()), delimiter=",", dtype=np.int64)
        return {"train": self._examples(rows[:TRAIN]), "test": self._examples(rows[TRAIN:])}

    def _generate_examples(self, rows):
        return self._examples(rows)

    @staticmethod
    def _examples(rows):
        for i, row in enumerate(rows):
            yield i, {"image": row[:64].reshape(8, 8, 1).astype(np.uint8), "label": int(row[64])}
