"""Parquet tables: the same as the CSV of the same table, and what their types decide."""

import csv
import datetime

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from support.refusals import refused

import tfdist
from tfdist.data.datasets import tables

RNG = np.random.default_rng(0)
SIZE = [None if i % 7 == 3 else float(v) for i, v in enumerate(RNG.normal(50, 10, 60))]
COLOUR = [("red", "blü", None)[i] for i in RNG.integers(0, 3, 60)]
DOORS = RNG.integers(0, 9, 60).tolist()
PRICE = RNG.normal(1000, 300, 60).tolist()
CARS = {"size": SIZE, "colour": COLOUR, "doors": DOORS, "price": PRICE}
CUT = ("train[:40]", "train[40:]")


def write(path, columns, **how):
    parquet.write_table(pa.table(columns), path, **how)
    return str(path)


def load(path, options, splits=CUT, skip=False):
    return tables.prepare(str(path), options, splits, skip, kind="parquet")


def test_it_is_the_table_that_csv_is(tmp_path):
    """Mixed before it is cut, and standardised; texts may be a dictionary, and row groups are no borders."""
    with open(tmp_path / "cars.csv", "w", newline="") as file:
        rows = [["" if v is None else v for v in row] for row in zip(*CARS.values())]
        csv.writer(file).writerows([list(CARS), *rows])
    want = tables.prepare(str(tmp_path / "cars.csv"), {"target": "price"}, CUT)
    dictionary = {**CARS, "colour": pa.array(COLOUR).dictionary_encode()}
    for columns in (CARS, {**dictionary, "__index_level_0__": DOORS}):  # as pandas writes an index
        got = load(write(tmp_path / "cars.parquet", columns, row_group_size=7), {"target": "price"})
        assert got.spec == want.spec
        for a, b in zip((got.train.columns, got.eval.columns), (want.train.columns, want.eval.columns)):
            assert a[0].keys() == b[0].keys()
            for name in a[0]:
                np.testing.assert_array_equal(a[0][name], b[0][name])
            np.testing.assert_array_equal(a[1], b[1])
    # By NumPy alone:
    order = np.random.Generator(np.random.Philox(key=np.zeros(2, np.uint64))).permutation(60)
    np.testing.assert_array_equal(got.train.columns[1], np.array(PRICE)[order[:40]].astype("float32"))


@pytest.mark.parametrize("values, options, names", [
    (["b", "a"] * 30, {}, ("a", "b")), (["10", "9"] * 30, {}, ("9", "10")), ([3, 1] * 30, {}, ("1", "3")),
    ([3.0, 1.0] * 30, {}, ("1", "3")), ([True, False] * 30, {}, ("False", "True")), (list(range(60)), {}, ()),
    ([3, 1] * 30, {"classify": False}, ()), (list(range(60)), {"classify": True}, tuple(map(str, range(60)))),
])  # fmt: skip
def test_what_is_a_class(values, options, names, tmp_path):
    path = write(tmp_path / "t.parquet", {"x": SIZE, "y": values})
    got = load(path, {"target": "y", "in_order": True, **options}, ("train", "train"))
    assert (got.spec.names, got.spec.classes) == (names, len(names) or None)
    told = [str(v).removesuffix(".0") for v in values]
    assert [names[i] for i in got.train.columns[1]] == told if names else got.train.columns[1].tolist() == values
    again = tables.read_rows(path, got.spec.columns, got.spec.target, options, kind="parquet")
    np.testing.assert_array_equal(again[1], got.train.columns[1])
    np.testing.assert_array_equal(again[0]["numbers"], got.train.columns[0]["numbers"])


@pytest.mark.parametrize("values", [[2**53, 2**53 + 1, 2**53 + 2], [-(2**53), -(2**53) - 1, 0]])
def test_large_classes_are_not_merged(values, tmp_path):
    path = write(tmp_path / "t.parquet", {"x": [1.0, 2.0, 3.0], "y": values})
    with refused(r"target 'y' has integers of 2\^53 or more, .*: set classify=True in"):
        load(path, {"target": "y"}, ("train", "train"))
    for kind in (values, list(map(str, values))):
        path = write(tmp_path / "t.parquet", {"x": [1.0, 2.0, 3.0], "y": kind})
        options = {"target": "y", "in_order": True, **({"classify": True} if kind is values else {})}
        got = load(path, options, ("train", "train"))
        again = tables.read_rows(path, got.spec.columns, got.spec.target, options, kind="parquet")[1]
        for y in (got.train.columns[1], again):
            assert [got.spec.names[i] for i in y] == list(map(str, values))


