"""Tar files by WebDataset's convention, against what Python's own `tarfile` was given to write."""

import io
import json
import tarfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import training_cases
from support.refusals import refused
from support.source_columns import check_order, columns_of

import tfdist
from tfdist import config
from tfdist.config import field_syntax
from tfdist.config.buckets import Bucket
from tfdist.data.datasets import webdataset
from tfdist.data.sources import Arrays, Records
from tfdist.doctor import dataset
from tfdist.errors import Interrupted

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 6, 5, 3), dtype=np.uint8)
LABELS = np.arange(20) % 3
WEBP = b"RIFF\x1e\0\0\0WEBPVP8X\n" + bytes(7) + 2 * (13_999).to_bytes(3, "little")
"""A WebP that claims 14,000 x 14,000 pixels."""
VALUES = np.random.default_rng(1).normal(size=(20, 2, 2))
ALL = dict(train_split="train", eval_split="train")


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def write(path, files, **options):
    """Writes files of (name, content) as a tar file."""
    with tarfile.open(path, options.pop("mode", "w"), **options) as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def sample(i, key="{:06}"):
    """The files of an example; what is no part of it is there as well."""
    key = key.format(i)
    yield f"{key}.png", tf.io.encode_png(PIXELS[i]).numpy()
    yield f"{key}.cls", b"%d\n" % LABELS[i]
    yield f"{key}.seg.npy", npy(VALUES[i])
    yield f"{key}.json", json.dumps({"label": int(LABELS[i]), "price": i / 4}).encode()
    yield f"{key}.txt", b"%g" % (i / 2)


def samples(rows, **options):
    return [file for i in rows for file in sample(i, **options)]


@pytest.fixture
def tars(tmp_path):
    """Three files of training and one for testing; names of 130 letters need two headers."""
    for number, rows in enumerate((range(6), range(6, 8), range(8, 16))):
        key = f"deep.folder/{'k' * 130}{{:06}}" if number == 1 else "{:06}"
        write(
            tmp_path / f"train-{number:03}.tar", [("README", b"none"), *samples(rows, key=key), (".hidden.cls", b"x")]
        )
    write(tmp_path / "test-000.tar", samples(range(16, 20)))
    return tmp_path


def test_images_and_labels(tars):
    data = tfdist.load_data(f"webdataset:{tars}", cache="stream")
    assert (data.spec.shape, data.spec.dtype, data.spec.classes) == ((6, 5, 3), "uint8", 3)
    for source, rows in ((data.train, slice(16)), (data.eval, slice(16, 20))):
        assert isinstance(source, Records)
        x, y = columns_of(source)
        np.testing.assert_array_equal(x, PIXELS[rows])
        np.testing.assert_array_equal(y, LABELS[rows])
    assert data.train.name(6).endswith(f"k000006.png in {tars}/train-001.tar")
    held = tfdist.load_data(
        f"webdataset:{tars}/train-{{000,002}}.tar", image_size="3x2", train_split="train[2:8]", eval_split="train[:2]"
    )
    assert isinstance(held.train, Arrays) and held.spec.shape == (3, 2, 3)
    np.testing.assert_array_equal(held.train.columns[1], LABELS[[2, 3, 4, 5, 8, 9]])
    both = tfdist.load_data(f"webdataset:{tars}", train_split="test[1:]+train[5:9]").train
    np.testing.assert_array_equal(both.columns[0], PIXELS[[17, 18, 19, 5, 6, 7, 8]])


