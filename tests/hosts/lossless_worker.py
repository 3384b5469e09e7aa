"""One of several processes that generate together: every path over the layouts, as `tests/lossless.py`
has them. The first one writes what was said.

    python tests/hosts/lossless_worker.py --name kv8 --out FILE --distributed.coordinator …
"""

import pickle
import sys
from dataclasses import dataclass, field
from pathlib import Path

from pat_jax.common.devices import configure
from pat_jax.common.hosts.join import join
from pat_jax.common.hosts.options import DistributedConfig
from pat_jax.common.hosts.together import company
from pat_jax.common.run_command import run_command
from pat_jax.config.command_line import parse


@dataclass(frozen=True)
class Options:
    """What is generated."""

    name: str = "kv8"
    """Of the model."""
    out: str = ""
    """File for what was said."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


def main() -> None:
    options = parse(sys.argv[1:], Options, presets=None)
    join(options.distributed)
    configure(8)
    from compilations import counted_compilations
    from fakes import MODEL_PATHS, SETTINGS, subject

    from pat_jax.engine.warm_up.warm_up import Warmup
    from tests.lossless import CARRIES, make_requests

    one, requests = subject(options.name), make_requests(SETTINGS[options.name], 0)
    one.engine.compile()
    Warmup(one.engine, runs=1).measure(one.weights)
    said = {}
    with counted_compilations() as compiled:
        for path in [path for name, path in MODEL_PATHS if name == options.name][:4]:
            for carry in CARRIES:
                adaptive = one.adaptive(path, carry, len(requests))
                completions, report = one.run(requests, adaptive)
                ways = [switch.kv for switch in report.switches]
                said[path, carry] = completions, ways
    if company().is_first:
        Path(options.out).write_bytes(pickle.dumps((said, len(compiled))))


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent)]
    run_command(main)
