"""Membership of a job: discovery of workers, authenticated messages, registration, heartbeats, votes. No TensorFlow.

For workers and launchers alike. What workers compute together belongs in `distributed`, what launchers do in `launch`.
"""
