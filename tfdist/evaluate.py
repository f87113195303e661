"""Measures a trained model: `python -m tfdist.evaluate --workdir=runs/digits`.

Loss and metrics over the evaluation split, every example once, under any
strategy; the run folder is only read. Other data:
`--config.data.eval_split=train`, `--config.data.name=...`. A run that has not
ended: `--checkpoint=latest`.

Exit codes: 0 done; 1 a failure on the way; 2 the input or the environment is
wrong; 143 stopped by a signal.
"""

import sys

if __name__ == "__main__":
    from tfdist.inference.evaluate import main

    main()
else:
    from tfdist.engine.evaluation import evaluate

    # `tfdist.evaluate` is a function, and importing a module of that name would put the module there instead.
    sys.modules[__name__] = evaluate  # type: ignore[assignment]
