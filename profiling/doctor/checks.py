"""Finds what a machine has, and checks its devices: collectives, kernels and a switch of layouts.

Results are compared with those of plain operations, and of a rollout without a switch.
"""

import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from platform import python_version

import jax
import jax.numpy as jnp
import numpy as np

from pat_jax.common.devices import Device, idle_accelerators
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.engine.warm_up.kernel_cases import parts_of
from pat_jax.engine.warm_up.kernel_check import check_kernels
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.layout import Layout
from pat_jax.layout.mesh import factored_mesh, padded_for
from pat_jax.models.config import ModelConfig
from pat_jax.models.kernels.kernel_choice import Kernels
from pat_jax.models.policy import Params, Policy
from pat_jax.models.presets import preset
from pat_jax.planning.memory import GIB
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.planner.scripts import FixedLayout, ScriptedPath, Step
from pat_jax.planning.types import MIGRATE_ALL, Load
from pat_jax.profiling.cross_compile.compile import versions_of
from pat_jax.profiling.doctor.report import Finding
from pat_jax.version import __version__

SIZES = (2**12, 2**24)  # bytes of a device: few for the latency, many for the bandwidth
RUNS = 3  # timed runs, of which the fastest counts
IN_A_ROW = 8  # all-reduces of one program: a single one would measure its launch


def all_reduce_seconds(layouts: Iterable[Layout], dtype: jnp.dtype) -> dict[tuple[int, int], float]:
    """Returns the seconds of one all-reduce, by the number of devices and the bytes of each."""
    return {
        (layout.split.tp, size): _time(layout, dtype, size)
        for layout in layouts
        if layout.tp_axes
        for size in SIZES
    }


