"""What `tfdist.evaluate`, `tfdist.predict` and `tfdist.export` share: a trained model, and its data."""
