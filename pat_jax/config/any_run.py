"""The options that every kind of run has: its model, its folder, its adapters, its checkpoints."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

from pat_jax.common.options.declared import Options, option
from pat_jax.common.rules import GIVEN, Rule, count
from pat_jax.config.compute import Compute, MemoryOptions
from pat_jax.config.lora import LoraConfig
from pat_jax.config.optimizer import OptimizerConfig
from pat_jax.config.shared import OnDevices, UpdateOptions

TRACKERS = ("wandb", "trackio")
KNOWN_TRACKERS: Rule = (
    lambda names: set(names) <= set(TRACKERS) and len(set(names)) == len(names),
    f"{' or '.join(TRACKERS)}, each once (TensorBoard is always written)",
)


@dataclass(frozen=True)
class CheckpointConfig(Options):
    """Orbax checkpoints of everything a resumed run needs."""

    SECTION = "checkpoint."

    every: int = option(50, count(1, 10**9))
    """Iterations or fine-tuning steps between two checkpoints. The last is always saved."""
    max_to_keep: int = option(2, count(1, 10**9))
    """Number of newest checkpoints that are kept."""
    export_dir: str = ""
    """Write the final model to this folder as a Hugging Face checkpoint in --compute_dtype, or its
    adapters alone (--lora.export adapter). If it is empty, nothing is exported."""


@dataclass(frozen=True)
class AnyRun(UpdateOptions, OnDevices):
    """A run with a folder, which trains a model and can be resumed."""

    TRAINED: ClassVar[str] = "policy"  # name of the trained model, for the user
    LEARNING_RATE: ClassVar[float]  # the default if the whole policy is trained

    run_dir: str = ""
    """Folder of the run. If it is empty, the run makes runs/<date-time>."""
    trackers: tuple[str, ...] = option((), KNOWN_TRACKERS)
    """Trackers that get the metrics besides metrics.jsonl and TensorBoard: wandb, trackio or both.
    Both work offline: trackio by default, wandb with WANDB_MODE=offline."""
    tracker_project: str = option("pat_jax", GIVEN)
    """Name of the project in the trackers. A run is named there as its folder."""
    resume: bool = False
    """Continue the run in --run_dir from its last checkpoint. `auto` does so if there is one, and
    otherwise starts the run, so that one command serves every start."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self):
        super().__post_init__()
        words = "with --resume the folder of the run to continue"
        self.need("run_dir", not self.resume or self.run_dir != "", words)
        is_free = self.run_dir != self.model or self.run_dir == ""
        self.need("run_dir", is_free, "another name than --model's, which would mean this folder")
        self._check_lora()

    def _check_lora(self) -> None:
        """Raises OptionError if an option excludes adapters, or needs adapters that are off."""
        lora = self.lora
        self.need(
            "lora.rank",
            self.learns or not lora.rank or lora.adapter != "",
            "0 with --train false: new adapters that nothing trains change nothing",
        )
        self.need(
            "lora.export",
            lora.export == "merged" or self.checkpoint.export_dir != "",
            "with it a folder to write to, in --checkpoint.export_dir",
        )
        self.need(
            "optimizer.weight_dtype",
            not lora.is_on or self.optimizer.weight_dtype == "float32",
            "float32 with --lora.rank or --lora.adapter: adapters are small, and their base is not trained",
        )

    @property
    def learns(self) -> bool:
        """Whether anything is trained."""
        return True

    @property
    def default_learning_rate(self) -> float:
        """The default learning rate of a run that trains all parameters of the policy."""
        return self.LEARNING_RATE

    @property
    def optimizer_in_use(self) -> OptimizerConfig:
        """The optimizer's options, with the default learning rate if none is given. The default for
        adapters is ten times as large (https://thinkingmachines.ai/blog/lora/)."""
        if self.optimizer.learning_rate is not None:
            return self.optimizer
        rate = self.default_learning_rate
        rate = 10 * rate if self.lora.is_on else rate
        return replace(self.optimizer, learning_rate=rate)

    @property
    def trains_adapters(self) -> bool:
        """Whether only adapters are trained."""
        return self.lora.is_on

    @property
    def exported(self) -> str:
        """What is written to --checkpoint.export_dir, for the user."""
        if self.lora.export == "adapter":
            return f"the adapters of the {self.TRAINED}, in PEFT's format"
        return f"the {self.TRAINED} as a Hugging Face directory"

    @property
    def export_dirs(self) -> dict[str, str]:
        """The folder to which each trained role's model is written, by role; "" for no export."""
        return {"policy": self.checkpoint.export_dir}

    @property
    def micro_batch_option(self) -> str:
        """The option that sets the size of a micro-batch, with its value."""
        raise NotImplementedError

    @property
    def learned_from(self) -> str:
        """What an update learns from, in words."""
        raise NotImplementedError

    @property
    def compute(self) -> Compute:
        """How trained models are computed. Its dtype is a real one only once `auto` is settled."""
        return Compute(self.compute_dtype, self.remat, self.scan_layers, self.experts)

    @property
    def memory_options(self) -> MemoryOptions:
        return MemoryOptions(
            optimizer=self.optimizer,
            compute=self.compute,
            trains_adapters=self.trains_adapters,
            micro_batch=self.micro_batch_option,
            learned_from=self.learned_from,
        )
