"""How a contestant answers: for each line on standard input it trains once and prints its speed and its memory."""

import json
import resource
import sys
from collections.abc import Callable


def serve(run: Callable[[], float], examples: int) -> None:
    """Answers until standard input ends.

    Args:
      run: trains once and returns the seconds that count.
      examples: those that it trains on in these seconds.
    """
    for _ in sys.stdin:
        seconds = run()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"examples_per_second": examples / seconds, "peak_mb": peak}), flush=True)
