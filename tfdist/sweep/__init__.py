"""The command `python -m tfdist.sweep`: one experiment with several values of some fields, as a table and a page."""
