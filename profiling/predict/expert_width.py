"""Chooses over how many devices to divide the width of each expert, for `expert_width auto`.

Steps of few requests become faster, because devices share the weights of few experts. Steps of many
become slower, because each device computes more rows. Step times are composed from coefficients.
"""

import math

from pat_jax.config.rollout import EngineSizes
from pat_jax.models.config import ModelConfig
from pat_jax.planning.types import Split
from pat_jax.profiling.predict.composer import Composer
from pat_jax.profiling.predict.kernel_model import ModelledKernels
from pat_jax.profiling.predict.targets import Target

UNITS = 16  # an expert's width on a device is a multiple of it, for the kernels
CONTEXT = 4096  # tokens
LEAST_GAIN = 0.005  # share of the time that must be saved; for less, experts stay whole


def settled_width(
    target: Target, model: ModelConfig, sizes: EngineSizes, experts: str, responses: int
) -> int:
    """Returns the requested width or, for auto, the one with which a rollout's steps take least
    time. Each halving of the number of running requests is assumed to last equally many steps, as
    with exponential lengths, in the fastest layout for that number. Experts stay whole on TPUs,
    where no divided ones were measured, and if an update sends tokens to them (`experts` is
    "exchanged")."""
    of = model.experts
    is_gpu = target.chip.platform == "cuda"
    is_asked = sizes.expert_width or sizes.expert_parallel or experts == "exchanged"
    if of is None or is_asked or not is_gpu:
        return sizes.expert_width or 1
    inside = target.devices_per_host
    kernels = ModelledKernels(target, sums="nccl")
    layouts = [Split(target.num_devices // tp, tp) for tp in (1, 2, 4, 8) if inside % tp == 0]

    def seconds(width: int) -> float:
        ways = math.gcd(inside // width, of.num_experts)
        composer = Composer(kernels, model, expert_ways=ways, expert_width=width)
        return sum(
            min(composer.decode_step(x, -(-(1 << k) // x.dp), CONTEXT) for x in layouts)
            for k in range(responses.bit_length())
        )

    widths = [w for w in (1, 2, 4, 8) if inside % w == of.expert_dim % (w * UNITS) == 0]
    best = min(widths, key=seconds)
    return best if seconds(best) < (1 - LEAST_GAIN) * seconds(1) else 1
