"""What a run leaves for those who come after it, and small things that nothing else raises."""

import dataclasses
import json

import pytest

from tfdist.checkpoints import integrity, run_folder
from tfdist.data import spec_file
from tfdist.data.spec import Column, Spec
from tfdist.errors import TrainingError, UserError
from tfdist.train import run

SPECS = [
    Spec((8, 8, 1), "uint8", 10, 16.0, ("zero", "one")),
    Spec((3,), "float32", None, 1.0),
    Spec((), "float32", 2, float("inf"), (), (Column("age", "number", 41.5, 12.25), Column("sex", "category",
                                                                                           vocabulary=("", "f", "m"))),
         Column("pay", "number")),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=["images", "numbers", "table"])
def test_a_description_survives_json(spec, tmp_path):
    folder = run_folder.RunFolder(str(tmp_path))
    spec_file.write(folder.write_text, spec)
    assert spec_file.read(tmp_path) == spec
    assert hash(spec_file.read(tmp_path)) == hash(spec), "a list is left somewhere"


@pytest.mark.parametrize("text, message", [
    ("{", "JSONDecodeError"),
    ('{"format": 2, "spec": {}}', "it has format 2, and this tfdist reads 1"),
    ('{"format": 1, "spec": {"colour": 3}}', "KeyError: 'colour'"),
])  # fmt: skip
def test_a_description_that_cannot_be_used(text, message, tmp_path):
    assert spec_file.read(tmp_path) is None
    (tmp_path / "data.json").write_text(text)
    with pytest.raises(UserError) as error:
        spec_file.read(tmp_path)
    assert message in str(error.value) and str(error.value).endswith("): copy it back, or delete it")


# -- train ------------------------------------------------------------------


def test_the_result_takes_the_place_of_the_report_on_a_full_disk(tmp_path, said):
    @dataclasses.dataclass
    class Done:
        status: str = "completed"

    class Full(run_folder.RunFolder):
        """Has room for one file."""

        def write_text(self, name, text):
            if any(self.path.iterdir()):
                raise TrainingError("no space left on device")
            super().write_text(name, text)

    run.write_result(Full(str(tmp_path)), Done())
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"] and not said
    assert json.loads((tmp_path / "result.json").read_text()) == integrity.sealed({"status": "completed"})