def test_splits_in_several_files(tmp_path):
    """As data sets are stored on hubs: pieces of one split belong together, and the test rows are not trained on."""
    for i in range(2):
        write(tmp_path / f"train-0000{i}-of-00002.parquet", {"x": [i, 10 + i], "y": ["a", "b"]})
    write(tmp_path / "test-00000-of-00001.parquet", {"x": [99], "y": ["a"]})
    got = load(tmp_path, {"target": "y", "in_order": True}, ("train", "test"))
    x = got.train.columns[0]["numbers"][:, 0] * got.spec.columns[0].std + got.spec.columns[0].mean
    np.testing.assert_allclose(x, [0, 10, 1, 11], atol=1e-5)
    assert len(got.eval.columns[1]) == 1


def test_rows_that_float32_does_not_hold(tmp_path, caplog):
    path = write(tmp_path / "t.parquet", {"x": [1.0, float("inf"), 3.0, 1e39], "y": ["a", "b", "a", "b"]})
    with refused(r"t.parquet row 2 has inf for a number in column 'x'; .* row 4 has 1e\+39 .*skip"):
        load(path, {"target": "y"}, ("train", "train"))
    caplog.set_level("INFO", "tfdist")
    got = load(path, {"target": "y"}, ("train", "train"), skip=True)
    assert len(got.train.columns[1]) == 2 and "left out: " in caplog.text


@pytest.mark.parametrize(
    "make, options, message",
    [
        (lambda p: str(p / "no.parquet"), {}, "parquet:.* has no files: give a Parquet file, a folder of"),
        (lambda p: (p / "t.parquet").write_text("x,y") and str(p / "t.parquet"), {}, "cannot be read: .*: give a Parq"),
        (lambda p: write(p / "t.parquet", CARS), {}, "parquet:.* needs data.options=target=NAME, the co"),
        (lambda p: write(p / "t.parquet", CARS), {"target": "cost"}, "there is no column 'cost' for target"),
        (lambda p: write(p / "t.parquet", CARS), {"target": "price", "delimiter": ";"}, "delimiter is for CSV"),
        (lambda p: write(p / "t.parquet", {**CARS, "day": [datetime.date(2020, 1, 1)] * 60}), {"target": "price"},
         r"column 'day' of .* is date32\[day\], neither numbers nor texts: leave it out with data.opt"),
        (lambda p: write(p / "t.parquet", {"x": [[1]] * 3, "y": [1, 2, 3]}), {"target": "y"},
         "column 'x' of .* is list<.*>, neither numbers nor texts"),
        (lambda p: write(p / "t.parquet", {"x": ["1", "two", "3"], "y": [1, 2, 3]}), {"target": "x", "classify": False},
         "row 2 has 'two' for a number in column 'x'"),
        (lambda p: write(p / "t.parquet", {"x": [1, 2], "y": [None, 1]}), {"target": "y"}, "1 rows in .* no target"),
        (lambda p: write(p / "t.parquet", dict.fromkeys("xy", pa.array([], pa.int8()))), {"target": "y"}, "no rows"),
    ],
)  # fmt: skip
def test_what_is_refused(make, options, message, tmp_path):
    with refused(message):
        load(make(tmp_path), options, ("train", "train"))


def test_a_damaged_page_is_found_where_its_writer_left_a_checksum(tmp_path):
    path = tmp_path / "data.parquet"
    columns = {"x": np.arange(1000.0), "t": np.arange(1000) % 2}
    parquet.write_table(pa.table(columns), path, write_page_checksum=True, compression="none", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[3000] ^= 1
    path.write_bytes(content)
    with refused(r"data.parquet cannot be read: could not verify page integrity"):
        tfdist.load_data(f"parquet:{path}", train_split="train", eval_split="train", options="target=t")
