"""Lists the packages; setup.cfg says everything else, but cannot add packages to those that `find:` finds."""

import setuptools

setuptools.setup(
    packages=[*setuptools.find_packages(include=["tfdist", "tfdist.*"]), "tfdist.configs", "tfdist.flags"],
)
