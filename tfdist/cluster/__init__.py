"""Who the workers and launchers of a job are: links, registration, heartbeats, votes. Imports no TensorFlow."""
