"""Executes programs of `tfdist.topology.program` as N replicas on N CPU devices, by XLA's own client.

The compilers' interpreter runs it, `mesh_child.py FOLDER`, in an environment that has jax and neither tfdist nor
TensorFlow; `support.mesh` has written the folder.
"""

import json
import os
import pathlib
import sys


def main():
    folder = pathlib.Path(sys.argv[1])
    work = json.loads((folder / "work.json").read_text())
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={work['replicas']}"
    import jax
    import numpy as np

    jax.config.update("jax_enable_x64", True)
    values = dict(np.load(folder / "values.npz"))
    mesh = Mesh(jax, np, work["replicas"])
    programs = [(mesh.compiled((folder / p["path"]).read_text()), p) for p in work["programs"]]
    state = {name: mesh.copies(value) for name, value in values.items() if name.startswith(("variable", "constant"))}
    losses = []
    for update, number in enumerate(work["updates"]):
        executable, program = programs[number]
        rows = [mesh.put(values[f"rows{update}_{k}"]) for k in range(program["rows"])]
        results = mesh.run(executable, [*rows, *(state[name] for name in program["arguments"])])
        losses.append(np.asarray(results[0][0]).reshape(-1)[0])
        for argument, result in program["aliases"]:
            state[program["arguments"][argument - program["rows"]]] = results[result]
    ends = {name: np.stack([np.asarray(copy) for copy in copies]) for name, copies in state.items()}
    np.savez(folder / "ends.npz", losses=np.array(losses), **ends)


class Mesh:
    """CPU devices, one for each replica."""

    def __init__(self, jax, np, replicas):
        self.jax, self.np = jax, np
        self.devices = jax.devices()
        assert len(self.devices) == replicas
        mesh = jax.sharding.Mesh(np.array(self.devices), ("replica",))
        spec = jax.sharding.PartitionSpec
        self.split = jax.sharding.NamedSharding(mesh, spec("replica"))
        self.whole = jax.sharding.NamedSharding(mesh, spec())

    def compiled(self, text):
        from jax._src import compiler
        from jax._src.interpreters import mlir
        from jax._src.lib import _jax
        from jaxlib.mlir import ir

        count = len(self.devices)
        options = compiler.get_compile_options(
            num_replicas=count, num_partitions=1, device_assignment=self.np.arange(count).reshape(-1, 1)
        )
        with mlir.make_ir_context():
            module = ir.Module.parse(text)
            return self.devices[0].client.compile_and_load(module, _jax.DeviceList(tuple(self.devices)), options)

    def put(self, values):
        """One value [replicas, ...] for each replica."""
        return [self.jax.device_put(value, device) for value, device in zip(values, self.devices)]

    def copies(self, value):
        return self.put([value] * len(self.devices))

    def run(self, executable, arguments):
        """By argument and replica; returns by result and replica."""
        arrays = []
        for copies in arguments:
            shape = copies[0].shape
            whole = (len(self.devices) * shape[0], *shape[1:]) if shape else ()
            sharding = self.split if shape else self.whole
            arrays.append(self.jax.make_array_from_single_device_arrays(whole, sharding, copies))
        return executable.execute_sharded(arrays).disassemble_into_single_device_arrays()


if __name__ == "__main__":
    main()
