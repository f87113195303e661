"""Every worker loads the same data set; those of one host have its arrays in memory once."""

from __future__ import annotations

from collections.abc import Callable

from tfdist import config
from tfdist.cluster.peers import Peers
from tfdist.data import shared_tables
from tfdist.data.datasets import formats
from tfdist.data.loaded import Loaded


def loaded(peers: Peers, data: config.Data, load: Callable[[], Loaded]) -> Loaded:
    """Loads data on all workers, each of which calls this with the same `load`.

    It runs first on the chief, then on one worker of each host, and then on those others that cannot share with it. A
    function of the user runs on all of them: it may leave something behind that the model or the loss look at.

    Args:
      data: what is loaded.

    Raises:
      UserError: as `load` does.
      PeerError: a worker was lost meanwhile.
    """
    if formats.is_function(data.name):
        return peers.once(load)
    tables = shared_tables.SharedTables()
    try:
        return peers.once(load, tables.offer, shared_tables.take)
    finally:
        tables.close()
