"""Shared by `tfdist.evaluate`, `tfdist.predict` and `tfdist.export`: a trained model, and its data."""
