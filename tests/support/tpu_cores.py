"""TPU cores that are not there: what TensorFlow traces for them can be looked at, and nothing of it can be run."""

import collections
import dataclasses

import numpy as np
import tensorflow as tf
from tensorflow.python.client import session
from tensorflow.python.tpu import device_assignment, tpu_system_metadata
from tensorflow.python.tpu import topology as topology_lib

from tfdist.distributed.strategies import tpu

MESHES = {1: (1, 1), 4: (2, 2), 8: (2, 4)}
"""Chips of a v5e by their number; each has one core."""


class Resolver:
    """Says to TPUStrategy what the resolver of a real TPU says."""

    task_type, task_id = "worker", 0

    def __init__(self, cores):
        rows, columns = MESHES[cores]
        places = [[row, column, 0, 0] for row in range(rows) for column in range(columns)]
        self.topology = topology_lib.Topology(
            mesh_shape=[rows, columns, 1, 1], device_coordinates=np.array([places], np.int32)
        )
        self._cores = cores

    def get_tpu_system_metadata(self):
        where = "/job:localhost/replica:0/task:0/device:TPU:"
        cores = [session._DeviceAttributes(f"{where}{i}", "TPU", 1 << 30, 0) for i in range(self._cores)]
        return tpu_system_metadata.TPUSystemMetadata(self._cores, 1, self._cores, self.topology, cores)

    def cluster_spec(self):
        return None


def distribution(cores):
    """Returns the distribution that `--strategy=tpu` would give on a TPU of so many cores."""
    tf.config.set_soft_device_placement(True)  # variables are on the CPU then
    resolver = Resolver(cores)
    assignment = device_assignment.DeviceAssignment.build(resolver.topology, num_replicas=cores)
    strategy = tf.distribute.TPUStrategy(resolver, experimental_device_assignment=assignment)
    return tpu.of(strategy, "cores that are not there")


@dataclasses.dataclass
class Traced:
    """A function of a graph, as TPUStrategy has divided it."""

    cluster: list
    """Nodes that the cores would compute, branches and loops included."""
    loops_outside: bool
    """Whether a loop of the host goes from cluster to cluster."""

    def ops(self):
        return collections.Counter(node.op for node in self.cluster)


def look(concrete):
    """Returns what a traced function would compute on the cores."""
    definition = concrete.graph.as_graph_def(add_shapes=True)
    bodies = {function.signature.name: list(function.node_def) for function in definition.library.function}
    bodies[""] = list(definition.node)
    marked = {name: [node for node in body if "_tpu_replicate" in node.attr] for name, body in bodies.items()}
    cluster = [node for nodes in marked.values() for node in nodes]
    called = set()
    for node in cluster:  # which grows
        for name in _called(node) & bodies.keys() - called:
            called.add(name)
            cluster += [inner for inner in bodies[name] if "_tpu_replicate" not in inner.attr]
    loops = {name for node in bodies[""] if "While" in node.op for name in _called(node)}
    outside = [bool(nodes) for name, nodes in marked.items() if name in loops]
    return Traced(cluster, any(outside) and not marked[""])


def _called(node):
    values = node.attr.values()
    return ({value.func.name for value in values} | {f.name for value in values for f in value.list.func}) - {""}


def types(node):
    """Returns the types of a node's attributes, as TensorFlow numbers them."""
    return {value.type for value in node.attr.values()} | {t for value in node.attr.values() for t in value.list.type}


def shapes(node):
    """Returns the shapes of a node's results; None for one of unknown rank, -1 for an unknown size."""
    return [
        None if shape.unknown_rank else [dim.size for dim in shape.dim]
        for shape in node.attr["_output_shapes"].list.shape
    ]