@pytest.mark.parametrize(
    "options, x, y, classes",
    [
        ("x='seg.npy', weight=txt", VALUES, LABELS, 3),
        ("x='.SEG.npy', y=json, field=label, classes=5", VALUES, LABELS, 5),
        ("y=json, field=price, channels=1", None, np.arange(20) / 4, None),
        ("y=txt", PIXELS, np.arange(20) / 2, None),
        ("y='seg.npy'", PIXELS, VALUES, None),
    ],
)
def test_what_other_files_hold(options, x, y, classes, tars):
    data = tfdist.load_data(f"webdataset:{tars}/tr*", cache="stream", options=options, **ALL)
    assert data.spec.classes == classes
    found = columns_of(data.train)
    np.testing.assert_array_equal(found[1], y[:16].astype(found[1].dtype))
    assert x is None or np.array_equal(found[0], x[:16].astype(data.spec.dtype))
    assert data.spec.shape == (found[0].shape[1:] if x is None else x.shape[1:])
    if "weight" in options:
        np.testing.assert_array_equal(found[2], np.arange(16) / 2)


def test_the_order_of_an_epoch_goes_on_at_any_update(tars):
    data = tfdist.load_data(f"webdataset:{tars}", cache="stream")
    check_order(data.train, PIXELS[:16], LABELS[:16])


@pytest.mark.whole
def test_training_goes_on_after_a_stop_to_the_same_bits(tars, connect):
    def train(**options):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        data = tfdist.load_data(f"webdataset:{tars}", cache="stream")
        options |= dict(batch_size=6, epochs=2, seed=2, steps_per_call=1, verbose=0, check_agreement="off")
        tfdist.fit(model, data.train, distribution=connect(1), **options)
        return [w.tolist() for w in model.get_weights()]

    kept = lambda: tfdist.Checkpoints(tars / "kept", every="1 step")
    with pytest.raises(Interrupted):
        train(checkpoints=kept(), should_stop=training_cases.StopAt(4))
    assert train(checkpoints=kept()) == train()


def test_braces():
    expanded = lambda text: field_syntax.expanded("data.name", text)
    assert expanded("a-{008..010}.tar") == ["a-008.tar", "a-009.tar", "a-010.tar"]
    assert expanded("{b,a}/{9..10}") == ["b/9", "b/10", "a/9", "a/10"]
    assert expanded("plain*.tar") == ["plain*.tar"]
    for wrong in ("{3..1}", "{a}", "a}", "{a,{b,c}}", "{0..999999999999}"):
        with refused(r"data.name: the braces in .* are not understood: write {000..009} or"):
            expanded(wrong)
    with refused("stands for 100,000,000 files, more than 1,000,000: write"):
        expanded("{0..9999}{0..9999}")


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_what_is_where_is_what_tarfile_finds(kind, tmp_path):
    names = ["a.x", "d/e.f/b.y", "d" * 90 + "/" + "k" * 90 + ".x", "\u00e4\u4e2d.x", *(f"{i}.x" for i in range(30))]
    names += ["k" * 300 + ".x"] * (kind != tarfile.USTAR_FORMAT)
    options = {"pax_headers": {"comment": "none"}} if kind == tarfile.PAX_FORMAT else {}
    with tarfile.open(tmp_path / "t.tar", "w", format=kind, **options) as tar:
        for number, name in enumerate(names):
            folder = tarfile.TarInfo(f"folder{number}")
            folder.type = tarfile.DIRTYPE
            tar.addfile(folder)
            info = tarfile.TarInfo(name)
            info.size, info.mtime = 400 * number, 1e9 + number / 3
            tar.addfile(info, io.BytesIO(bytes(info.size)))
    with tarfile.open(tmp_path / "t.tar") as tar:
        expected = [(m.name, m.offset_data, m.size) for m in tar if m.isreg()]
    found, problem = webdataset.listing(tmp_path / "t.tar")
    assert [tuple(m) for sample in found.values() for m in sample.values()] == expected and not problem
    assert len(expected) == len(names)


def test_a_header_for_all_that_follow(tmp_path):
    with tarfile.open(tmp_path / "t.tar", "w", format=tarfile.PAX_FORMAT, pax_headers={"path": "b.y"}) as tar:
        tar.addfile(tarfile.TarInfo("a.x"))
    with tarfile.open(tmp_path / "t.tar") as tar:
        assert tar.getnames() == ["b.y"]
    assert list(webdataset.listing(tmp_path / "t.tar").samples) == ["b"]


