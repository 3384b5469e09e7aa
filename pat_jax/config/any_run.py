"""What the options of every kind of run have in common: its model, its folder, what it keeps there."""

from dataclasses import Field
from typing import Any, ClassVar, Protocol

from pat_jax.common.hosts.options import DistributedConfig
from pat_jax.config.run import CheckpointConfig
from pat_jax.config.tracking import TrackingOptions


class AnyRun(TrackingOptions, Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def model(self) -> str: ...

    @property
    def run_dir(self) -> str: ...

    @property
    def seed(self) -> int: ...

    @property
    def resume(self) -> bool: ...

    @property
    def compute_dtype(self) -> str: ...

    @property
    def distributed(self) -> DistributedConfig: ...

    @property
    def checkpoint(self) -> CheckpointConfig: ...
