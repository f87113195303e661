"""The experiment that runs without `--config`."""

import runpy

from tfdist.config.commands import command_line


def digits():
    return runpy.run_path(command_line.DEFAULT_CONFIG)["get_config"]()
