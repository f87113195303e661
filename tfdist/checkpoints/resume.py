"""Selects the checkpoint that a run resumes from: the newest that is valid, and of the same experiment.

And records, for the next attempt, into how many micro-batches an update must be cut after a run was out of memory.
"""

import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tfdist.checkpoints import files
from tfdist.checkpoints.files import DISK, DamagedError, Disk
from tfdist.checkpoints.run_folder import RunFolder
from tfdist.cluster.peers import differing_facts
from tfdist.config import Experiment, current_name, flat, local_files
from tfdist.config.messages import logger
from tfdist.config.runtime_options import ResumeOptions
from tfdist.config.user_functions import CODE, RATE, SETUP, as_now
from tfdist.errors import UserError, one_line

MODEL_FILE = "the model's file"  # name of the fact that is the SHA-256 of the file in `model.name`
HARMLESS = (  # fields of the experiment that change how it runs and not its result
    "config.train.accumulate",
    "config.model.remat",
    "config.train.audit",
    "config.train.steps_per_call",
    "config.train.on_nonfinite",
    "config.train.max_rollbacks",
    "config.eval.batch_size",
    "config.data.data_dir",
    "config.checkpoint.",
)


@dataclasses.dataclass(slots=True)
class Position:
    """Position of a run in its training."""

    update: int = 0  # updates made
    epoch: int = 0  # the running one, from 0
    begun: int = 0  # updates made in that epoch
    measured: bool = False  # all its updates are made, and the replicas' statistics averaged
    stopped: bool = False  # a callback has ended the training
    logs: dict[str, Any] = dataclasses.field(default_factory=dict)  # loss and metrics of the running epoch so far
    sums: list[float] = dataclasses.field(default_factory=list)  # its losses times examples; see `results.Totals`
    examples: float = 0.0  # seen in the running epoch
    skipped: list[int] = dataclasses.field(default_factory=list)  # updates at which the loss was not finite
    first_epoch: int | None = None  # in which the training began, from which orders count; None up to 0.2.0


class LoadedCheckpoint(NamedTuple):
    path: pathlib.Path
    state: dict[str, Any]
    tensors: dict[str, Any]


def load(path: pathlib.Path, storage: Disk = DISK) -> LoadedCheckpoint | None:
    """Reads a checkpoint; returns None, with a warning, if any byte of it is not as it was written."""
    from tfdist.checkpoints import training_state

    storage.fetch(path)
    try:
        files.verify(path)
        return LoadedCheckpoint(path, files.read_state(path), training_state.read(str(path / files.TENSORS)))
    except (DamagedError, OSError) as error:  # OSError: a run that goes on has deleted it
        why = one_line(error, 200)
        logger.info(f"WARNING: checkpoint {storage.shown(path)} is not used: {why}")
        return None


def choose(
    folder: pathlib.Path,
    identity: Mapping[str, int | None],
    experiment: Mapping[str, str],
    changed: bool,
    storage: Disk = DISK,
    facts: Mapping[str, object] | None = None,
    required: bool = False,
    read_only: bool = False,
) -> LoadedCheckpoint | None:
    """Returns the newest checkpoint that can be resumed from; UserError if there are some and none can be used.

    Args:
      identity: batch, length and seed of an epoch.
      experiment: its fields by name.
      changed: accept another identity, experiment or data at the end of an epoch.
      facts: of the data (`Source.facts`) and the model's file, as far as they are known.
      required: raise UserError if there is none at all.
      read_only: do not rename newer ones that cannot be used.
    """
    paths, valid, where = files.newest_first(folder), 0, storage.shown(folder)
    for number, path in enumerate(paths):
        chosen = load(path, storage)
        valid += chosen is not None
        if chosen is None or not _agrees(chosen, identity, experiment, changed, storage, facts or {}):
            continue
        for newer in [] if read_only else paths[:number]:  # or they would be the newest again
            moved = files.set_aside(newer)
            storage.set_aside(newer, moved)
            logger.info(f"{storage.shown(newer)} is now {moved.name}")
        return chosen
    if valid:
        raise UserError(f"no valid checkpoint in {where} is from the end of an epoch", "leave out --resume_changed")
    if paths:
        what = f"none of the {len(paths)} checkpoints in {where} is valid"
        raise UserError(what, "copy one back from elsewhere, or start over with --resume=never, which keeps them")
    if required:
        raise UserError(f"--resume=require, and there is no checkpoint in {where}", "check --workdir")
    return None


