"""TFRecord files against TensorFlow's own reader, whole and damaged."""

import struct
import zlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from support.covering import first
from support.refusals import refused
from support.source_columns import columns_of

import tfdist
from tfdist import config
from tfdist.config import validation
from tfdist.data import spec as spec_lib
from tfdist.data.datasets import registry, tfrecords
from tfdist.data.sources import Arrays, Records

PICTURE = {"image": "png", "label": "int64", "classes": 3}
SPLITS = {"data.train_split": "train", "data.eval_split": "train"}


def feature(value):
    if isinstance(value, bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
    value = np.atleast_1d(value)
    if value.dtype.kind == "i":
        return tf.train.Feature(int64_list=tf.train.Int64List(value=value))
    return tf.train.Feature(float_list=tf.train.FloatList(value=value))


def write(path, examples, options=None):
    with tf.io.TFRecordWriter(str(path), options) as writer:
        for example in examples:
            if isinstance(example, dict):
                features = tf.train.Features(feature={k: feature(v) for k, v in example.items()})
                example = tf.train.Example(features=features).SerializeToString()
            writer.write(example)
    return path


def pictures(first, count, height=6):
    for i in range(first, first + count):
        png = tf.io.encode_png(np.full((height, 5, 3), 3 * i, np.uint8)).numpy()
        yield {"image": png, "label": i % 3, "weight": float(i)}


def test_records_are_those_that_tensorflow_reads(tmp_path):
    rng = np.random.default_rng(0)
    records = [rng.bytes(int(n)) for n in (0, 1, 7, 300, 70_000, 2**20, 3)]
    paths = [str(write(tmp_path / name, part)) for name, part in (("a", records[:4]), ("b", []), ("c", records[4:]))]
    found = tfrecords.index([p for p in paths if p != paths[1]])
    rows = np.array([6, 0, 3, 5, 5, 1, 2, 4])
    assert found.read(rows).tolist() == [records[i] for i in rows] and not found.broken
    assert found.read(np.arange(7)).tolist() == list(tf.data.TFRecordDataset(paths).as_numpy_iterator())
    assert found.name(5) == f"record 1 of {paths[2]}"


def test_images_labels_and_weights(tmp_path):
    for i in range(3):
        write(tmp_path / f"set-train-0000{i}-of-00003", pictures(4 * i, 4))
    write(tmp_path / "set-validation-00000-of-00001", pictures(50, 2))
    splits = {"a": "train[:75%]", "b": "train[75%:]+validation"}
    found = tfrecords.load(str(tmp_path), splits, {"image": "png", "label": "int64", "weight": "float32", "classes": 3})
    assert (found.spec.shape, found.spec.dtype, found.spec.classes) == ((6, 5, 3), "uint8", 3)
    x, y, weight = columns_of(found.train)
    assert x[:, 2, 2, 1].tolist() == [3 * i for i in range(9)] and (x == x[:, :1, :1, :1]).all()
    assert y.tolist() == [i % 3 for i in range(9)] and weight.tolist() == list(range(9)) and y.dtype == "int32"
    assert columns_of(found.eval)[2].tolist() == [9, 10, 11, 50, 51]


def test_files_of_training_are_not_those_of_testing(tmp_path):
    for name in ("training-0", "training-1", "testing"):
        (tmp_path / name).write_bytes(b"")
    assert {k: len(v) for k, v in tfrecords.files(str(tmp_path)).items()} == {"training": 2, "testing": 1}


def test_numbers(tmp_path):
    rows = [{"x": np.arange(6.0) + i, "y": 0.5 * i, "t": np.arange(4) + i} for i in range(5)]
    path = write(tmp_path / "n.tfrecord", rows)
    found = tfrecords.load(str(path), SPLITS, {"x": "float32[2, 3]", "y": "float32"})
    x, y = columns_of(found.train)
    np.testing.assert_array_equal(x, [np.arange(6).reshape(2, 3) + i for i in range(5)])
    assert y.tolist() == [0, 0.5, 1, 1.5, 2] and found.spec.classes is None and found.spec.shape == (2, 3)
    found = tfrecords.load(str(path), SPLITS, {"t": "int64[4]", "y": "float32"})
    assert columns_of(found.train)[0].dtype == found.spec.dtype == "int32"
    path = write(tmp_path / "large.tfrecord", [{"t": np.array([1, 2**31]), "y": 0.5}])
    with pytest.raises(tf.errors.InvalidArgumentError, match="t has a number that int32 does not hold"):
        columns_of(tfrecords.load(str(path), SPLITS, {"t": "int64[2]", "y": "float32"}).train)


@pytest.fixture
def damaged(tmp_path):
    """Three files: whole, cut in the middle, and with a length that is wrong."""
    for name in "abc":
        write(tmp_path / name, pictures(0, 4))
    whole = (tmp_path / "a").read_bytes()
    (tmp_path / "b").write_bytes(whole[: len(whole) // 2])
    third = tfrecords.index([str(tmp_path / "c")]).offsets[2] - 12
    (tmp_path / "c").write_bytes(whole[:third] + bytes([whole[third] ^ 1]) + whole[third + 1 :])
    return tmp_path, third


def test_damaged_files_are_named(damaged, said):
    folder, at = damaged
    message = f"{folder}/b is cut off behind 2 records; {folder}/c is damaged at byte {at}, behind 2 good records"
    with refused() as error:
        tfrecords.load(str(folder), SPLITS, PICTURE)
    assert str(error.value) == f"{message}: write them again, or leave out what is lost with data.on_error=skip"
    found = tfrecords.load(str(folder), SPLITS, PICTURE, skip=True)
    assert said == [f"WARNING: {message}: left out"]
    assert columns_of(found.train)[0][:, 0, 0, 0].tolist() == [0, 3, 6, 9, 0, 3, 0, 3]


@pytest.fixture
def flipped(tmp_path):
    """Flips one bit of the labels of some records, so that these become other classes."""

    def flip(*numbers):
        path = write(tmp_path / "f.tfrecord", pictures(0, 9))
        whole = bytearray(path.read_bytes())
        found = tfrecords.index([str(path)])
        for number in numbers:
            assert number % 3 != 2  # which would become no class at all
            at, length = int(found.offsets[number]), int(found.lengths[number])
            whole[at + whole[at : at + length].index(b"\x1a\x03\n\x01") + 4] ^= 1
        path.write_bytes(whole)
        with pytest.raises(tf.errors.DataLossError):
            list(tf.data.TFRecordDataset(str(path)))
        return path

    return flip


@pytest.mark.covering(0)
@pytest.mark.parametrize("number", [0, 4])
@pytest.mark.parametrize("cache", ["auto", "stream"])
def test_a_record_with_a_flipped_bit_is_named(cache, number, flipped):
    path = flipped(number)
    with refused(rf"^record {number} of {path} .*: its bytes do not match their checksum \(CRC-32C\): "):
        loaded = registry.load(experiment(path, cache=cache))
        model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        tfdist.fit(model, loaded.train, batch_size=3, verbose=0)


@pytest.mark.parametrize(
    "numbers, message",
    first(
        1, [([3, 7], "record 3 of {} and 1 more of its records do not match"), ([0], "record 0 of {} does not match")]
    ),
)
def test_records_with_a_flipped_bit_are_left_out_on_demand(numbers, message, flipped, said):
    path = flipped(*numbers)
    found = tfrecords.load(str(path), SPLITS, PICTURE, skip=True)
    assert said == [f"WARNING: {message.format(path)} the checksum (CRC-32C): left out"]
    kept = [i for i in range(9) if i not in numbers]
    x, y = columns_of(found.train)
    assert x[:, 0, 0, 0].tolist() == [3 * i for i in kept] and y.tolist() == [i % 3 for i in kept]
    assert [found.train.name(i) for i in range(len(kept))] == [f"record {i} of {path}" for i in kept]


@pytest.mark.parametrize("options, message", [
    ({}, "names the features x, y and perhaps weight, in this order, with their types: write it like image=jpeg"),
    ({"image": "png"}, "names the features x, y"),
    ({"image": "pgn", "label": "int64"}, "unknown type 'pgn' of image: did you mean 'png'"),
    ({"image": "string", "label": "int64"}, "unknown type 'string' of image: known are jpeg, png, int64, float32"),
    ({"image": 3, "label": "int64"}, "image=3 is not a type: write one of jpeg, png, int64, float32, or"),
    ({"image": "png[3]", "label": "int64"}, r"image='png\[3\]': an image has its shape from data.image_size"),
    ({"image": "png", "label": "int64"}, "the second feature, label, is the target: int64 together with classes=N"),
    ({"image": "png", "label": "float32", "classes": 3}, "the second feature, label, is the target"),
    ({"image": "png", "label": "int64", "weight": "int64", "classes": 3},
     "the third feature, weight, is the weight: float32"),
    ({**PICTURE, "classes": 0}, "classes must be an integer of at least 1, got 0"),
    ({"img": "png", "label": "int64", "classes": 3},
     r"no feature 'img' in record 0 of .*: it has image \(bytes\), label \(int64\), weight \(float\)"),
    ({"image": "png", "weight": "int64", "classes": 3},
     r"weight=int64 does not fit record 0 of .*, which has image \(bytes\)"),
    ({"weight": "float32[2]", "label": "int64", "classes": 3},
     r"weight has 1 values in record 0 .*: give its shape, such as weight='float32\[1\]'"),
    ({"image": "jpeg", "label": "int64", "classes": 3, "channels": 7}, "image of record 0 of .* cannot be decoded"),
])  # fmt: skip
def test_what_does_not_fit(options, message, tmp_path):
    path = write(tmp_path / "a.tfrecord", pictures(0, 3))
    with refused(message):
        tfrecords.load(str(path), SPLITS, options)


def test_files_that_cannot_be_read(tmp_path):
    load = lambda name: tfrecords.load(str(tmp_path / name), SPLITS, PICTURE)
    write(tmp_path / "z.gz", pictures(0, 3), tf.io.TFRecordOptions("GZIP"))
    with refused(r"z.gz is not a TFRecord file, or is compressed, and cannot be read by number: give files of tf.io"):
        load("z.gz")
    write(tmp_path / "z.zlib", pictures(0, 3), tf.io.TFRecordOptions("ZLIB"))
    with refused(r"z.zlib is not a TFRecord file, or is compressed"):
        load("z.zlib")
    (tmp_path / "empty").write_bytes(b"")
    with refused("empty is empty: write them again"):
        load("empty")
    with refused("has no files: give a file, a folder, or a pattern such as"):
        load("none*")
    write(tmp_path / "text", [b"no example"])
    with refused(r"record 0 of .*text is not a tf.train.Example"):
        load("text")
    (tmp_path / "d").mkdir()
    write(tmp_path / "d" / "train.tfrecord", pictures(0, 3))
    write(tmp_path / "d" / "more.tfrecord", pictures(0, 3))
    with refused(r"more.tfrecord does not say of which split it is, and others do"):
        load("d")


def experiment(path, **data):
    e = config.Experiment()
    data = {"options": "image=png, label=int64, classes=3", **data}
    e.data = config.Data(name=f"tfrecord:{path}", eval_split="train", **data)
    return validation.validate(e)


@pytest.mark.covering(0)
@pytest.mark.parametrize("cache, kind", [("auto", Arrays), ("stream", Records)])
def test_an_experiment_on_records(cache, kind, tmp_path):
    path = write(tmp_path / "a.tfrecord", [*pictures(0, 4), *pictures(4, 4, height=9)])
    loaded = registry.load(experiment(path, cache=cache, image_size="4x3"))
    assert isinstance(loaded.train, kind) and loaded.spec == spec_lib.Spec((4, 3, 3), "uint8", 3, 255.0)
    assert columns_of(loaded.train)[0][:, 0, 0, 0].tolist() == [3 * i for i in range(8)]
    if cache == "stream":
        crop = registry.load(experiment(path, cache=cache, image_size="4x3", augment="resized_crop(0.3)"))
        assert columns_of(crop.train)[0][:, 0, 0, 0].tolist() == [3 * i for i in range(8)]
    else:
        with refused(r"record 4 of .*a.tfrecord cannot be decoded.*: remove it"):
            registry.load(experiment(path, cache=cache))
        write(path, [{"image": next(pictures(0, 1))["image"], "label": 3}])
        with refused(r"record 0 of .* cannot be decoded: label is not in 0 to 2 \(classes=3\)"):
            registry.load(experiment(path, cache=cache))


@pytest.mark.parametrize("weight", first(0, [-1.0, np.nan, np.inf]))
def test_a_weight_that_is_none(weight, tmp_path):
    path = write(tmp_path / "a.tfrecord", [{**example, "weight": weight} for example in pictures(0, 1)])
    given = experiment(path, cache="auto", options="image=png, label=int64, weight=float32, classes=3")
    with refused(r"record 0 of .* cannot be decoded: weight is negative, NaN or"):
        registry.load(given)


def claims(width, height):
    """A small PNG, and a small JPEG, whose headers claim another size."""
    pixels = np.full((6, 5, 3), 7, np.uint8)
    png = bytearray(tf.io.encode_png(pixels).numpy())
    png[16:24] = struct.pack(">II", width, height)
    png[29:33] = struct.pack(">I", zlib.crc32(bytes(png[12:29])))
    jpeg = tf.io.encode_jpeg(pixels).numpy()
    frame = jpeg.index(b"\xff\xc0") + 5
    return bytes(png), jpeg[:frame] + struct.pack(">HH", height, width) + jpeg[frame + 4 :]


@pytest.mark.whole
@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_an_image_that_claims_to_be_huge_is_refused_before_it_takes_the_memory(kind, place, tmp_path):
    huge = claims(60_000, 60_000)[kind == "jpeg"]
    small = claims(5, 6)[kind == "jpeg"]
    examples = [{"image": huge if i == place else small, "label": 0} for i in range(3)]
    path = write(tmp_path / "a.tfrecord", examples)
    e = experiment(path)
    e.data.options = f"image={kind}, label=int64, classes=3"
    name = rf"record {place} of .*a.tfrecord cannot be decoded: it has more pixels than max_pixels=178956970, which "
    with refused(name if place else f"image of {name}"):
        registry.load(e)
    e.data.options += ", max_pixels=29"
    with refused(r"it has more pixels than max_pixels=29, which data.options can change"):
        registry.load(e)
    write(path, examples[1:2])
    with refused(r"more pixels than max_pixels=29"):
        registry.load(e)
    e.data.options = e.data.options.replace("=29", "=30")
    assert registry.load(e).train.size == 1
