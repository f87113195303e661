"""CSV tables against NumPy and Python's own csv, and what is said about bad rows."""

import csv
import gzip
import random

import keras
import numpy as np
import pytest
from support.refusals import refused

import tfdist
from tfdist import config
from tfdist.config import validation
from tfdist.data import spec as spec_lib
from tfdist.data.datasets import csv_reader, registry, tables

ALL = ("train", "train")


def write(path, rows, header, **how):
    with open(path, "w", newline="") as file:
        csv.writer(file, **how).writerows([header, *rows])
    return str(path)


def made(n=60, seed=0):
    """Rows of a number with gaps, a category with gaps, an integer, and a target."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        size = "" if i % 7 == 3 else f"{rng.normal(50, 10):.3f}"
        colour = ("red", "green, or so", "blü", "")[rng.integers(0, 4)]
        rows.append([size, colour, str(rng.integers(0, 9)), f"{rng.normal(1000, 300):.2f}"])
    return rows


HEADER = ["size", "colour", "doors", "price"]


def test_numbers_and_categories_by_the_training_rows(tmp_path):
    rows = made()
    path = write(tmp_path / "cars.csv", rows, HEADER)
    got = tables.prepare(path, {"target": "price", "in_order": True}, ("train[:40]", "train[40:]"))
    train = rows[:40]
    for place, (column, name) in enumerate(zip([0, 2], ["size", "doors"])):
        values = np.array([float(r[column] or "nan") for r in rows])
        mean, std = np.nanmean(values[:40]), np.nanstd(values[:40])
        spec = next(c for c in got.spec.columns if c.name == name)
        assert (spec.kind, spec.mean, spec.std) == ("number", pytest.approx(mean), pytest.approx(std))
        expected = np.where(np.isnan(values), 0, (values - mean) / std)
        np.testing.assert_allclose(
            np.concatenate([p.columns[0]["numbers"] for p in (got.train, got.eval)])[:, place], expected, atol=1e-5
        )
    vocabulary = sorted({r[1] for r in train})
    assert got.spec.columns[1] == spec_lib.Column("colour", "category", vocabulary=tuple(vocabulary))
    assert vocabulary[0] == ""
    np.testing.assert_array_equal(got.train.columns[0]["categories"][:, 0], [1 + vocabulary.index(r[1]) for r in train])
    assert [c.name for c in got.spec.columns] == ["size", "colour", "doors"]
    np.testing.assert_allclose(got.eval.columns[1], [float(r[3]) for r in rows[40:]], rtol=1e-6)
    assert (got.spec.classes, got.spec.target.kind) == (None, "number")
    assert got.spec.target.mean == pytest.approx(np.mean(got.train.columns[1]))
    assert got.train.columns[0]["numbers"].dtype == got.train.columns[1].dtype == "float32"
    assert got.train.columns[0]["categories"].dtype == "int32"


def test_rows_are_mixed_before_they_are_cut(tmp_path):
    """A file sorted by its target would leave classes out of the training split."""
    path = write(tmp_path / "sorted.csv", [[i, "ab"[i // 50]] for i in range(100)], ["x", "y"])
    got = tables.prepare(path, {"target": "y"}, ("train[:80%]", "train[80%:]"))
    assert (len(got.train.columns[1]), len(got.eval.columns[1]), got.spec.names) == (80, 20, ("a", "b"))
    x = (
        np.concatenate([p.columns[0]["numbers"][:, 0] for p in (got.train, got.eval)]) * got.spec.columns[0].std
        + got.spec.columns[0].mean
    )
    assert sorted(np.round(x).tolist()) == list(range(100)) and set(got.eval.columns[1]) == {0, 1}
    y = np.concatenate([got.train.columns[1], got.eval.columns[1]])
    np.testing.assert_array_equal(y, np.round(x) >= 50)
    again = tables.prepare(path, {"target": "y"}, ("train[:80%]", "train[80%:]"))
    np.testing.assert_array_equal(again.train.columns[0]["numbers"], got.train.columns[0]["numbers"])


@pytest.mark.parametrize("values, options, classes, names", [
    (["b", "a", "10", "9"], {}, 4, ("9", "10", "a", "b")), (["3", "1", "3", "1"], {}, 2, ("1", "3")),
    (["0.5", "1", "3", "1"], {}, None, ()), ([str(i) for i in range(30)], {}, None, ()),
    ([str(i) for i in range(30)], {"classify": True}, 30, tuple(str(i) for i in range(30))),
    (["3", "1", "3", "1"], {"classify": False}, None, ()),
])  # fmt: skip
def test_what_is_a_class(values, options, classes, names, tmp_path):
    path = write(tmp_path / "t.csv", [[i, v] for i, v in enumerate(values)], ["x", "y"])
    got = tables.prepare(path, {"target": "y", "in_order": True, **options}, ALL)
    assert (got.spec.classes, got.spec.names) == (classes, names)
    if classes:
        assert got.train.columns[1].dtype == "int32" and [names[i] for i in got.train.columns[1]] == values
    else:
        np.testing.assert_allclose(got.train.columns[1], [float(v) for v in values])


LARGE = ["9007199254740992", "9007199254740993", "9007199254740994"]
"""Three numbers, two of which are one in 64-bit floats."""


def test_large_classes_are_not_merged(tmp_path):
    path = write(tmp_path / "t.csv", [[i, LARGE[i % 3]] for i in range(9)], ["x", "y"])
    with refused() as error:
        tables.prepare(path, {"target": "y"}, ALL)
    assert str(error.value) == (
        "target 'y' has integers of 2^53 or more, of which 64-bit floats merge some: set classify=True in "
        "data.options if they are classes, or classify=False if they are numbers"
    )
    got = tables.prepare(path, {"target": "y", "classify": True, "in_order": True}, ALL)
    assert (got.spec.names, got.train.columns[1].tolist()) == (tuple(LARGE), [0, 1, 2] * 3)
    _, y = tables.read_rows(path, got.spec.columns, got.spec.target, {"classify": True})
    assert y.tolist() == [0, 1, 2] * 3
    assert tables.prepare(path, {"target": "y", "classify": False}, ALL).spec.classes is None


@pytest.mark.parametrize("vocabulary", [tuple(LARGE), ("1", "01", "1.0"), ("10", "1_0", "\u0661\u0660"), ("1", "nan")])
def test_classes_that_are_texts_are_not_merged(vocabulary, tmp_path):
    """Of new rows, where a model may have been trained on texts of Parquet."""
    path = write(tmp_path / "t.csv", [[i, text] for i, text in enumerate(vocabulary)], ["x", "y"])
    columns, target = (spec_lib.Column("x", "number"),), spec_lib.Column("y", "category", vocabulary=vocabulary)
    _, y = tables.read_rows(path, columns, target, {})
    assert y.tolist() == list(range(len(vocabulary)))


@pytest.mark.parametrize("text", ["1_0", "\u0663", "\uff11", "1\u06603"])
def test_what_only_python_takes_for_a_number(text, tmp_path):
    path = write(tmp_path / "t.csv", [[text if i == 7 else f" {i}\u00a0", i / 2] for i in range(40)], ["x", "y"])
    with refused(f"t.csv line 9 has {text!r} for a number in column 'x': correct"):
        tables.prepare(path, {"target": "y"}, ALL)
    path = write(tmp_path / "t.csv", [[text * (1 + i % 2), i / 2] for i in range(40)], ["x", "y"])
    assert tables.prepare(path, {"target": "y"}, ALL).spec.columns[0].vocabulary == (text, text * 2)


def test_folders_patterns_and_what_no_training_row_has(tmp_path):
    write(tmp_path / "train.csv", [[1, "a", "yes"], [3, "b", "no"]], ["x", "c", "y"], delimiter=";")
    test = "y;c;x\nno;new;5\nyes;b;\n"
    with gzip.open(tmp_path / "test.csv.gz", "wt") as file:
        file.write(test)
    options = {"target": "y", "delimiter": ";", "in_order": True}
    got = tables.prepare(str(tmp_path), options, ("train", "test"))
    np.testing.assert_allclose(got.eval.columns[0]["numbers"], [[3.0], [0.0]])
    np.testing.assert_array_equal(got.eval.columns[0]["categories"], [[0], [2]])
    np.testing.assert_array_equal(got.eval.columns[1], [0, 1])
    joined = tables.prepare(str(tmp_path), options, ("test+train", "train[:50%]"))
    assert joined.spec.columns[1].vocabulary == ("a", "b", "new") and joined.spec.columns[0].mean == 3
    np.testing.assert_array_equal(joined.train.columns[0]["categories"][:, 0], [3, 2, 1, 2])
    np.testing.assert_array_equal(joined.eval.columns[0]["categories"], [[1]])
    with refused(r"csv:.* has no split 'tset': did you mean 'test'\? Known are test, train"):
        tables.prepare(str(tmp_path), options, ("train", "tset"))
    both = tables.prepare(str(tmp_path / "*.csv*"), options, ALL)
    assert len(both.train.columns[1]) == 4 and both.spec.columns[0].vocabulary == ("a", "b", "new")
    assert [c.name for c in both.spec.columns] == ["c", "x"], "by the first file, which is test.csv.gz"


def test_new_rows_are_read_as_the_model_knows_them(tmp_path):
    path = write(tmp_path / "cars.csv", made(), HEADER)
    got = tables.prepare(path, {"target": "price", "categories": ["doors"], "in_order": True}, ALL)
    assert [c.kind for c in got.spec.columns] == ["number", "category", "category"]
    new = write(
        tmp_path / "new.csv", [["red", "7", "", "x"], ["pink", "77", "61", "x"]], ["colour", "doors", "size", "id"]
    )
    (x,) = tables.read_rows(new, got.spec.columns, None, {})
    size, colour, doors = got.spec.columns
    np.testing.assert_allclose(x["numbers"], [[0], [(61 - size.mean) / size.std]], rtol=1e-5)
    np.testing.assert_array_equal(
        x["categories"], [[colour.vocabulary.index("red") + 1, doors.vocabulary.index("7") + 1], [0, 0]]
    )
    with refused(r"new\.csv lacks the columns a, b that the model was trained on"):
        tables.read_rows(new, (spec_lib.Column("a", "number"), size, spec_lib.Column("b", "category")), None, {})
    with refused(r"line 2 has 'red' for a number in column 'colour'.*: correct the file$"):
        tables.read_rows(new, (spec_lib.Column("colour", "number"),), None, {}, skip=None)
    with refused("delimiter must be one character, and no quote, got ';;'"):
        tables.read_rows(new, got.spec.columns, None, {"delimiter": ";;"})


def test_new_rows_with_targets(tmp_path, said):
    """Classes by the training's numbers, however they are written; another target is refused."""
    row = lambda *values: dict(zip(("path", "columns", "target", "options"), values))
    age, pays = spec_lib.Column("age", "number", 40.0, 10.0), spec_lib.Column("pays", "category", vocabulary=("1", "3"))
    new = write(tmp_path / "new.csv", [["50", "3.0"], ["x", "1"], ["", "1"], ["20", ""]], ["age", "pays"])
    x, y = tables.read_rows(**row(new, (age,), pays, {}), skip=True)
    np.testing.assert_allclose(x["numbers"], [[1], [0]])
    assert y.tolist() == [1, 0] and y.dtype == np.int32
    assert "line 3 has 'x' for a number" in said[0] and "1 rows" in said[1] and len(said) == 2
    with refused("line 3 has 'x' for a number in column 'age'"):
        tables.read_rows(**row(new, (age,), pays, {}))
    with refused(r"1 rows have a target 'pays' that no training row has, such as '3.0'"):
        tables.read_rows(**row(new, (age,), pays, {"classify": True}), skip=True)
    _, y = tables.read_rows(**row(new, (age,), spec_lib.Column("pays", "number"), {}), skip=True)
    assert y.tolist() == [3.0, 1.0] and y.dtype == np.float32
    with refused(r"new\.csv lacks the columns wage that the model was trained on"):
        tables.read_rows(**row(new, (age,), spec_lib.Column("wage", "number"), {}))
    write(tmp_path / "new.csv", [["50", ""]], ["age", "pays"])
    with refused("has no rows with a target 'pays': there is nothing to evaluate on"):
        tables.read_rows(**row(new, (age,), pays, {}), skip=True)


