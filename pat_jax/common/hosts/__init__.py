"""Several processes that are one run: who they are, what they agree on, and how they end
together."""
