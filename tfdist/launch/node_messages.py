"""What the launchers of several nodes may say to each other: schemas, for what comes is checked before use."""

from __future__ import annotations

from tfdist.cluster import schema
from tfdist.cluster.schema import whole

_LINE = schema.line(4000)
_HOST = schema.line(253)
_LINES = schema.each(_LINE, most=100)
_BEAT = schema.record(beat=whole())

HELLO = schema.record(
    hello=schema.record(
        node=whole(), nnodes=whole(1), nproc=whole(1, 100_000), host=_HOST, agreed=schema.table(schema.anything)
    )
)
"""To node 0, at first."""

ANSWER = schema.named(welcome=schema.record(welcome=_HOST), refused=schema.record(refused=_LINE))
"""Node 0's, to that."""

_EXIT = schema.record(
    rank=whole(),
    pid=whole(),
    host=_HOST,
    code=whole(-255, 255),
    lost=schema.flag,
    lines=_LINES,
    culprit=whole(-1),
    complaint=_LINE,
)
EVENTS = schema.named(
    beat=_BEAT,
    event=schema.tagged(
        "event",
        {
            "exit": {"exit": _EXIT},
            "ended": {},
            "cannot": {"line": _LINE},
            "signal": {"name": schema.one_of("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")},
        },
    ),
)
"""To node 0, later."""

_ROUND = schema.record(
    attempt=whole(),
    node=whole(),
    world=whole(1),
    first=whole(),
    port=whole(1, 65535),
    salt=schema.matching("[0-9a-f]{32}"),
)
ORDERS = schema.named(
    beat=_BEAT,
    order=schema.tagged(
        "order",
        {
            "round": {"round": _ROUND},
            "say": {"line": _LINE, "error": schema.flag},
            "end": {"text": _LINE, "lines": _LINES},
            "stop": {},
            "kill": {},
            "over": {"code": whole(0, 255), "line": _LINE},
        },
    ),
)
"""Of node 0, later."""