BAD_ROWS = '"size",n\n1,1\n\n2,2,2\n3,"x\ny"\n4,4\n5\ninf,5\nabc,6\n7,7\n' + "8,8\n" * 60


def test_bad_rows_are_named_by_their_line(tmp_path, capfd):
    path = tmp_path / "bad.csv"
    path.write_text(BAD_ROWS)
    expected = (
        f"{path} line 4 has 3 fields and the header 2; {path} line 8 has 1 fields and the header 2; "
        f"{path} line 5 has 'x\\ny' for a number in column 'n', and 2 more bad rows"
    )
    options = {"target": "n", "in_order": True, "classify": False}
    with refused() as error:
        tables.prepare(str(path), options, ALL)
    assert str(error.value) == f"{expected}: correct the file, or leave such rows out with data.on_error=skip"
    got = tables.prepare(str(path), options, ALL, skip=True)
    assert capfd.readouterr().out == f"tfdist: WARNING: left out: {expected}\n"
    np.testing.assert_allclose(got.train.columns[1], [1, 4, 7, *[8] * 60])
    everything = csv_reader.read([str(path)], ["size", "n"], {}, skip=True)
    assert [row.split(" line ")[1].split(" has ")[0] for row in everything.skipped] == ["4", "8", "5", "9", "10"]


