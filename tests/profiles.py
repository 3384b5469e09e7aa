"""Profiles of a made-up machine of eight devices, as files."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fakes import SPLITS, made_up_latency

from pat_jax.models.presets import preset
from pat_jax.planning.latency.profile import Profile, Subject


def save_profile(path: Path, verify: Mapping[int, float] | None = None, **changes: Any) -> Path:
    """
    Args:
      verify: of each number of draft tokens, how many plain steps one that verifies them takes.
      changes: of the latency model.
    """
    latency = made_up_latency(
        dict(zip(SPLITS, (0.5, 0.4, 0.3, 0.25), strict=True)),
        dict.fromkeys(SPLITS, 0.05),
        reshard=0.2,
        migrate_per_token=1e-4,
        max_rows=8,
        lengths=(64, 128, 256),
    )
    table = {
        (*key, budget): factor * seconds
        for budget, factor in (verify or {}).items()
        for key, seconds in latency.decode_table.items()
    }
    latency = replace(latency, verify_table=table, **changes)
    subject = Subject("gpu", "made up", 8, asdict(preset("tiny")), "bfloat16", "0")
    Profile(subject, latency).save(path)
    return path
