"""Monitoring of a run: its record, progress, timeline, TensorBoard, profile and, in `report/`, its page."""