def test_a_column_that_turns_out_to_be_texts_late(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_reader, "_CHUNK", 10)
    path = write(tmp_path / "late.csv", [[i if i < 15 else f"id{i}", i % 2] for i in range(40)], ["code", "y"])
    got = tables.prepare(path, {"target": "y"}, ALL)
    assert got.spec.columns[0].kind == "category" and len(got.spec.columns[0].vocabulary) == 40


@pytest.mark.parametrize(
    "text, options, message",
    [
        ("a,b\n1,2\n", {}, "needs data.options=target=NAME, the column to predict, one of: a, b"),
        ("a,b\n1,2\n", {"target": "c"}, "there is no column 'c' for target in .*: it has a, b"),
        ("a,b\n1,2\n", {"target": "b", "use": ["z"]}, "there is no column 'z' for use"),
        ("a,b\n1,2\n", {"target": "b", "leave_out": "a"}, "leaves no column to predict 'b' from: there are a, b"),
        ("a,b\n1,2\n", {"target": "b", "taget": "a"}, "unknown 'taget' in data.options: did you mean 'target'"),
        ("a,b\n1,2\n", {"target": "b", "classify": 3}, "classify must be True or False, got 3"),
        ("a,b\n1,2\n", {"target": "b", "delimiter": ";;"}, "delimiter must be one character, and no quote, got ';;'"),
        ("a,b\n1,2\n", {"target": "b", "in_order": 1}, "in_order must be True or False, got 1"),
        ("a,b\n1,2\n", {"target": "b", "categories": 1}, "categories must be a column name or a list of them, got 1"),
        ("a,b\n1,2\n", {"target": "b", "delimiter": "\n"}, r"delimiter must be one character, and no quote, got '\\n'"),
        (",a,b\n0,1,2\n", {"target": "b"},
         r"a column without a name, .* leave it out with data.options=\"leave_out=\['']"),
        ("a,b\n1,2\n2,1e39\n", {"target": "b", "classify": False}, "line 3 has '1e39' for a number in column 'b'"),
        ('a,b\n1,x\n2,"y\n3,x\n4,y\n', {"target": "b"},
         "line 3 has a quote that does not end, and all below belongs to it: correct the file, or leave"),
        ('a,b\n1,"x"y\n', {"target": "b"},
         "line 2 has characters behind a closing quote, in line 2: correct the file, or leave"),
        ('a,"b\n1,x\n', {"target": "b"}, "t.csv line 1 has a quote that does not end, .*: correct the file$"),
        ("", {"target": "b"}, "has no header: its first line must name the columns"),
        ("a,a,b\n", {"target": "b"}, "has two columns named 'a': rename one"),
        ("a,b\n", {"target": "b"}, "has no rows below its header"),
        ("a,b\n1\n", {"target": "b"}, "line 2 has 1 fields and the header 2: correct the file"),
        ("a,b\n1,\n2,3\n", {"target": "b"}, "1 rows in train of csv:.* have no target 'b': fill it in, or leave"),
        ("a,b\n1,x\n2,\n", {"target": "b"}, "1 rows in train of csv:.* have no target 'b'"),
        ("a,b\n1,2\n1," + "2" * 140_000, {"target": "b"},
         r"t.csv cannot be read after line \d: field larger than field limit"),
        ('a,b\n"1,5",1\n,2\n2,1\n', {"target": "b"}, r"column 'a' of .*t.csv has '1,5', .* or set categories=\['a'\]"),
        ("a;b\n1;1.250,5\n2;1.125\n", {"target": "b", "delimiter": ";"}, r"column 'b' of .*t.csv has '1.250,5', which"),
        ("a,b\n" + "".join(f"n{i},1\n" for i in range(1200)), {"target": "b"},
         (r"column 'a' has 1,200 different texts in 1,200 training rows, more than a category has: leave it out "
          r"with data.options=leave_out=\['a'\]")),
    ],
)  # fmt: skip
def test_what_cannot_be_used(text, options, message, tmp_path):
    (tmp_path / "t.csv").write_text(text)
    with refused(message):
        tables.prepare(str(tmp_path / "t.csv"), options, ALL)


