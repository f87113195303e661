"""The GPUs: which the driver lists, which TensorFlow sees, and why these differ.

TensorFlow is asked in a process of its own, because its import takes seconds, may crash or hang in the driver, and
cannot be taken back: `python -m tfdist.doctor.tensorflow_probe` prints its answer as one line of JSON.
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import signal
import sys
from collections.abc import Mapping

from tfdist.distributed import child_process, gpus, tf_devices
from tfdist.doctor.check import Finding, fail, ok, refused, warn
from tfdist.errors import UserError

CUDA = "pip install 'tfdist[cuda]'"


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What TensorFlow says of itself."""

    version: str = ""
    keras: str = ""
    cuda: str = ""  # the version that this wheel was built for; empty if it was built without
    gpus: tuple[str, ...] = ()  # names of those that it sees, in its order
    said: tuple[str, ...] = ()  # about GPUs while it looked for them
    problem: str = ""  # why there is no answer


def ask(environ: Mapping[str, str], timeout: float) -> Answer:
    """Starts TensorFlow in another process; never waits longer than `timeout` seconds."""
    # The numbers of TensorFlow's GPUs are to be those of nvidia-smi.
    given = {**environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "TF_CPP_MIN_LOG_LEVEL": "1"}  # 1: why there is no GPU
    done = child_process.answer([sys.executable, "-m", "tfdist.doctor.tensorflow_probe"], timeout, env=given)
    if done is None:
        return Answer(problem=f"no answer from TensorFlow within {timeout:.0f} s")
    if done.returncode < 0:
        return Answer(problem=f"TensorFlow ended with {signal.Signals(-done.returncode).name}")
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
        fields: dict = {k: tuple(v) if isinstance(v, list) else v for k, v in answer.items()}
        return Answer(**fields)
    except (IndexError, ValueError, TypeError, AttributeError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Answer(problem=f"TensorFlow cannot be imported ({last})")


def driver(survey: gpus.Survey) -> list[Finding]:
    again = "let nvidia-smi work again (modprobe nvidia, nvidia-smi -r, or a reboot), or train with --devices=none"
    if not survey.gpus and survey.problem:
        return [fail(survey.problem, again)]
    if not survey.gpus:
        return [ok("no NVIDIA GPU here (nvidia-smi is missing or lists none)")]
    unknown = [str(g.number) for g in survey.gpus if math.isnan(g.load) or not g.memory_total > 0]
    listed = f"{len(survey.gpus)} GPU{'s' * (len(survey.gpus) > 1)}, driver {survey.gpus[0].driver}"
    if survey.problem:
        return [warn(f"{listed}; {survey.problem}", again)]
    if unknown:
        what = f"{listed}; it does not tell load or memory of GPU {', '.join(unknown)}"
        return [warn(what, "choose GPUs by number: --devices=idle:N takes these last")]
    return [ok(listed)]


def tensorflow(answer: Answer, survey: gpus.Survey, environ: Mapping[str, str]) -> list[Finding]:
    """Checks whether TensorFlow starts, and sees the GPUs that it should."""
    if problem := answer.problem:
        if "no answer" in problem:  # a slow disk looks the same as a driver that hangs
            return [warn(problem, "run it again with --time_limit=60; if it hangs still, look at the driver")]
        if "SIGILL" in problem:
            return [fail(f"{problem}: this processor lacks instructions (AVX)", "use another machine")]
        return [fail(problem, "mend the packages below, else pip install --force-reinstall tensorflow")]
    what = f"TensorFlow {answer.version} with Keras {answer.keras}"
    built = f", built for CUDA {answer.cuda}" if answer.cuda else ", built without CUDA"
    try:
        usable = gpus.select("all", survey, environ)
    except UserError as error:
        return [refused(error)]
    seen = len(answer.gpus)
    if usable.opaque:
        return [ok(f"{what}{built}; sees {seen} of the slices in CUDA_VISIBLE_DEVICES")]
    if seen < len(usable.gpus):
        reason, fix = _why(answer)
        return [fail(f"{what} sees {seen} of {len(usable.gpus)} usable GPUs: {reason}", fix)]
    hidden = [str(g.number) for g in survey.gpus if g not in usable.gpus]
    if hidden:
        text = f"{what}; CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES')} hides GPU {', '.join(hidden)}"
        return [warn(text, "unset CUDA_VISIBLE_DEVICES, if that is not meant")]
    sees = f"sees {seen} GPU{'s' * (seen > 1)}" if seen else "there is no GPU to see"
    return [ok(f"{what}{built}; {sees}")]


def _why(answer: Answer) -> tuple[str, str]:
    """Returns why TensorFlow sees too few GPUs, and what to do, from what it printed."""
    said = " ".join(answer.said)
    if not answer.cuda:
        return "this wheel was built without CUDA", f"pip uninstall -y tensorflow-cpu tensorflow, then {CUDA}"
    if "dlopen" in said or "Skipping registering" in said:
        return "CUDA's libraries do not load", CUDA
    if "insufficient" in said or "forward compatibility" in said:
        return "the driver is too old for this CUDA", f"update the driver to one for CUDA {answer.cuda} or newer"
    if "Could not find cuda drivers" in said:
        fix = "start a container with --gpus all and NVIDIA_DRIVER_CAPABILITIES=all; otherwise reinstall the driver"
        return "the driver's library libcuda.so.1 is not found", fix
    if "cuInit" in said or "CUDA_ERROR" in said:
        missing = "" if pathlib.Path("/dev/nvidia-uvm").exists() else " (/dev/nvidia-uvm is missing here)"
        fix = "in a container, start it with --gpus all; else nvidia-modprobe -u -c=0, or a reboot"
        return f"CUDA does not start{missing}", fix
    return answer.said[-1] if answer.said else "it does not say why", CUDA


def names(answer: Answer, survey: gpus.Survey, environ: Mapping[str, str]) -> dict[int, str]:
    """Returns TensorFlow's name of a GPU by the driver's number, for those that it sees."""
    try:
        usable = gpus.select("all", survey, environ).gpus
    except UserError:
        return {}
    if len(answer.gpus) < len(usable):  # nobody knows which
        return {}
    return {gpu.number: f"GPU:{i}" for i, gpu in enumerate(usable)}


# -- in the process that has TensorFlow ---------------------------------------------------


def _look() -> dict[str, object]:
    tf, seen, lines = tf_devices.start()
    import keras

    shown = []
    for gpu in seen:
        details: dict = {}
        with contextlib.suppress(Exception):  # a name is not worth failing for
            details = tf.config.experimental.get_device_details(gpu)
        shown.append(str(details.get("device_name", gpu.name)))
    built = dict(tf.sysconfig.get_build_info()) if tf.test.is_built_with_cuda() else {}
    cuda = str(built.get("cuda_version", ""))
    answer = Answer(tf.__version__, keras.__version__, cuda, tuple(shown), tuple(dict.fromkeys(lines)))
    return dataclasses.asdict(answer)


def main() -> None:
    """Answers, on standard output; a failed import ends in one line instead of a traceback."""
    try:
        answer = _look()
    except BaseException as error:
        print(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", file=sys.stderr)
        os._exit(1)
    print(json.dumps(answer), flush=True)
    os._exit(0)  # TensorFlow takes its time to end


if __name__ == "__main__":
    main()
