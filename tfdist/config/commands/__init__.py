"""Shared by commands: flags in, help, exit codes and one line per error out."""