def test_files_that_cannot_be_used(tmp_path):
    with refused("has no files: give a CSV file, a folder of"):
        tables.prepare(str(tmp_path), {"target": "a"}, ALL)
    for name in ("train.csv", "train.csv.gz"):
        (tmp_path / name).write_text("a,b\n1,2\n")
    with refused(r"train\.csv is there as \.csv and as \.csv\.gz: remove one of them"):
        tables.prepare(str(tmp_path), {"target": "a"}, ALL)
    (tmp_path / "train.csv").unlink()
    (tmp_path / "train.csv.gz").unlink()
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    (tmp_path / "b.csv").write_text("a,c\n1,2\n")
    with refused(r"b.csv has other columns than .*a.csv \(b, c\): give files of one table"):
        tables.prepare(str(tmp_path), {"target": "a"}, ALL)
    (tmp_path / "a.csv").write_bytes(b"a,b\n1,2\n1,\xff\xfe\n")
    with refused(r"a\.csv cannot be read.*give CSV in UTF-8"):
        tables.prepare(str(tmp_path / "a.csv"), {"target": "a"}, ALL)
    zipped = gzip.compress("".join(f"{i},{i**5}\n" for i in range(2000)).encode())
    (tmp_path / "d.csv.gz").write_bytes(zipped[:500] + bytes(100) + zipped[600:])
    with refused(r"d\.csv\.gz cannot be read after line \d+: Error -3 while decompressing"):
        csv_reader.read([str(tmp_path / "d.csv.gz")], ["0"], {})
    (tmp_path / "c.csv").write_text("a,b\n1,x\n2,y\n")
    with refused("1 rows have a target 'b' that no training row has, such as 'y'"):
        tables.prepare(str(tmp_path / "c.csv"), {"target": "b", "in_order": True}, ("train[:1]", "train[1:]"))


