"""One token through a layer of experts on a CPU, against a plain sum of as many bytes.

    python -m benchmarks.speed.one_token_of_experts \
        --out benchmarks/results/one_token_of_experts.json

128 experts of 4.7 MB each (float32), eight of which compute the token: 38 MB. The router's choice
is given, as in a replay. One device with one thread. The layer and the sum take turns, with other
experts and another array each time, so that both are read from memory and not from a cache.
Times are the processor's: other work on the machine does not count.
"""

import statistics
import time
from collections.abc import Callable
from itertools import cycle

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.report import machine, options, write
from pat_jax.common.devices import configure
from pat_jax.models.config import ExpertsConfig, ModelConfig
from pat_jax.models.experts import Experts
from pat_jax.models.parameters import Keys
from pat_jax.models.partition import Partition

EXPERTS = ExpertsConfig(num_experts=128, num_experts_per_tok=8, expert_dim=768)
CONFIG = ModelConfig("qwen3_moe", 128, 512, 768, 1, 8, 8, 64, experts=EXPERTS)
ARRAYS = 8


def layer() -> Callable[[], jax.Array]:
    """Computes one token, each time by eight other experts."""
    graph, params = nnx.split(Experts(CONFIG, keys=Keys(jax.random.key(0))))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, 1, CONFIG.embed_dim)), jnp.float32)
    order = rng.permutation(EXPERTS.num_experts).reshape(-1, 1, 1, EXPERTS.num_experts_per_tok)
    chosen = cycle([jnp.asarray(experts, jnp.int16) for experts in order])
    is_real = jnp.ones((1, 1), bool)

    @jax.jit
    def run(params: nnx.State, recorded: jax.Array) -> jax.Array:
        return nnx.merge(graph, params)(x, is_real, recorded, Partition())[0]

    return lambda: run(params, next(chosen))


def plain_sum() -> Callable[[], jax.Array]:
    """Of as many values as those eight experts have."""
    size = EXPERTS.num_experts_per_tok * 3 * EXPERTS.expert_dim * CONFIG.embed_dim
    arrays = cycle([jnp.full(size, i, jnp.float32) for i in range(ARRAYS)])
    total = jax.jit(jnp.sum)
    return lambda: total(next(arrays))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    args = parser.parse_args()
    devices = configure(1)
    about = machine(devices)
    systems = {"layer": layer(), "sum": plain_sum()}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for nth in range(args.rounds + ARRAYS):
        for name, run in systems.items():
            start = time.process_time()
            run().block_until_ready()
            if nth >= ARRAYS:
                seconds[name].append(time.process_time() - start)
    medians = {name: 1e3 * statistics.median(times) for name, times in seconds.items()}
    ratios = [layer / plain for layer, plain in zip(*seconds.values(), strict=True)]
    result = {
        "machine": about,
        "rounds": args.rounds,
        "median_ms": medians,
        "least_ms": {name: 1e3 * min(times) for name, times in seconds.items()},
        "ratio": statistics.median(ratios),
    }
    print(result)
    write(args.out, result)


if __name__ == "__main__":
    main()
