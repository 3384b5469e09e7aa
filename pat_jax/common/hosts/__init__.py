"""Several processes that are one run: who they are, what they agree on, how they end."""
