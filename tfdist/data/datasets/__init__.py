"""Data sets by name; `registry` is the way in, one module per format or source."""
