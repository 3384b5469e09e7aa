"""What drafts are worth: how many of their tokens are accepted, as far as a run has seen it.

Knows counts. Does not know where drafts come from, nor what verifying them costs.
"""

# Matches of so many tokens and more are a kind of their own; shorter ones than the first are none.
MATCHES = (1, 2, 3, 5, 9, 16)
