"""Who the workers of a job are, from environment variables alone."""