def test_a_column_that_has_one_value(tmp_path):
    """The deviation of three times 0.1 is not 0 by rounding."""
    path = write(tmp_path / "t.csv", [[0.1, 1], [0.1, 2], [0.1, 3], [0.2, 4]], ["x", "y"])
    got = tables.prepare(path, {"target": "y", "in_order": True}, ("train[:3]", "train[:3]"))
    assert got.spec.columns == (spec_lib.Column("x", "number", 0.1, 1.0),)
    np.testing.assert_array_equal(got.train.columns[0]["numbers"], np.zeros((3, 1)))


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_the_last_line_is_read_however_it_ends(end, tmp_path, monkeypatch):
    (tmp_path / "t.csv").write_bytes(f'n,t\n1,a\n2,"b"{end}'.encode())
    for chunk in (1, 2, 3):
        monkeypatch.setattr(csv_reader, "_CHUNK", chunk)
        table = csv_reader.read([str(tmp_path / "t.csv")], ["n", "t"], {})
        assert table.numbers["n"].tolist() == [1, 2] and table.texts["t"] == ["a", "b"] and not table.skipped


def test_quoting_is_pythons(tmp_path):
    """Texts with everything in them come back, whatever chunk they fall into."""
    chooser = random.Random(0)
    texts = ["".join(chooser.choices('ab,"\n;é ', k=8)).strip() or "x" for _ in range(50)]
    path = write(tmp_path / "q.csv", [[t, i] for i, t in enumerate(texts)], ["t", "n"])
    table = csv_reader.read([path], ["t", "n"], {"t": "category"})
    assert [table.texts["t"][i] for i in table.categories["t"]] == texts
    np.testing.assert_array_equal(table.numbers["n"], range(50))


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_a_quote_that_is_missing_merges_no_rows(chunk, tmp_path, monkeypatch):
    """Python's csv takes all up to the next quote for one text, and what is behind that for a part of it."""
    monkeypatch.setattr(csv_reader, "_CHUNK", chunk)
    (tmp_path / "t.csv").write_text('x,t\n1,a\n2,"b\n3,c\n4,"d"\n5,"e\ne"\n6\n7,"a\n')
    path = str(tmp_path / "t.csv")
    table = csv_reader.read([path], ["x", "t"], {}, skip=True)
    assert table.numbers["x"].tolist() == [1, 5] and table.texts["t"] == ["a", "e\ne"]
    assert table.skipped == [
        f"{path} line 3 has characters behind a closing quote, in line 5",
        f"{path} line 8 has 1 fields and the header 2",
        f"{path} line 9 has a quote that does not end, and all below belongs to it",
    ]


