"""One of several processes that generate together with drafts, as `drafted.py` has it. The first one writes
what was said.

    python tests/hosts/drafts_worker.py --out FILE --distributed.coordinator …
"""

import json
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
    """Where it goes."""

    out: str = ""
    """File for what was said."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


def main() -> None:
    options = parse(sys.argv[1:], Options, presets=None)
    join(options.distributed)
    configure(4)
    from drafted import rollouts

    found = rollouts()
    if company().is_first:
        Path(options.out).write_text(json.dumps(found))


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent)]
    run_command(main)
