"""How tests of the doctor look at what it found."""


def one(checks, status, text, fix=""):
    """The only check, which has that status, text in its finding and in its fix."""
    assert [c.status for c in checks] == [status] and text in checks[0].finding and fix in checks[0].fix, checks
    assert bool(checks[0].fix) == (status != "ok")


def of(checks, name):
    return [c for c in checks if c.name == name]
