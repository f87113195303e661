"""What workers say to each other when they meet: schemas, for what comes is checked before use. No TensorFlow."""

from __future__ import annotations

from typing import NamedTuple

from tfdist.distributed.connections import schema, wire
from tfdist.distributed.job.addresses import join, split
from tfdist.errors import UserError


def _address(value: object) -> str:
    """Takes `host:port`."""
    try:
        return join(*split(schema.text(300)(value)))
    except UserError:
        raise wire.WireError("it sent an address that is none") from None


_HOST = schema.line(253)
_INTRODUCTION = schema.record(
    rank=schema.whole(),
    facts=schema.table(schema.text()),
    address=lambda value: value if value == "" else _address(value),
    host=_HOST,
    pid=schema.whole(),
)
"""What a worker says to the chief."""


def answer_to(size: int) -> schema.Reader:
    """Returns what reads the chief's answer to a worker."""
    places = {"addresses": schema.each(_address, size, size), "hosts": schema.each(_HOST, size, size)}
    return schema.named(
        welcome=schema.record(welcome=schema.record(**places)), refused=schema.record(refused=schema.line(4000))
    )


class Introduction(NamedTuple):
    """What a worker says of itself when it comes."""

    rank: int
    facts: dict[str, str]
    """What must be the same everywhere, by name."""
    address: str
    """`host:port` for TensorFlow; empty where the list of workers tells."""
    host: str
    pid: int

    @classmethod
    def read(cls, message: wire.Message) -> Introduction | None:
        """Returns the introduction in a message; None if it is something else."""
        try:
            return cls(**_INTRODUCTION(message))
        except wire.WireError:
            return None

    @property
    def process(self) -> str:
        """Which process this is, for a person."""
        return f"{self.host}, process {self.pid}"
