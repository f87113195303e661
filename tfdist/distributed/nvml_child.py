"""A program for a process of its own: lists the GPUs as NVIDIA's library tells them, as JSON. Nothing of tfdist.

A call into a driver that hangs cannot be ended from within; a process can be left alone. Its argument is the folder
that `pynvml` is in.
"""

import json
import math
import sys


def listed() -> dict:
    """Returns the GPUs, and what is wrong with others."""
    import pynvml

    text = lambda value: value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return {"absent": error.value in absent, "error": str(error)}

    def told(read, *arguments):
        """Returns what the driver tells, or None where it does not."""
        try:
            return read(*arguments)
        except (pynvml.NVMLError, AttributeError, TypeError):  # the last two of an old pynvml
            return None

    gpus, problems = [], []
    driver = text(told(pynvml.nvmlSystemGetDriverVersion) or "")
    for number in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(number)
            uuid, name = text(pynvml.nvmlDeviceGetUUID(handle)), text(pynvml.nvmlDeviceGetName(handle))
        except pynvml.NVMLError as error:
            problems.append(f"GPU {number}: {error}")
            continue
        # The second version does not count what the driver keeps for itself, as nvidia-smi does not.
        second = getattr(pynvml, "nvmlMemory_v2", None)
        memory = told(pynvml.nvmlDeviceGetMemoryInfo, handle, second) or told(pynvml.nvmlDeviceGetMemoryInfo, handle)
        rates = told(pynvml.nvmlDeviceGetUtilizationRates, handle)  # none of a GPU that is cut in MIG slices
        gpus.append(
            {
                "number": number, "uuid": uuid, "name": name, "driver": driver,
                "load": math.nan if rates is None else rates.gpu / 100,
                "memory_used": math.nan if memory is None else memory.used // 2**20,
                "memory_total": math.nan if memory is None else memory.total // 2**20,
            }
        )  # fmt: skip
    return {"gpus": gpus, "problems": problems}


if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    print(json.dumps(listed()))
