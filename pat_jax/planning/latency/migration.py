"""The seconds of a migration of KV caches, by the replicas that take part in its rounds."""

import numpy as np

Numbers = float | np.ndarray


def migration(
    source_dp: Numbers,
    target_dp: Numbers,
    everybody: Numbers,
    one: Numbers,
    fullest: Numbers,
    running: Numbers,
) -> Numbers:
    """Returns the seconds to migrate `running` sequences, each with the pages of one round. As long
    as every replica has pages to move, all move theirs in shared rounds of `everybody` seconds.
    Later sequences move one by one, in `one` seconds each (`engine/relocation/rounds.py`). Only the
    sequences of the fullest replica and their mean are known: the emptiest is taken to be as far
    below the mean as the fullest is above. If DP grows, each replica is taken to be split
    evenly."""
    replicas = np.maximum(source_dp, target_dp)
    mean = running / replicas
    alike = np.where(target_dp > source_dp, mean, np.maximum(0.0, 2 * mean - fullest))
    return alike * everybody + (running - replicas * alike) * one