def _agrees(
    chosen: LoadedCheckpoint,
    identity: Mapping[str, int | None],
    experiment: Mapping[str, str],
    changed: bool,
    storage: Disk,
    facts: Mapping[str, object],
) -> bool:
    """Tells whether a checkpoint is of this run, or may be used all the same; UserError if not `changed`."""
    before, shown = chosen.state["run"], storage.shown(chosen.path)
    odd = differences(experiment, chosen.state["experiment"]) or [
        f"{name} is {before.get(name)} there and {value} here"
        for name, value in identity.items()
        if before.get(name, value) != value  # earlier versions had fewer
    ]
    odd = odd or [  # else the data may well be other, too
        f"{name} has changed" if name.startswith((MODEL_FILE, CODE, SETUP)) else f"{name} is {old} there and {new} here"
        for name, old, new in differing_facts(chosen.state.get("facts", {}), facts)
        if not (experiment and name.startswith(RATE))  # which a script's record has told
    ]
    if not odd:
        return True
    if not changed:
        raise UserError(refusal(shown, odd, by_flags=bool(experiment)))
    if chosen.state["position"]["begun"]:
        why = "it is from the middle of an epoch"
        logger.info(f"checkpoint {shown} is not used: {why}, and {'; '.join(odd)}")
        return False
    logger.info(f"resuming though {'; '.join(odd)}")
    return True


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """Returns messages for the fields that differ, without the harmless ones.

    A field that one version of tfdist does not have has its default.
    """
    defaults = flat(Experiment())
    here, there = (
        {**defaults, **{current_name(name): as_now(text) for name, text in fields.items()}} if fields else fields
        for fields in (here, there)
    )
    # With virtual replicas the micro-batches change the last bits, which are guaranteed.
    exact = ("config.train.accumulate",) if there.get("config.train.virtual_replicas", "0") != "0" else ()
    names = [name for name in {**here, **there} if not name.startswith(HARMLESS) or name in exact]
    return [
        f"{name} is {there.get(name, 'missing')} there and {here.get(name, 'missing')} here"
        for name in names
        if here.get(name) != there.get(name)
    ]


def refusal(what: str, odd: list[str], by_flags: bool = True) -> str:
    """Returns the error message for a run folder or checkpoint of another experiment."""
    ways = "choose another --workdir, or --resume=never, which sets the earlier run aside, or --resume_changed"
    if not by_flags:
        ways = "give tfdist.Checkpoints another folder, or resume='never', or changed=True"
    return f"{what} is of another experiment ({'; '.join(odd[:5])}{'; ...' if len(odd) > 5 else ''}): {ways}"


def same_experiment(folder: RunFolder, experiment: Experiment, options: ResumeOptions, attempt: int) -> None:
    """Refuses a folder that holds a run of another experiment."""
    earlier = folder.earlier() if folder.holds_run else None
    if earlier is None or options.resume_changed or (options.resume == "never" and attempt == 0):
        return
    here = flat(experiment)
    odd, state = differences(here, flat(earlier)), None
    for path in files.newest_first(folder.checkpoints) if odd else []:
        folder.storage.fetch(path)
        with contextlib.suppress(DamagedError):
            files.verify(path)
            state = files.read_state(path)
            break
    if odd and (state is None or differences(here, state["experiment"])):
        raise UserError(refusal(folder.name, odd))
    if odd:
        logger.info(
            f"WARNING: {folder.name}/experiment.json is damaged ({'; '.join(odd[:5])}): it is written again, "
            "since the newest checkpoint is of this experiment"
        )


def continues(folder: RunFolder, options: ResumeOptions, attempt: int, no_checkpoints: bool) -> bool:
    """Tells whether this run continues the one in the folder, instead of setting it aside.

    One that the launcher restarts does, whatever the flags say.
    """
    if attempt == 0 and (options.resume == "never" or no_checkpoints):
        return False
    if attempt > 0 or options.resume == "require" or options.resume_changed:
        return True
    try:
        return not folder.completed and bool(files.newest_first(folder.checkpoints))
    except UserError:
        return True  # and the resume reports the error


def intent(folder: RunFolder, continues: bool) -> str:
    """Describes what will be done with the run folder."""
    if not continues:
        return f"{folder.name}, the run in it set aside" if folder.holds_run else folder.name
    newest = files.newest_first(folder.checkpoints)
    return f"{folder.name}, from update {files.update_of(newest[0])} on" if newest else folder.name


ACCUMULATE = "accumulate.json"
_ADVICE = re.compile(r"out of memory.* train\.accumulate=(\d+) ")


def accumulate_advice(accumulate: int) -> str:
    """Returns the end of an error message, which `record_accumulate_advice` parses on whichever worker it arrives."""
    return f"train.accumulate={accumulate} needs less of it and changes nothing else"


def write_accumulate(folder: RunFolder, accumulate: int) -> None:
    """Records the number of micro-batches for the next attempt."""
    folder.write(ACCUMULATE, {"accumulate": accumulate})


def record_accumulate_advice(folder: RunFolder, message: str) -> None:
    """Records what an error message advises, of this worker or another one."""
    if advised := _ADVICE.search(message):
        write_accumulate(folder, int(advised[1]))


def read_accumulate(folder: RunFolder) -> int:
    """Returns what the previous attempt has recorded; 1 if nothing."""
    try:
        return max(1, int((local_files.read_object(folder.path / ACCUMULATE) or {})["accumulate"]))
    except (ValueError, KeyError, TypeError, OverflowError):
        return 1
