"""Lists the packages, and makes the long description of README.md; setup.cfg says everything else."""

import pathlib
import re

import setuptools


def long_description():
    """Returns README.md without what a package index cannot show: pictures and links of the repository."""
    text = (pathlib.Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"<picture>.*?</picture>\n\n|^<!--.*?-->\n", "", text, flags=re.S | re.M)
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", text)


setuptools.setup(
    packages=[*setuptools.find_packages(include=["tfdist", "tfdist.*"]), "tfdist.configs", "tfdist.flags"],
    long_description=long_description(),
)