A = [("a.png", tf.io.encode_png(PIXELS[0]).numpy()), ("a.cls", b"1")]
B = [("b.png", A[0][1]), ("b.cls", b"0")]


@pytest.mark.parametrize("files, options, message", [
    ([*A, B[0]], "", r"b in .*/t.tar has no .cls \(it has .png\): write them again, or leave out what is lost with"),
    ([*A, B[1]], "", r"b in .*/t.tar has no .png \(it has .cls\)"),
    ([*A, ("b.cls", b"cat")], "", r"b in .* has no .png"),
    ([*A, B[0], ("b.cls", b"cat")], "", "b.cls in .* holds no number: invalid literal for int"),
    ([*A, A[1]], "", "t.tar has a.cls twice: give each example a key of its own"),
    ([*A, *B, ("a.CLS", b"1")], "", "t.tar has a.CLS twice"),
    ([("none", b"")], "", "t.tar has no samples: give others"),
    ([A[0]], "", "a in .*t.tar does not tell which file is y: say data.options=y=NAME, of .png"),
    ([*A, ("a.b.jpg", b"")], "", "does not tell which file is x: say data.options=x=NAME, of .png, .cls, .b.jpg"),
    (A, "x=jpg", "data.options: there is no .jpg in a in .*: it has .png, .cls"),
    (A, "x=cls", ".cls is no input: only jpg, .* and npy can be trained on"),
    (A, "y=png", ".png is no target: only cls, txt, json, npy hold numbers"),
    (A, "field=label", "field=label is for .json files, and the target is .cls"),
    (A, "colour=1", "unknown 'colour' in data.options"),
    (A, "x=1", "data.options: x must be a name, got 1"),
    (A, "channels=0", "channels must be a whole number"),
    (A, "classes=1", "label 1 of example 0 is out of range"),
    (A, "max_pixels=29", "a.png in .* cannot be decoded: it has more pixels than max_pixels=29"),
    ([("a.png", WEBP), A[1]], "", "a.png in .* cannot be decoded: it has more pixels than max_pixels=178956970"),
    ([*A, ("a.json", b'{"l": 1}')], "y=json", "a.json in .* holds no number: an object: say data.options=field=NAME"),
    ([*A, ("a.json", b'{"l": 1}')], "y=json, field=k", "a.json in .* holds no number: no 'k' in it"),
    ([*A, ("a.json", b'{"l": "x"}')], "y=json, field=l", "a.json in .* holds no number: no number: 'x'"),
    ([*A, ("a.json", b"[" * 100_000)], "y=json",
     r"a.json in .* holds no number: its brackets are nested too deeply: write them again, or leave out"),
    ([*A, ("a.json", b"[" * 900 + b"]" * 900)], "y=json", "a.json in .* holds no number: "),
    ([A[0], ("a.cls", b"1_0")], "", "a.cls in .* holds no number: '1_0'"),
    ([*A, ("a.txt", b"1_0.5")], "y=txt", r"a.txt in .* holds no number: '1_0\.5'"),
    ([*A, ("a.txt", b"-1")], "weight=txt", "webdataset:.*t.tar has the weight -1: give finite"),
    ([*A, ("a.npy", npy(np.array("x")))], "x=npy", "a.npy in .* cannot be decoded: values of type <U1"),
    ([*A, ("a.npy", npy(np.array(None)))], "x=npy", "a.npy in .* cannot be decoded: no array of NumPy: Object ar"),
    ([*A, ("a.npy", npy(np.ones(2)))], "x=npy, channels=1", "channels is for images, and the input is .npy"),
    ([*A, ("a.npy", npy(np.ones(2))), *B, ("b.npy", npy(np.ones(3)))], "y=npy",
     r"t.tar: .npy has shape \[2\] at first and \[3\] later: make them alike"),
    ([*A, ("a.npy", npy(np.ones(2))), *B, ("b.npy", npy(np.ones(3)))], "x=npy",
     r"b.npy in .* cannot be decoded: .*it is float64 \[3\], and the first is float64 \[2\]: remove it"),
])  # fmt: skip
def test_what_does_not_fit(files, options, message, tmp_path):
    path = write(tmp_path / "t.tar", files)
    with refused(message):
        tfdist.load_data(f"webdataset:{path}", options=options, **ALL)


