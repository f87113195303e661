"""The workers of a run, in touch with each other over plain TCP while TensorFlow or Horovod train. No TensorFlow.

`peers` holds `Peers`, which the rest of tfdist talks to, and `watch` its thread; `transport` holds the connections,
`votes` what all workers must give or agree on, `activity` what each is doing, and `signals` and `stall_detection` the
judgement who holds up the others. How the workers find each other stands in `rendezvous.py`.
"""

from tfdist.cluster.peers.peers import Peers

__all__ = ["Peers"]
