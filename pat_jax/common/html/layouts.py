"""A chart of the layouts that rollouts were in, over the steps of a run."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pat_jax.common.html.charts import Axis
from pat_jax.common.picture_style import layout_colour

MOST_COLUMNS = 400  # of a ribbon; of more steps several share one
_LAYOUT = re.compile(r"dp[1-9]\d{0,5}tp[1-9]\d{0,5}")

Path = tuple[str, ...]  # of layouts, one after the other


def read_path(text: object) -> Path:
    """Of a text such as `dp2tp1 -> dp1tp2`; of what is none nothing."""
    names = text.split(" -> ") if isinstance(text, str) else []
    return tuple(names) if all(map(_LAYOUT.fullmatch, names)) else ()


@dataclass(frozen=True)
class Ribbon:
    """Over the steps, the layouts that the rollout of each was in."""

    paths: Sequence[tuple[int, Path]]  # of steps, which count from 1
    across: Axis

    @property
    def columns(self) -> list[tuple[int, int, Path]]:
        """Where each begins and ends; of very many steps the path of most."""
        each = max(1, -(-len(self.paths) // MOST_COLUMNS))
        parts = [self.paths[i : i + each] for i in range(0, len(self.paths), each)]
        most = [Counter(path for _, path in part).most_common(1)[0][0] for part in parts]
        return [(part[0][0] - 1, part[-1][0], path) for part, path in zip(parts, most, strict=True)]

    @property
    def colours(self) -> dict[str, str]:
        return {name: layout_colour(name) for _, path in self.paths for name in path}
