"""The command `run`: trains an unmodified Keras script. What it runs, and how; no TensorFlow."""

from typing import NamedTuple


class Program(NamedTuple):
    """What is run: a file, or a module with `-m`, and its own arguments."""

    name: str
    is_module: bool
    arguments: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """The program as it stands at the end of a command line."""
        return [*(["-m"] if self.is_module else []), self.name, *self.arguments]
