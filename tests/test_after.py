"""What a run leaves for those who come after it, and small things that nothing else raises."""

import dataclasses
import json

import pytest

from tfdist import described, run_folder
from tfdist.datasets.catalog import Column, Spec
from tfdist.errors import UserError

SPECS = [
    Spec((8, 8, 1), "uint8", 10, 16.0, ("zero", "one")),
    Spec((3,), "float32", None, 1.0),
    Spec((), "float32", 2, float("inf"), (), (Column("age", "number", 41.5, 12.25), Column("sex", "category", vocabulary=("", "f", "m"))), Column("pay", "number")),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=["images", "numbers", "table"])
def test_a_description_survives_json(spec, tmp_path):
    folder = run_folder.RunFolder(str(tmp_path))
    described.write(folder, spec)
    assert described.read(tmp_path) == spec
    assert hash(described.read(tmp_path)) == hash(spec), "a list is left somewhere"


def test_bytes_and_none_survive():
    odd = dataclasses.replace(SPECS[0], dtype=b"\x00\xff", classes=None)
    assert described.made(json.loads(json.dumps(described.plain(odd)))) == odd


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "JSONDecodeError"),
        ('{"format": 2, "spec": {}}', "it has format 2, and this tfdist reads 1"),
        ('{"format": 1, "spec": {"colour": 3}}', "KeyError: 'colour'"),
    ],
)
def test_a_description_that_cannot_be_used(text, message, tmp_path):
    assert described.read(tmp_path) is None
    (tmp_path / "data.json").write_text(text)
    with pytest.raises(UserError) as error:
        described.read(tmp_path)
    assert message in str(error.value) and str(error.value).endswith("): copy it back, or delete it")
