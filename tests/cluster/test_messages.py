"""What comes from a port is checked before use, and escaped before it is printed. No TensorFlow, no processes."""

import copy
import hmac
import json
import math

import pytest

from tfdist.cluster import registration, watch, wire
from tfdist.launch import node_agent

WORKER = dict(kind="worker", rank=1, facts={"a": "b"}, host="h", pid=3, address="h:1", nproc=1)
NODE = WORKER | dict(kind="node", facts={"--jit": "on"}, address="", nproc=2)
EXIT = dict(
    rank=1, pid=2, host="h", code=-9, lost=True, lines=["a", "b"], culprit=0, complaint="(h): silent", error="e"
)
ROUND = dict(attempt=0, node=0, world=2, first=1, port=4000, salt="0f" * 16)
PLACES = {"addresses": ["h:1", "[::1]:2"], "hosts": ["h", "i"]}

VALID = [  # who reads it, and a message with every field that there is
    (registration.MEMBER, NODE),
    (registration.MEMBER, WORKER),
    (registration.ANSWER_TO_NODE, {"welcome": "h"}),
    (registration.ANSWER_TO_NODE, {"refused": "no", "fix": "x"}),
    (node_agent.EVENTS, {"beat": 1}),
    (node_agent.EVENTS, {"event": "exit", "exit": EXIT}),
    (node_agent.EVENTS, {"event": "ended"}),
    (node_agent.EVENTS, {"event": "cannot", "line": "no"}),
    (node_agent.EVENTS, {"event": "signal", "name": "SIGTERM"}),
    (node_agent.ORDERS, {"beat": 1}),
    (node_agent.ORDERS, {"order": "round", "round": ROUND}),
    (node_agent.ORDERS, {"order": "say", "line": "x", "error": False}),
    (node_agent.ORDERS, {"order": "end", "text": "x", "lines": ["y"]}),
    (node_agent.ORDERS, {"order": "stop"}),
    (node_agent.ORDERS, {"order": "kill"}),
    (node_agent.ORDERS, {"order": "over", "code": 0, "line": ""}),
    (registration.answer_to_worker(2), {"welcome": PLACES}),
    (registration.answer_to_worker(2), {"refused": "no", "fix": "x"}),
    (registration.answer_to_worker(2), {"missing": 1, "refused": "no", "fix": "x"}),
    (watch.TO_CHIEF, {"beat": "call", "update": 3, "for": 0.5}),
    (watch.TO_CHIEF, {"gather": 0, "label": "x", "value": [1]}),
    (watch.TO_CHIEF, {"failed": "x"}),
    (watch.from_chief(2), {"beat": "python", "update": 3, "for": 1}),
    (watch.from_chief(2), {"gathered": 0, "values": [None, 1]}),
    (watch.from_chief(2), {"failed": "x"}),
    (watch.from_chief(2), {"lost": "x", "worker": -1, "why": ""}),
]
ODD = [None, True, -2, 2**70, 1e300, math.inf, math.nan, "", "\x1b[2J", "\u202e", "\ud800", "x" * 10**7, [], [[]], {}]
FREE = ("--jit", "value", "values", "facts", "a", "label")
"""Fields that are compared or handed on as they are, and escaped where they are printed."""


def name(case):
    return "+".join(case[1])


def holders(value):
    """Objects and lists within a message, itself first."""
    if isinstance(value, dict | list):
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from holders(item)


def texts(value, free=False):
    """Texts that a reader has made fit to be printed."""
    if isinstance(value, str) and not free:
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from texts(item, free or key in FREE)
    elif isinstance(value, list):
        for item in value:
            yield from texts(item, free)


@pytest.mark.parametrize("reader, message", VALID, ids=map(name, VALID))
def test_every_field_is_checked(reader, message):
    """Whatever stands in its place is refused, or comes out fit to be used."""
    assert reader(json.loads(json.dumps(message))) == message
    for at in range(len(list(holders(message)))):
        for key in list(keys(list(holders(message))[at])):
            for odd in ODD:
                changed = copy.deepcopy(message)
                list(holders(changed))[at][key] = odd
                try:
                    read = reader(changed)
                except wire.WireError as error:
                    assert str(error).startswith("it sent ")
                else:
                    assert all(text.isprintable() and len(text) <= 4000 for text in texts(read)), (key, odd)
    for odd in [*ODD, 1.5, {"order": []}, {"event": "lost", "line": "x"}, {"event": "exit"}, {**message, "more": 1}]:
        with pytest.raises(wire.WireError, match=r"^it sent what no process of tfdist sends$"):
            reader(odd)


def keys(holder):
    return holder if isinstance(holder, dict) else range(len(holder))


def test_what_differs_is_printed_escaped():
    theirs = registration.Member("node", 1, {"--jit": "\x1b[2J" * 1000, "\x1b[3m": 1}, "h", 2)
    problem = str(theirs.conflict(registration.Member("node", 0, {"--jit": "on"}, "i", 3), None, 2))
    assert problem.isprintable() and "\\x1b[2J" in problem and len(problem) < 2000
    problem = str(theirs.conflict(registration.Member("node", 0, {"--jit": "\x1b[2J" * 1000}, "i", 3), None, 2))
    assert problem.isprintable() and "in \\x1b[3m: 1" in problem


# -- last words -----------------------------------------------------------------


def test_a_secret_may_be_any_bytes():
    """What Python makes of TFDIST_SECRET=$'\\xff\\xfe' is not encodable as UTF-8."""
    secret = b"\xff\xfe".decode("utf-8", "surrogateescape")
    assert wire.derived(secret, "salt") == hmac.new(b"\xff\xfe", b"derived salt", "sha256").hexdigest()
