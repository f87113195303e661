"""Splits in the syntax of TFDS, against TFDS itself."""

import numpy as np
import pytest
import tensorflow_datasets as tfds
from support.refusals import refused

from tfdist.data.datasets.examples import select_split
from tfdist.errors import UserError

SIZES = {"train": 1003, "test": 7}


def rows(text):
    parts = select_split(text, SIZES, "data.train_split", "the data")
    return [(name, numbers[0], numbers[-1] + 1) for name, numbers in parts]


SPLITS = (
    "train test train[:90%] train[90%:] train[10%:20%] train[100:] train[:-50] train[-50:] train[5:6] test[:50%] "
    "train[:-10%] train+test train[:3]+test[5:]+train[7:]"
)


@pytest.mark.parametrize("text", SPLITS.split())
def test_as_tfds_means_it(text):
    infos = {
        name: tfds.core.SplitInfo(name=name, shard_lengths=[size], num_bytes=0, filename_template=template(name))
        for name, size in SIZES.items()
    }
    expected = []
    for part in tfds.core.splits.SplitDict(list(infos.values()))[text].file_instructions:
        end = part.examples_in_shard if part.take < 0 else part.skip + part.take
        expected.append((part.filename.split("-")[1].split(".")[0], part.skip, end))
    assert rows(text) == expected


def template(name):
    names = dict(template="{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}", dataset_name="d", filetype_suffix="tfrecord")
    return tfds.core.ShardedFileTemplate(data_dir="/nowhere", split=name, **names)


@pytest.mark.parametrize("size", range(1, 60))
@pytest.mark.parametrize("percent", [1, 33.3, 50, 90])
def test_two_slices_with_a_common_bound_share_no_example_and_leave_none_out(size, percent):
    found = []
    for text in (f"a[:{percent}%]", f"a[{percent}%:]"):
        try:
            found += [select_split(text, {"a": size}, "f", "w")[0][1]]
        except UserError as error:
            assert "selects none" in str(error)
    np.testing.assert_array_equal(np.concatenate(found), np.arange(size))


@pytest.mark.parametrize(
    "text, message",
    [
        ("trian", ("data.train_split='trian': the data has no split 'trian': did you mean 'train'? Known are test, "
                   "train, and slices such as test[:90%]")),
        ("train[:90", "data.train_split='train[:90' is not understood: write train, train[:90%], train[100:]"),
        ("train[::2]", "is not understood"),
        ("train[90]", "is not understood"),
        ("", "is not understood"),
        ("train+", "is not understood"),
        ("train[:2000]", "goes beyond the 1,003 examples of the data"),
        ("train[:120%]", "goes beyond the 100 % of the data"),
        ("train[-1004:]", "goes beyond the 1,003 examples of the data"),
        ("train[7:7]", "selects none of the 1,003 examples of the data"),
        ("test[:1%]", "selects none of the 7 examples"),
    ],
)  # fmt: skip
def test_what_is_refused(text, message):
    with refused() as error:
        select_split(text, SIZES, "data.train_split", "the data")
    assert message in str(error.value)
