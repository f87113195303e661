"""The commands `python -m tfdist.evaluate` and `python -m tfdist.predict`: what a trained model is worth and says."""
