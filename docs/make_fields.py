"""Prints docs/fields.md: `python docs/make_fields.py > docs/fields.md`, as `make docs` does."""

import re

from tfdist.config import Experiment
from tfdist.config.commands import help_page


def as_markdown() -> str:
    """Returns docs/fields.md."""
    lines = [
        "# The fields of an experiment",
        "",
        "A config file sets them (`Experiment(train=Train(epochs=3))`), and so does the command line:",
        "`--config.train.epochs=3`. `python -m tfdist.train --config=NAME --help` lists them with the values of an",
        "experiment. This page is made from `tfdist/config/__init__.py` by `make docs`.",
    ]
    group = ""
    for field in help_page.fields(Experiment()):
        *owner, name = field.name.removeprefix("config.").split(".")
        if (heading := ".".join(owner) or "Experiment") != group:
            group = heading
            lines += ["", f"## {group}", "", "| field | type | default | meaning |", "|---|---|---|---|"]
        meaning = re.sub(r"\s*\(see [^)]*\)", "", field.meaning).replace("|", "\\|")
        lines.append(f"| `{'.'.join([*owner, name])}` | {field.kind} | `{field.value}` | {meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
