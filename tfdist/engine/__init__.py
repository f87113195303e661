"""When an update, an evaluation and a prediction happen (`fit`, `evaluation`), and in `step/` what they compute."""
