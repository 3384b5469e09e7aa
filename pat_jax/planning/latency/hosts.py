"""When a layout whose TP crosses hosts is worth a look: only what was measured counts.

Links between hosts are slower than those inside one by an order of magnitude, and a layout costs
its compilation and warm-up before it can be found slow. So it has to be shown to pay first.
"""

from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.types import Split


def is_measured(latency: LatencyModel, split: Split) -> bool:
    return any(key[0] == split for key in latency.decode_table)


def pays_across_hosts(latency: LatencyModel, crossing: Split, inside: Split) -> bool:
    """Whether a decode step of `crossing` is faster than one of `inside` in any measured bucket.

    Compared at equal rows of a replica and equal cache lengths: a wider layout has at least as many
    rows in its fullest replica, so where it is slower even so, it never pays.
    """
    table = latency.decode_table
    both = [key[1:] for key in table if key[0] == crossing and (inside, *key[1:]) in table]
    return any(table[(crossing, *at)] < table[(inside, *at)] for at in both)
