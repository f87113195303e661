"""Checks that the files of a run folder are as the run wrote them. No TensorFlow.

`result.json` has the size and the SHA-256 of each file that later commands use, and a checksum of its own. A checkpoint
has the experiment, and the SHA-256 of what `data.json` says. Folders of earlier versions have neither, and pass.
"""

import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from tfdist.checkpoints import files, resume
from tfdist.checkpoints.files import DamagedError
from tfdist.checkpoints.run_folder import strict
from tfdist.config import flat, local_files
from tfdist.data import spec_file
from tfdist.errors import UserError

RESULT = "result.json"
TRUSTED = ("experiment.json", spec_file.NAME)  # that a model is built from, whose changes its checksum cannot show
REPAIR = "copy it back, or repeat the training command with --resume=require, which writes it again"


def sealed(result: Mapping[str, object]) -> dict[str, Any]:
    """Returns the content of `result.json` with its own checksum."""
    content = strict(dict(result))
    return content | {"sha256": _digest(content)}


def read_result(folder: pathlib.Path) -> dict[str, Any]:
    """Returns what `result.json` holds, {} without that file; DamagedError if it is not as it was written."""
    try:
        content = json.loads(local_files.content(folder / RESULT))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{RESULT} cannot be read ({error})") from None
    listed = content.get("files", {}) if isinstance(content, dict) else None
    if not isinstance(listed, dict) or not all(map(files.is_described, listed.items())):
        raise DamagedError(f"{RESULT} is not what a run writes")
    if ("files" in content or "sha256" in content) and content.get("sha256") != _digest(content):
        raise DamagedError(f"{RESULT} has changed: its checksum is wrong")
    return content


def problems(folder: pathlib.Path, names: Iterable[str] = ()) -> list[str]:
    """Compares the files that `result.json` lists, all or those of these names, with it; returns what is wrong."""
    errors: list[str] = []
    try:
        listed = read_result(folder).get("files", {})
    except DamagedError as error:
        return [str(error)]
    for name in [name for name in names or listed if name in listed]:
        try:
            files.check(folder / name, listed[name])
        except DamagedError as error:
            errors.append(str(error))
    return errors


def check_trusted(folder: pathlib.Path, name: str, trusted: Iterable[str] = TRUSTED) -> None:
    """Checks the `trusted` files of a folder with this name in messages; UserError if one is not as it was written."""
    if errors := problems(folder, trusted):
        raise UserError(f"--workdir={name} is damaged: {errors[0]}", REPAIR)


def check_state(folder: pathlib.Path, state: Mapping[str, Any], checkpoint: str, model_file: str = "") -> None:
    """Compares the files that a model is built from with what a checkpoint was made with; raises UserError.

    `checkpoint` is its name, for messages; `model_file` one outside of the folder, if the model is built from it.
    """
    recorded, made_with = local_files.read_object(folder / TRUSTED[0]), state["experiment"]
    if recorded is not None and made_with and (odd := resume.differences(flat(recorded), made_with)):
        raise UserError(f"{TRUSTED[0]} is not what {checkpoint} was made with ({'; '.join(odd[:5])})", REPAIR)
    expected = state.get("facts", {}).get(resume.MODEL_FILE)
    if expected and model_file and files.checksum(pathlib.Path(model_file).expanduser())["sha256"] != expected:
        raise UserError(f"{model_file} is not what {checkpoint} was made with", "copy it back")
    expected = state.get("data_sha256")
    if expected:
        spec = spec_file.read(folder)
        if spec is None or spec_file.digest(spec) != expected:
            raise UserError(f"{spec_file.NAME} is not what {checkpoint} was made with", REPAIR)


def _digest(content: Mapping[str, object]) -> str:
    rest = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
