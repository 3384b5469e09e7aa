"""One of two processes with four devices each: copies weights from half of each process's devices to
the other half, as a transfer does, and to all of them, as a reference that is taken from the policy.

    python tests/hosts/copying_worker.py --distributed.coordinator …
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pat_jax.common.devices import configure
from pat_jax.common.hosts.join import join
from pat_jax.common.hosts.options import DistributedConfig
from pat_jax.common.run_command import run_command
from pat_jax.config.command_line import parse


@dataclass(frozen=True)
class Options:
    """Copies of weights."""

    distributed: DistributedConfig = field(default_factory=DistributedConfig)


def check(found: Any, expected: Any, shardings: Any) -> None:
    """Compares the shards of this process."""
    assert jax.tree.map(lambda x: x.sharding, found) == shardings
    for x, whole in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])


def main() -> None:
    join(parse(sys.argv[1:], Options, presets=None).distributed)
    configure(8)
    from trainers import CONFIG, POLICY, host_weights

    from pat_jax.common.pytree import with_sharding
    from pat_jax.layout.chain import layout_chain
    from pat_jax.layout.mesh import factored_mesh
    from pat_jax.training.carrier import carried, carriers
    from pat_jax.training.rest import copied_to

    every = jax.devices()
    parts = [[x for x in every if x.process_index == i] for i in (0, 1)]
    theirs, ours = (
        layout_chain(factored_mesh([x for part in parts for x in part[half]]), CONFIG)[0]
        for half in (slice(2), slice(2, 4))
    )
    weights = jax.tree.map(np.asarray, host_weights())

    def put(shardings: Any) -> Any:
        return jax.tree.map(
            lambda x, to: jax.make_array_from_callback(x.shape, to, lambda part: x[part]),
            weights,
            shardings,
        )

    sent = carriers(ours, theirs)
    assert {str(to): str(each.source) for to, each in sent.items()} == {
        "dp4tp1": "dp4tp1",
        "dp2tp2": "dp2tp2",
        "dp1tp4": "dp2tp2",
    }
    for each in sent.values():
        held, shardings = put(each.sent(POLICY)), each.arriving(POLICY)
        check(carried(held, shardings), weights, shardings)
        assert all(x.is_deleted() for x in jax.tree.leaves(held))

    trained = next(iter(ours.values())).param_shardings(POLICY, role="train")
    of_all = next(iter(layout_chain(factored_mesh(every), CONFIG)[0].values()))
    for layout in (*theirs.values(), of_all):
        shardings = layout.param_shardings(POLICY, role="train")
        like = with_sharding(POLICY.abstract_params, shardings)
        check(copied_to(put(trained), like), weights, shardings)
    print("all weights are there")


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent)]
    run_command(main)