def test_files_that_cannot_be_read(tmp_path, tars):
    def no(name, message):
        with refused(message):
            tfdist.load_data(f"webdataset:{tmp_path / name}", **ALL)

    no("none-*", "none-.* has no files: give a tar file, a folder, or a pattern such as train-{000..009}.tar")
    no("train-{000..004}.tar", "there is no file .*train-003.tar: correct the numbers in braces, or bring it here")
    for kind in ("gz", "bz2", "xz"):
        write(tmp_path / f"t.tar.{kind}", A, mode=f"w:{kind}")
        no(f"t.tar.{kind}", f"t.tar.{kind} is compressed, and what is compressed cannot be read by number: unpack")
    (tmp_path / "text.tar").write_bytes(b"no tar" * 500)
    no("text.tar", "text.tar is no tar file: give files of webdataset.TarWriter, or of tar")
    link = tarfile.TarInfo("b.png")
    link.type, link.linkname = tarfile.LNKTYPE, "a.png"
    with tarfile.open(write(tmp_path / "link.tar", A), "a") as tar:
        tar.addfile(link)
    no("link.tar", "link.tar: b.png is a link or no plain file: write it as a file")


def damaged(whole, way):
    second = next(m.offset for m in webdataset.listing(whole).samples["b"].values()) - 512
    content = bytearray(whole.read_bytes())
    if way == "a header":
        content[second + 150] ^= 1  # in its checksum
    elif way == "in a file":
        content = content[: second + 520]
    elif way == "between files":
        content = content[:second]
    elif way == "two in one":
        content = content + content
    whole.write_bytes(content)


@pytest.mark.parametrize("way", ["a header", "in a file", "between files", "two in one"])
def test_a_damaged_file_is_not_taken_for_a_short_one(way, tmp_path, said):
    """`tarfile` itself, and so WebDataset, ends at a header that is damaged and says nothing."""
    path = write(tmp_path / "t.tar", [*A, *B])
    damaged(path, way)
    message = f"{path} is cut off or damaged at byte [0-9,]+, behind {4 if way == 'two in one' else 2} good files"
    with refused(f"{message}: write them again"):
        tfdist.load_data(f"webdataset:{path}", **ALL)
    data = tfdist.load_data(f"webdataset:{path}", on_error="skip", **ALL)
    assert data.examples == (2 if way == "two in one" else 1)
    assert len(said) == 1 and said[0].startswith("WARNING: ") and said[0].endswith("good files: left out")


def test_shards_in_a_bucket(tars, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"memory://bucket/{tmp_path.name}"
    for path in tars.glob("*.tar"):
        Bucket(url).put(path, path.name)
    data = tfdist.load_data(f"webdataset:{url}/train-{{000..001}}.tar", **ALL)
    np.testing.assert_array_equal(data.train.columns[0], PIXELS[:8])
    assert sorted(p.name for p in (tmp_path / "cache").rglob("*.tar")) == ["train-000.tar", "train-001.tar"]
    with refused(r"there is no file .*train-003\.tar"):
        tfdist.load_data(f"webdataset:{url}/train-{{000..003}}.tar", **ALL)


def test_the_doctor(tars):
    look = lambda name: dataset.check(config.Data(name=f"webdataset:{tars}/{name}"), {})[0]
    assert look("train-{000..002}.tar").status == look("*.tar").status == look("").status == "ok"
    assert "train-003.tar" in look("train-{000..003}.tar").finding and "not understood" in look("{1..0}.tar").finding
