"""The table from the axis names of models to the mesh axes of a layout, by role.

Knows names alone: each layout has its own mesh axes under these names (`layout.py`).
"""

from collections.abc import Mapping
from typing import Literal

Role = Literal["rollout", "train"]
# Fields and properties of a `Layout`.
MeshAxes = Literal[
    "dp_axes",
    "tp_axes",
    "kv_axes",
    "query_axes",
    "fsdp_axes",
    "group_axes",
    "ep_axes",
    "ep_width_axes",
    "ep_fsdp_axes",
]

_ROLLOUT: Mapping[str, MeshAxes | None] = {
    "batch": "dp_axes",
    "pages": "dp_axes",
    "vocab": "tp_axes",
    "mlp": "tp_axes",
    "expert": "ep_axes",  # the same in every layout, so that no switch moves an expert
    "expert_dim": "ep_width_axes",
    "kv_heads": "kv_axes",
    "queries_per_kv": "query_axes",
    "embed": None,  # not split
}
RULES: Mapping[Role, Mapping[str, MeshAxes | None]] = {
    "rollout": _ROLLOUT,
    "train": {
        **_ROLLOUT,
        "embed": "fsdp_axes",
        "expert_dim": "ep_fsdp_axes",
        "group": "group_axes",
        "row_of_group": "fsdp_axes",
    },
}