def test_an_experiment_on_a_table(tmp_path, connect):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 2))
    colour = rng.integers(0, 2, 200)
    rows = [[f"{a:.3f}", f"{b:.3f}", "rb"[c], "no" if a + b > c else "yes"] for (a, b), c in zip(x, colour)]
    path = write(tmp_path / "t.csv", rows, ["a", "b", "c", "y"])
    e = config.Experiment()
    e.data = config.Data(name=f"csv:{path}", options="target=y", train_split="train[:80%]", eval_split="train[80%:]")
    loaded = registry.load(validation.validate(e))
    assert (loaded.examples, loaded.spec.classes, loaded.spec.names) == (160, 2, ("no", "yes"))
    with connect(2).scope():
        numbers, categories = keras.Input((2,), name="numbers"), keras.Input((1,), dtype="int32", name="categories")
        embedded = keras.layers.Flatten()(keras.layers.Embedding(3, 2)(categories))
        outputs = keras.layers.Dense(2)(keras.layers.Concatenate()([numbers, embedded]))
        model = keras.Model({"numbers": numbers, "categories": categories}, outputs)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.05), loss, metrics=["accuracy"])
    fit = dict(distribution=connect(2), batch_size=32, epochs=15, verbose=0)
    history = tfdist.fit(model, loaded.train, validation_data=loaded.eval, **fit)
    assert history.history["val_accuracy"][-1] > 0.9


# -- what is silently something else ----------------------------------------


@pytest.mark.parametrize("huge", ["1e400", "inf", "-Infinity", "1e39"])
@pytest.mark.parametrize("count", [1, 30])
def test_infinite_numbers_make_no_category(huge, count, tmp_path):
    rows = [[huge if i < count else str(i), str(i / 2)] for i in range(40)]
    path = write(tmp_path / "a.csv", rows, ["x", "y"])
    with refused() as error:
        tables.prepare(path, {"target": "y"}, ALL)
    assert f"a.csv line 2 has {huge!r} for a number in column 'x'" in str(error.value)
    assert "correct the file, or leave such rows out with data.on_error=skip" in str(error.value)
    assert tables.prepare(path, {"target": "y"}, ALL, skip=True).spec.columns[0].kind == "number"


def test_a_nul_makes_no_category(tmp_path, said):
    rows = [[f"{i}\0" if i % 3 == 0 else str(i), f"t{i % 2}" + "\0" * (i == 7), str(i)] for i in range(30)]
    (tmp_path / "a.csv").write_text("x,t,y\n" + "".join(",".join(row) + "\n" for row in rows))
    path = str(tmp_path / "a.csv")
    with refused(r"a.csv line 2 has '0\\x00', with a NUL, in column 'x'; .* 8 more bad"):
        tables.prepare(path, {"target": "y"}, ALL)
    kept = tables.prepare(path, {"target": "y", "leave_out": "x"}, ALL, skip=True)
    assert kept.spec.columns[0].vocabulary == ("t0", "t1") and len(kept.train.columns[1]) == 29
    assert "line 9 has 't1\\x00', with a NUL, in column 't'" in said[0]
    (tmp_path / "b.csv").write_text("x\0,y\n1,2\n")
    with refused("has a NUL in its header: give CSV in UTF-8"):
        tables.prepare(str(tmp_path / "b.csv"), {"target": "y"}, ALL)


def test_whole_numbers_are_one_category_however_they_are_written(tmp_path, said):
    rows = [[("70", "8", "07")[i % 3], "ab"[i % 2]] for i in range(12)]
    path = write(tmp_path / "train.csv", rows, ["size", "y"])
    options = {"target": "y", "categories": "size"}
    columns = tables.prepare(path, options, ALL).spec.columns
    assert columns[0].vocabulary == ("07", "70", "8")
    new = write(tmp_path / "new.csv", [["70.0"], ["8.0"], ["07"], ["7.0"], [""]], ["size"])
    np.testing.assert_array_equal(tables.read_rows(new, columns, None, {})[0]["categories"][:, 0], [2, 3, 1, 0, 0])
    assert not said
    other = write(tmp_path / "other.csv", [["9.0"], ["6.0"]], ["size"])
    assert not tables.read_rows(other, columns, None, {})[0]["categories"].any()
    assert "no row has a value of column 'size' that a training row has, but such as '9.0'" in said[0]
