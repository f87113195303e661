"""Data files that are not what they seem: of each kind that is read, they are read, or refused in one line."""

import io
import json
import pathlib
import struct
import sys
import tempfile
import zlib

import google_crc32c
import hypothesis
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from hypothesis import event, given
from hypothesis import strategies as st
from pyarrow import parquet
from support import adversary

from tfdist import config
from tfdist.config import validation
from tfdist.data import records
from tfdist.data.batch_layout import Layout
from tfdist.data.datasets import registry
from tfdist.data.sources import Records
from tfdist.errors import UserError, shown

PIXELS = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
CELLS = (
    *("1", "2.5", "", "cat", "dog", " 3 ", "-0", "1e400", "inf", "nan", "NA", "0x1", "1,5", "\u0663", "9" * 400, "1_0",
      '"a"b', "9007199254740993", "1e-400"),
    *('"', '"a\nb"', '""""', "'", "\0", "\ufeff1", "x" * 5000, "2020-01-01", "True", "\x1b[2J", "\u202e", ";", "\t"),
)  # fmt: skip


def alterations(whole):
    """Bytes that were right."""
    sizes = st.integers(0, max(len(whole) - 1, 0))
    return st.one_of(
        st.just(whole),
        sizes.map(lambda at: whole[:at]),
        st.tuples(sizes, st.binary(min_size=1, max_size=8)).map(
            lambda t: whole[: t[0]] + t[1] + whole[t[0] + len(t[1]) :]
        ),
        st.tuples(sizes, st.binary(max_size=8)).map(lambda t: whole[: t[0]] + t[1] + whole[t[0] :]),
    )


def read(folder, **data):
    """Loads what an experiment names and reads it to its end, as a run would."""
    experiment = config.Experiment(data=config.Data(**{"eval_split": "train", **data}))
    try:
        loaded = registry.load(validation.validate(experiment))
        for source in (loaded.train, loaded.eval):
            if isinstance(source, Records):
                feed = records.RecordFeed(source, Layout(4, 1, 1))
                try:
                    for _ in source.in_order(4):
                        pass
                except records.UNREADABLE:
                    line = first_broken(feed)
                    assert line, "an error in the pipeline that nobody can name"
                    adversary.is_one_line(shown(line))
    except UserError as error:
        adversary.is_one_line(shown(error))
        event("refused")
    else:
        event("works")


def first_broken(feed):
    """Asks after each call of an epoch what is broken, as a run does; calls of whole batches end before the tail."""
    update = 0
    while update < feed.batches:
        update = feed.next(update, feed.batches).last
        if line := feed.first_unreadable():
            return line
    return ""


# -- tables -------------------------------------------------------------------------


@st.composite
def tables(draw):
    columns = draw(st.integers(1, 4))
    cells = st.one_of(st.sampled_from(("1", "2", "3.5", "cat")), st.sampled_from(CELLS), st.text(max_size=5))
    separator = draw(st.sampled_from([",", ",", ";", "\t", "|"]))
    row = lambda: separator.join(
        draw(st.lists(cells, min_size=1, max_size=columns + 1) if draw(st.integers(0, 9)) == 0 else
             st.lists(cells, min_size=columns, max_size=columns))
    )  # fmt: skip
    header = separator.join(
        draw(
            st.lists(st.sampled_from(["a", "b", "y", "", "a", "\u00e9", "x" * 300]), min_size=columns, max_size=columns)
        )
    )
    text = draw(st.sampled_from(["\n", "\n", "\r\n", "\r"])).join(
        [header, *(row() for _ in range(draw(st.integers(0, 12))))]
    )
    encoding = draw(st.sampled_from(["utf-8", "utf-8", "utf-8-sig", "latin-1", "utf-16"]))
    return draw(alterations(text.encode(encoding, errors="replace")))


@pytest.mark.whole
@adversary.examples(1500)
@given(
    content=tables(),
    options=st.one_of(
        st.sampled_from(["target=y", "", "target=a", "target=y, task=regression"]), adversary.mutated("target=y")
    ),
    on_error=st.sampled_from(config.CHOICES["data.on_error"]),
)
def test_any_table(content, options, on_error):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "t.csv")
        path.write_bytes(content)
        read(folder, name=f"csv:{path}", options=options, on_error=on_error, train_split="train", eval_split="test")


# -- images -------------------------------------------------------------------------


