"""Data sets by name: `registry` is the way in, `formats` knows each kind of name, and a module reads each format."""
