"""Signals that ask a run to stop. No TensorFlow."""

from __future__ import annotations

import signal


class Signals:
    """Remembers SIGINT, SIGTERM and SIGUSR1 until the current call is finished; a second SIGINT stops at once."""

    def __init__(self):
        self.received = ""
        self._before: dict = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def reason(self) -> str:
        """Why the run shall stop, or nothing."""
        return f"stopped by {self.received} after the update in progress" if self.received else ""

    def _receive(self, number: int, frame: object) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