def claiming(width, height):
    """A small PNG, JPEG, BMP, WebP and two GIFs whose headers claim that size, the second GIF by its last frame."""
    png = bytearray(tf.io.encode_png(PIXELS).numpy())
    png[16:24] = struct.pack(">II", width, height)
    png[29:33] = struct.pack(">I", zlib.crc32(bytes(png[12:29])))
    jpeg = tf.io.encode_jpeg(PIXELS).numpy()
    sides = jpeg.index(b"\xff\xc0") + 5
    low = (min(width, 65535), min(height, 65535))
    jpeg = jpeg[:sides] + struct.pack(">HH", low[1], low[0]) + jpeg[sides + 4 :]
    frame = lambda width, height: b"," + struct.pack("<HHHH", 0, 0, width, height) + b"\x00\x02\x02L\x01\x00"
    gif = b"GIF89a" + struct.pack("<HH", *low) + b"\x00\x00\x00" + frame(*low) + b";"
    frames = b"GIF89a\x01\x00\x01\x00\x00\x00\x00" + frame(1, 1) + frame(*low) * 3 + b";"
    webp = b"RIFF\x16\x00\x00\x00WEBPVP8X\n" + bytes(7) + b"".join(max(n - 1, 0).to_bytes(3, "little") for n in low)
    bmp = (
        b"BM"
        + struct.pack("<IHHIIiiHHIIiiII", 62, 0, 0, 54, 40, width % 2**31, height % 2**31, 1, 24, 0, 8, 0, 0, 0, 0)
        + b"\0" * 8
    )
    return bytes(png), jpeg, gif, frames, bmp, webp


SIDES = st.sampled_from([0, 1, 8, 60_000, 65_535, 2**31 - 1, 2**31, 2**32 - 1])
IMAGES = st.one_of(
    st.tuples(SIDES, SIDES).flatmap(lambda size: st.sampled_from(claiming(*size))),
    st.sampled_from(claiming(8, 8)[:2]).flatmap(alterations),
    st.binary(max_size=60),
    st.sampled_from(
        [b"RIFF\xff\xff\xff\xffWEBPVP8X" + b"\xff" * 20, b"\xff\xd8\xff" + b"\xff" * 50, b"<svg/>", b"GIF89a"]
    ),
)
FITTING = claiming(8, 8)[:2]


def a_folder_of_images(images, on_error, size):
    with tempfile.TemporaryDirectory() as folder:
        for i, image in enumerate([*images, *FITTING]):
            path = pathlib.Path(folder, "data", "ab"[i % 2], f"{i}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image)
        read(folder, name=f"image_folder:{folder}/data", on_error=on_error, image_size=size)


test_an_image, test_any_images = adversary.few_and_many(
    1, 150, a_folder_of_images, images=st.lists(IMAGES, min_size=1, max_size=3),
    on_error=st.sampled_from(config.CHOICES["data.on_error"]), size=st.sampled_from(["", "4", "4x6"]),
)  # fmt: skip

# -- TFRecord files ---------------------------------------------------------------------


def framed(record):
    """A record as it stands in a file, with the checks that belong to it, so that decoders get to see it."""
    length = struct.pack("<Q", len(record))
    return length + masked(length) + record + masked(record)


def masked(content):
    crc = google_crc32c.value(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def example(image, label):
    features = {
        "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=image)),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=label)),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


EXAMPLES = st.builds(
    example,
    st.one_of(IMAGES.map(lambda image: [image]), st.lists(IMAGES, max_size=2)),
    st.one_of(st.just([1]), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=2)),
)
RECORDS = st.one_of(
    EXAMPLES, EXAMPLES, st.just(example([FITTING[0]], [2])), EXAMPLES.flatmap(alterations), st.binary(max_size=30)
)
RECORD_OPTIONS = st.one_of(
    st.sampled_from(["image=png, label=int64, classes=3", "image=jpeg, label=int64, classes=3"]),
    st.sampled_from(["label='float32[99999999999]', image=int64, classes=2", "label=int64, image=float32"]),
    adversary.mutated("image=png, label=int64, classes=3"),
)


@st.composite
def record_files(draw):
    content = b"".join(map(framed, draw(st.lists(RECORDS, max_size=5))))
    huge = struct.pack("<Q", draw(st.sampled_from([2**63, 2**64 - 1, 10**12])))
    tail = draw(st.sampled_from([b"", b"", b"", huge + b"\0" * 8]))
    return draw(alterations(content + tail)) if draw(st.booleans()) else content + tail


BYTES_IN_THE_MESSAGE = framed(example([FITTING[0]], [2])) + framed(b"\x80")
"""TensorFlow cannot read the second record, and its message repeats it: Python cannot decode that."""
KNOWN_BAD = dict(content=BYTES_IN_THE_MESSAGE, options="image=png, label=int64, classes=3", on_error="refuse")


@hypothesis.example(**KNOWN_BAD, image_size="", cache="auto")
@hypothesis.example(**KNOWN_BAD, image_size="", cache="stream")
def a_record_file(content, options, **data):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "a.tfrecord")
        path.write_bytes(content)
        read(folder, name=f"tfrecord:{path}", options=options, **data)


test_some_record_files, test_any_record_file = adversary.few_and_many(
    1, 500, a_record_file, content=record_files(), options=RECORD_OPTIONS,
    on_error=st.sampled_from(config.CHOICES["data.on_error"]), image_size=st.sampled_from(["", "4"]),
    cache=st.sampled_from(["auto", "stream"]),
)  # fmt: skip

# -- text ---------------------------------------------------------------------------

TEXTS = st.one_of(
    st.binary(max_size=400),
    st.text(max_size=400).map(lambda text: text.encode(errors="surrogatepass")),
    st.sampled_from([b"", b"a", b"\0" * 300, b"\xff\xfe" + "word ".encode("utf-16-le") * 80, b"ab" * 400]),
    alterations(b"All work and no play. " * 30),
)


def a_text(content, options):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "a.txt")
        path.write_bytes(content)
        read(folder, name=f"text:{path}", options=options, train_split="train[:80%]", eval_split="train[80%:]")


