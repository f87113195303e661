"""A running program whose lines are read as they come."""

import threading

from support import processes


class Running:
    """A program for whose lines and end nobody waits longer than `limit` seconds; options are those of `Popen`.

    What it says is `out`; with a pipe of its own, standard error is `err`.
    """

    def __init__(self, words, limit, stderr=processes.STDOUT, **options):
        pipes = dict(stdout=processes.PIPE, stderr=stderr, text=True, errors="replace")
        self.process = processes.Popen([*map(str, words)], **pipes, **options)
        self.out, self.err, self._limit, self._news = [], [], limit, threading.Condition()
        read = [pair for pair in ((self.process.stdout, self.out), (self.process.stderr, self.err)) if pair[0]]
        self._open = len(read)
        for pair in read:
            threading.Thread(target=self._read, args=pair, daemon=True).start()

    def _read(self, pipe, lines):
        for line in pipe:
            with self._news:
                lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._open -= 1
            self._news.notify_all()

    @property
    def lines(self):
        return [*self.out, *self.err]

    @property
    def text(self):
        return "\n".join(self.lines)

    def until(self, text):
        """Waits for a line with `text` in it, and returns that line."""
        found = lambda: next((line for line in self.lines if text in line), None)
        with self._news:
            self._news.wait_for(lambda: found() or not self._open, self._limit)
            assert found(), f"{text!r} never came:\n{self.text}"
            return found()

    def end(self):
        """Exit code, once it has ended and nothing that it started holds its output any more."""
        code = self.process.wait(self._limit)
        with self._news:
            ended = self._news.wait_for(lambda: not self._open, self._limit)
            assert ended, f"it has left something running:\n{self.text}"
        return code
