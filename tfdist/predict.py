"""Predicts: `python -m tfdist.predict --workdir=runs/digits --output=digits.csv`.

One line per example of the evaluation split, in its order, under any strategy:
number, predicted class, its name and probability, and the target; outputs as
they are where they are no classes. `.csv` or `.jsonl`; `-` is CSV on standard
output. Other data: `--config.data.eval_split=train`, `--config.data.name=...`.

Exit codes: 0 done; 1 a failure on the way; 2 the input or the environment is
wrong; 143 stopped by a signal.
"""

import sys

if __name__ == "__main__":
    from tfdist.inference.predict import main

    main()
else:
    from tfdist.engine.evaluation import predict

    # `tfdist.predict` is a function, and importing a module of that name would put the module there instead.
    sys.modules[__name__] = predict  # type: ignore[assignment]