test_some_texts, test_any_text = adversary.few_and_many(
    10, 700, a_text, content=TEXTS,
    options=st.one_of(st.sampled_from(["", "length=16", "length=1", "length=100000"]), adversary.mutated("length=16")),
)  # fmt: skip

# -- arrays and Parquet ---------------------------------------------------------------


def stored():
    """Files of NumPy and of Arrow that are right, by the ending of their names."""
    x, y = PIXELS.reshape(-1, 4), np.arange(48) % 3
    files = {}
    for ending, write in (
        ("npz", lambda file: np.savez(file, x=x, y=y)),
        ("npy", lambda file: np.save(file, x)),
        (
            "parquet",
            lambda file: parquet.write_table(pa.table({"x": x[:, 0], "t": ["ab"[i % 2] for i in y], "y": y}), file),
        ),
    ):
        with io.BytesIO() as file:
            write(file)
            files[ending] = file.getvalue()
    return files


STORED = stored()


def an_array_file(ending_and_content, cache, options):
    ending, content = ending_and_content
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, f"x.{ending}")
        path.write_bytes(content)
        if ending == "parquet":
            return read(folder, name=f"parquet:{path}", options="target=y", train_split="train")
        if ending == "npy":
            np.save(path.with_name("y.npy"), np.arange(48) % 3)
        read(folder, name=f"numpy:{path if ending == 'npz' else folder}", options=options, cache=cache)


test_some_array_files, test_any_array_file = adversary.few_and_many(
    15,
    1500,
    an_array_file,
    ending_and_content=st.sampled_from(sorted(STORED)).flatmap(
        lambda ending: st.tuples(st.just(ending), st.one_of(alterations(STORED[ending]), st.binary(max_size=60)))
    ),
    cache=st.sampled_from(config.CHOICES["data.cache"]),
    options=st.one_of(st.just(""), adversary.mutated("shape=(2, 2), classes=3")),
)

# -- prepared data sets of TFDS ---------------------------------------------------------

CLASSES = st.one_of(
    st.sampled_from(
        ["this.Feature", "antigravity.x", "os.path", "this", ".this.a", "tensorflow_datasets.this.a", "a" * 300 + ".b"]
    ),
    st.just("tensorflow_datasets.core.features.text_feature.Text"),
    adversary.mutated("tensorflow_datasets.core.features.features_dict.FeaturesDict"),
)


def features_within(inner):
    """Features of features, in all the ways in which TFDS has written them."""
    named = st.dictionaries(st.sampled_from("xy"), inner, max_size=2)
    own = "tensorflow_datasets.core.features."
    return st.one_of(
        named.map(lambda f: {"pythonClassName": f"{own}features_dict.FeaturesDict", "featuresDict": {"features": f}}),
        inner.map(
            lambda f: {"pythonClassName": f"{own}sequence_feature.Sequence", "jsonFeature": {"json": json.dumps(f)}}
        ),
        named.map(lambda f: {"type": f"{own}features_dict.FeaturesDict", "content": f}),
    )


FEATURES = st.recursive(
    st.one_of(
        CLASSES.map(lambda name: {"pythonClassName": name, "text": {}}),
        st.tuples(CLASSES, adversary.values()).map(lambda t: {"type": t[0], "content": t[1]}),
        adversary.values(),
    ),
    features_within,
    max_leaves=4,
)


@hypothesis.example(features={"pythonClassName": "this.Feature", "text": {}})
def a_prepared_data_set(features):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "strange/1.0.0")
        path.mkdir(parents=True)
        (path / "dataset_info.json").write_text('{"name": "strange", "version": "1.0.0", "fileFormat": "tfrecord"}')
        (path / "features.json").write_text(json.dumps(features))
        read(folder, name="strange", data_dir=folder)
    assert not {"this", "antigravity"} & sys.modules.keys(), "a module that a file names was imported"


test_some_prepared_data_sets, test_any_prepared_data_set = adversary.few_and_many(
    10, 500, a_prepared_data_set, features=st.deferred(lambda: FEATURES)
)
