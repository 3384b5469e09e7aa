"""One of several processes that generate together: every path over the layouts, as `tests/lossless.py`
has them, or with drafts, as `drafted.py` has it. The first one writes what was said.

    python tests/hosts/generating_worker.py --what kv8 --out FILE --distributed.coordinator …
"""

import pickle
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pat_jax.common.devices import configure
from pat_jax.common.hosts.join import join
from pat_jax.common.hosts.options import DistributedConfig
from pat_jax.common.hosts.together import process_group
from pat_jax.common.options.declared import Options
from pat_jax.common.run_command import run_command
from pat_jax.config.command_line import parse


@dataclass(frozen=True)
class Asked(Options):
    """What is generated."""

    what: str = "drafts"
    """drafts, or the name of a model."""
    out: str = ""
    """File for what was said."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


def over_all_paths(name: str) -> tuple[dict[Any, Any], int]:
    """What was said and how each switch was made, and how much was compiled after the warm-up."""
    from compilations import counted_compilations
    from fakes import MODEL_PATHS, SETTINGS, subject

    from pat_jax.engine.warm_up.warm_up import Warmup
    from tests.lossless import CARRIES, make_requests

    one, requests = subject(name), make_requests(SETTINGS[name], 0)
    one.engine.compile()
    Warmup(one.engine, runs=1).measure(one.weights)
    generated = {}
    with counted_compilations() as compiled:
        for path in [path for model, path in MODEL_PATHS if model == name][:4]:
            for carry in CARRIES:
                adaptive = one.adaptive(path, carry, len(requests))
                completions, report = one.run(requests, adaptive)
                generated[path, carry] = completions, [switch.kv for switch in report.switches]
    return generated, len(compiled)


def main() -> None:
    options = parse(sys.argv[1:], Asked, presets=None)
    join(options.distributed)
    configure(4 if options.what == "drafts" else 8)
    if options.what == "drafts":
        from drafted import rollouts

        found: object = rollouts()
    else:
        found = over_all_paths(options.what)
    if process_group().is_first:
        Path(options.out).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent)]
    run_command(main)
