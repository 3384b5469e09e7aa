"""The options of all commands that only generate, and their translation to options of a run."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from pat_jax.common.options.declared import option
from pat_jax.common.rules import RESPONSES
from pat_jax.config.data import DataConfig
from pat_jax.config.rollout import AskedRollout, RolloutConfig
from pat_jax.config.run import RunConfig
from pat_jax.config.shared import OnDevices, Planned

SHORTEST_CACHE = 256  # tokens of the smallest length bucket; fewer buckets compile sooner


@dataclass(frozen=True)
class Generating(Planned, OnDevices):
    """A policy that is not trained, and the engine that samples from it."""

    adapter: str = ""
    """A PEFT adapter directory, or an adapter of the Hugging Face Hub (owner/name). It is merged
    into the weights of --model."""
    batch: int = option(32, RESPONSES)
    """Number of sequences generated at once, rounded up to a multiple of the number of devices."""
    weights: Literal["auto", "int8", "fp8"] = "auto"
    """auto keeps the weights in --compute_dtype. int8 and fp8 (e4m3) quantize the weights of linear
    layers, with a scale for each output. They take a half or a quarter of the memory, and change
    the model a little."""

    def model_of(self, data: DataConfig, run_dir: str = "") -> RunConfig:
        """Returns the options of a run that describe the model."""
        return RunConfig(
            model=self.model,
            run_dir=run_dir,
            layout=self.layout,
            train=False,
            data=data,
            seed=self.seed,
            compute_dtype=self.compute_dtype,
        )

    def engine_of(
        self, run: RunConfig, num_devices: int, rows: int, lengths: tuple[int, int], **sampling: Any
    ) -> RunConfig:
        """Returns `run` with the engine's options set: room for at least `rows` sequences at once,
        and for `lengths`, the tokens of the longest prompt and response. `sampling` has further
        options of `AskedRollout`."""
        prompt, response = lengths
        page = RolloutConfig.page_size
        rows = math.ceil(rows / num_devices) * num_devices
        rollout = AskedRollout(
            prompts_per_step=rows,
            num_generations=1,
            max_prompt_length=prompt,
            max_completion_length=response,
            weights=self.weights,
            min_length=math.ceil(min(SHORTEST_CACHE, prompt + response) / page) * page,
            **sampling,
        )
        return replace(
            run,
            profile=self.profile,
            speculation=self.speculation,
            rollout=rollout,
        )
