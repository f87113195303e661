"""What the compilers' own interpreter runs: compiles one StableHLO program for devices that are not here.

It is started by path, with the work as JSON on its standard input, in an environment that has jax and neither tfdist
nor TensorFlow. `tfdist.topology.compiler` reads its one line of JSON: what the compiler says, or `error`.
"""

import json
import os
import sys
import time


def main() -> None:
    """Compiles, and answers with one line on what was standard output; the compilers write to standard error."""
    work, answers = json.load(sys.stdin), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _environment(work["compilers"])
    try:
        answer = _compiled(work)
    except Exception as error:  # of the compiler: its words are the answer
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # the compilers' threads need not end


def _environment(compilers: str) -> None:
    """Sets what must be set before jax is imported: nothing shall look for devices."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if compilers == "tpu":
        import libtpu  # type: ignore[import-not-found, unused-ignore]

        os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # it would ask Google Cloud which machine this is
        # Else one process at a time may load it, as if it were to hold a TPU: a second compilation would fail.
        os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
        os.environ["TPU_LIBRARY_PATH"] = libtpu.get_library_path()
    else:
        # Its autotuner would run kernels.
        os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"
        import nvidia.cuda_nvcc  # type: ignore[import-not-found, unused-ignore]

        tools = os.path.join(next(iter(nvidia.cuda_nvcc.__path__)), "bin")
        os.environ["PATH"] = os.pathsep.join([tools, os.environ.get("PATH", os.defpath)])


def _compiled(work: dict) -> dict:
    """Returns what the compiler says of the program."""
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax
    from jax.experimental import topologies
    from jaxlib.mlir import ir

    if work["compilers"] == "tpu":
        topology = topologies.get_topology_desc(topology_name=work["shape"], platform="tpu")
    else:
        topology = topologies.get_topology_desc(
            topology_name=work["name"], platform="cuda", topology=work["shape"], target_config=work["target"]
        )
    replicas = len(topology.devices)
    if replicas != work["replicas"]:
        raise ValueError(f"the compiler knows {work['shape']} as {replicas} devices, not {work['replicas']}")

    def options(**overrides):
        return compiler.get_compile_options(
            num_replicas=replicas,
            num_partitions=1,
            device_assignment=np.arange(replicas).reshape(-1, 1),
            env_options_overrides=overrides,
        )

    with open(work["program"]) as file:
        text = file.read()
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        _alias(module, work["aliases"], ir)
        begun, devices = time.monotonic(), _jax.DeviceList(tuple(topology.devices))
        compile_ = topology.devices[0].client.compile
        try:
            executable = compile_(module, devices, options())
        except Exception as error:
            if "tile sizes" not in str(error):
                raise
            # Of small matrices, for which XLA's own kernels have no shape without autotuning; cuBLAS takes any.
            executable = compile_(module, devices, options(xla_gpu_enable_triton_gemm=False))
        seconds = time.monotonic() - begun
    stats = executable.get_compiled_memory_stats()
    names = ("argument", "output", "alias", "temp", "generated_code")
    hlo = executable.hlo_modules()[0].to_string()
    try:
        cost = executable.cost_analysis()
    except Exception:  # not every compiler of jax's plugins has it
        cost = {}
    cost = (cost[0] if isinstance(cost, list) else cost) or {}
    return {
        "seconds": seconds,
        "memory": {name: getattr(stats, f"{name}_size_in_bytes") for name in names},
        # Of one device; 0 where they are not counted.
        "flops": float(cost.get("flops", 0.0)),
        "traffic": float(cost.get("bytes accessed", 0.0)),
        "all_reduces": [line.strip() for line in hlo.splitlines() if " all-reduce" in line],
    }


def _alias(module, aliases: list, ir) -> None:
    """Lets outputs take the memory of arguments: a variable is updated where it is."""
    (function,) = (op for op in module.body.operations if op.attributes["sym_name"].value == "main")
    attributes = list(function.arg_attrs)
    for argument, output in aliases:
        kept = {named.name: named.attr for named in attributes[argument]}
        number = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), output)
        attributes[argument] = ir.DictAttr.get({**kept, "tf.aliasing_output": number})
    function.arg_attrs = ir.ArrayAttr.get(attributes)


if __name__ == "__main__":
    main()