def _time(layout: Layout, dtype: jnp.dtype, size: int) -> float:
    def several(x: jax.Array) -> jax.Array:
        for _ in range(IN_A_ROW):
            x = jax.lax.psum(x, layout.tp_axes) * 0.5
        return x

    spec = layout.spec()
    several = jax.jit(
        jax.shard_map(several, mesh=layout.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    ones = np.ones(size // jnp.dtype(dtype).itemsize, dtype)
    x = jax.block_until_ready(several(layout.put(ones)))
    fastest = float("inf")
    for _ in range(RUNS):
        start = time.perf_counter()
        x = jax.block_until_ready(several(x))
        fastest = min(fastest, time.perf_counter() - start)
    return fastest / IN_A_ROW


PACKAGES = ("jax", "jaxlib", "flax", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")
DRIVER = Path("/proc/driver/nvidia/version")


def devices_found(devices: Sequence[Device]) -> Finding:
    """Returns the number, kind and memory of devices, and whether accelerators are unused."""
    kinds = Counter(device.device_kind for device in devices)
    platform = devices[0].platform
    each = [memory_of(device) for device in devices]
    words = ", ".join(f"{n} x {kind}" for kind, n in kinds.items())
    figures = {
        "platform": platform,
        "kinds": dict(kinds),
        "memory_bytes": each,
        "cores": os.cpu_count(),
    }
    idle = idle_accelerators(platform)
    if idle:
        trouble = f"JAX runs on {platform}, and the device files of {', '.join(idle)} are there"
        return Finding(f"{words}: {trouble}", figures, trouble)
    return Finding(f"{words}, {_memory(each)}", figures)


def _memory(each: Sequence[int | None]) -> str:
    if None in each:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return f"which share the host's {whole / GIB:.1f} GiB"
    least, most = (limit(x for x in each if x is not None) / GIB for limit in (min, max))
    return f"{least:.1f} GiB each" if most - least < 0.1 else f"{least:.1f} to {most:.1f} GiB each"


def memory_of(device: Device) -> int | None:
    """Returns the bytes that XLA may take of a device, or None if it reports none, as on a CPU."""
    return (device.memory_stats() or {}).get("bytes_limit")


def versions_found(devices: Sequence[Device]) -> Finding:
    """Returns the versions of the packages, and of the runtime and driver under them."""
    found = {"python": python_version(), "pat_jax": __version__, **versions_of(PACKAGES)}
    client = " ".join(str(devices[0].client.platform_version).split())
    if devices[0].platform != "cpu":
        found["runtime"] = client
    if DRIVER.is_file():
        found["driver"] = DRIVER.read_text(encoding="utf-8").splitlines()[0]
    return Finding(", ".join(f"{name} {number}" for name, number in found.items()), found)


MODEL = "tiny"  # for the switch and the iteration of training
SEQUENCES = 8
PROMPT = 16
LONGEST = 96
LEAVE, COME_BACK = 6, 3  # unfinished sequences at which the layouts change
LEAST_EQUAL = 0.5  # share of the responses that ran during a switch: others may meet near-ties


def links_found(devices: Sequence[Device], dtype: jnp.dtype) -> Finding:
    """Measures all-reduces over the devices of each TP degree: of few bytes for the latency, of
    many for the bandwidth."""
    chain, _ = layout_chain(factored_mesh(devices), preset(MODEL))
    seconds = all_reduce_seconds(chain.values(), dtype)
    if not seconds:
        return Finding("one device sends nothing")
    figures = {f"{n} devices, {size} bytes": s for (n, size), s in seconds.items()}
    few, many = SIZES
    words = [
        f"{n} devices {1e6 * seconds[n, few]:.0f} µs and {many / seconds[n, many] / 1e9:.3g} GB/s"
        for n in sorted({n for n, _ in seconds})
    ]
    sizes = f"a sum of {few >> 10} KiB, of {many >> 20} MiB"
    return Finding(f"{sizes}: {', '.join(words)}", figures)


def kernels_found(
    devices: Sequence[Device], model: ModelConfig, page_size: int, dtype: jnp.dtype
) -> Finding:
    """Compares every kernel with plain operations, at the shapes of the least and the most TP."""
    model = padded_for(devices, model)
    chain, _ = layout_chain(factored_mesh(devices, model), model)
    device = devices[0]
    kernels = Kernels.of(devices[0].platform)
    found = check_kernels(device, parts_of(chain.values(), model, page_size, dtype), kernels)
    if not found:
        return Finding(f"none is written for {device.platform}: plain operations compute all")
    figures = {f"{x.name}, {x.part}": x.trouble or x.error for x in found}
    wrong = [x for x in found if x.trouble]
    if wrong:
        first = wrong[0]
        others = list(dict.fromkeys(x.name for x in wrong))[1:]
        trouble = f"kernel {first.name!r} ({first.part}) {first.trouble} on {device.device_kind}"
        return Finding(trouble + "".join(f"; {x!r} too" for x in others), figures, trouble)
    names = ", ".join(dict.fromkeys(x.name for x in found))
    worst = max(x.error for x in found)
    return Finding(f"right: {names}, at worst by a share of {worst:.1g}", figures)


def switch_found(devices: Sequence[Device]) -> Finding:
    """Switches from the least TP to the most and back during a rollout. Reports the second rollout,
    because the first warms up."""
    engine, params = _engine(devices)
    first, *_, last = [*engine.layouts] * 2
    if first == last:
        return Finding("one layout alone: there is nothing to switch to")
    start = time.perf_counter()
    engine.compile()
    compiling = time.perf_counter() - start
    there = ScriptedPath(first, (Step(last, LEAVE, MIGRATE_ALL), Step(first, COME_BACK)))
    stayed, _ = _run(engine, params, FixedLayout(first))
    _run(engine, params, there)
    switched, report = _run(engine, params, there)
    path = [(switch.source, switch.target) for switch in report.switches]
    times = [switch.seconds for switch in report.switches]
    equal = _equal(stayed, switched)
    figures = {
        "path": path,
        "seconds": times,
        "compile_seconds": compiling,
        "equal_responses": equal,
    }
    words = f"{first} to {last} and back in {' and '.join(f'{1e3 * s:.1f} ms' for s in times)}"
    if path != [(str(first), str(last)), (str(last), str(first))]:
        return Finding(f"{words}: went {path}", figures, "it went another way")
    if equal < LEAST_EQUAL:
        trouble = f"{equal:.0%} of the responses are what they are without a switch"
        return Finding(f"{words}, but {trouble}", figures, trouble)
    return Finding(f"{words}, {equal:.0%} of the responses as without", figures)


def _engine(devices: Sequence[Device]) -> tuple[RolloutEngine, Params]:
    """Returns an engine in the layouts with the least and the most TP, and random weights."""
    model, mesh = preset(MODEL), factored_mesh(devices)
    chain, _ = layout_chain(mesh, model)
    ends = list(dict.fromkeys((next(iter(chain)), list(chain)[-1])))
    config = RolloutConfig(
        max_prompt_length=PROMPT,
        max_completion_length=LONGEST,
        check_every=2,
        burst_steps=8,
        prefill_blocks=1,  # one program where more would be two
        min_rows=SEQUENCES,
        min_length=PROMPT + LONGEST,
    )
    policy = Policy.from_config(model)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: np.asarray(x) + rng.normal(0, 0.2, x.shape).astype(np.float32), policy.init(0)
    )
    layouts: dict = {split: chain[split] for split in ends}
    engine = RolloutEngine(
        policy, devices, config, capacity=SEQUENCES, eos_ids=(0,), layouts=layouts
    )
    return engine, params


def _requests() -> list[Request]:
    rng = np.random.default_rng(1)
    return [
        Request(
            tokens=tuple(rng.integers(3, 100, PROMPT).tolist()),
            key=sequence_key(0, i),
            max_new_tokens=LONGEST * (i + 1) // SEQUENCES,
            ignore_eos=True,
        )
        for i in range(SEQUENCES)
    ]


def _run(engine: RolloutEngine, params: Params, planner: Planner):
    none = np.zeros(0, int)
    layout: Layout = engine.layouts[planner.start(Load(none, none, none, none))]
    engine.set_weights(jax.device_put(params, layout.param_shardings(engine.policy)), layout)
    try:
        return engine.rollout(_requests(), planner)
    finally:
        engine.release_weights()


def _equal(stayed: Sequence[Completion], switched: Sequence[Completion]) -> float:
    """Returns the share of equal responses, among those that ran during a switch: the longest."""
    pairs = list(zip(stayed, switched, strict=True))[-LEAVE:]
    return sum(np.array_equal(a.tokens, b.tokens) for a, b in pairs) / len(pairs)
