"""One of several processes that load a checkpoint together, each the experts of its devices, and
export it again.

    python tests/hosts/loading_worker.py --source DIR --out DIR --distributed.coordinator …
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pat_jax.common.devices import configure
from pat_jax.common.hosts.join import join
from pat_jax.common.hosts.options import DistributedConfig
from pat_jax.common.hosts.together import process_group
from pat_jax.common.options.declared import Options
from pat_jax.common.run_command import run_command
from pat_jax.config.command_line import parse
from pat_jax.models.checkpoints.hf_export import attend, export
from pat_jax.models.checkpoints.hf_files import WEIGHTS_FILE
from pat_jax.models.checkpoints.hf_load import check_checkpoint, load_params
from pat_jax.models.checkpoints.safetensors_file import StoredTensor, read_header
from pat_jax.models.policy import Policy


@dataclass(frozen=True)
class Asked(Options):
    """What is loaded, and where it goes."""

    source: str = ""
    """The checkpoint, of one file."""
    out: str = ""
    """Of the export; beside it each process writes which tensors it has opened."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


def main() -> None:
    options = parse(sys.argv[1:], Asked, presets=None)
    join(options.distributed)
    configure(4)
    source, out, index = Path(options.source), Path(options.out), process_group().index
    policy = Policy.from_config(check_checkpoint(source))
    names = {x.offset: name for name, x in read_header(source / WEIGHTS_FILE).items()}
    view, opened = StoredTensor.view, set[str]()

    def noted(self: StoredTensor) -> np.ndarray:
        opened.add(names[self.offset])
        return view(self)

    StoredTensor.view = noted
    mesh = jax.make_mesh((4,), ("all",), axis_types=(AxisType.Auto,))
    shardings = jax.tree.map(
        lambda axes: NamedSharding(
            mesh, PartitionSpec(*("all" if x == "expert" else None for x in axes))
        ),
        policy.param_axes,
        is_leaf=lambda node: isinstance(node, tuple),
    )
    params = load_params(source, policy, shardings, jnp.float32)
    out.with_name(f"opened-{index}.json").write_text(json.dumps(sorted(opened)))
    if index == 0:
        export(out, policy, params, jnp.float32)
    else:
        attend(policy, params, jnp.float32)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent)]
    run_command(main)
