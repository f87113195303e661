"""What the workers of a run may say to each other: schemas, for what comes is checked before use. No sockets."""

from __future__ import annotations

from tfdist.distributed.connections import schema
from tfdist.distributed.peers.stall_detection import PHASES

_BEAT = schema.record(**{"beat": schema.one_of(*PHASES), "update": schema.whole(), "for": schema.number})
_FAILED = schema.record(failed=schema.line(4000))

TO_CHIEF = schema.named(
    beat=_BEAT,
    gather=schema.record(gather=schema.whole(), label=schema.text(1000), value=schema.anything),
    failed=_FAILED,
)
"""What other workers say to the chief."""


def of_chief(size: int) -> schema.Reader:
    """Returns what reads the words of the chief of so many workers."""
    values = schema.each(schema.anything, size, size)
    return schema.named(
        beat=_BEAT,
        gathered=schema.record(gathered=schema.whole(), values=values),
        failed=_FAILED,
        lost=schema.record(lost=schema.line(4000)),
    )
