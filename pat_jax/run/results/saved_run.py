"""Reads a run's folder: its metrics, samples and rollouts, and the policy that it learned.

Reads only files, so that the run may still be running. Holds no device and no weights.
"""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pat_jax.common.devices import configure
from pat_jax.common.errors import UserError, shown
from pat_jax.common.html.figure import Figure
from pat_jax.common.html.render import rendered
from pat_jax.common.hub import local_checkpoint
from pat_jax.common.json_text import of_json
from pat_jax.config.command_line import parse
from pat_jax.config.run import RunConfig
from pat_jax.config.sft import RewardModelConfig, SftConfig
from pat_jax.engine.record.plot import draw_rollout
from pat_jax.engine.record.trace import RolloutTrace
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.mesh import factored_mesh
from pat_jax.models.checkpoints.hf_export import check_export, export
from pat_jax.models.policy import Policy
from pat_jax.rl.data import arithmetic
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer
from pat_jax.run.checkpoints.json_state import read_kept
from pat_jax.run.files.folder import CONFIG_FILE, METRICS_FILE
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.logging.page.curves import draw_curves
from pat_jax.run.logging.progress import summarize
from pat_jax.run.logging.rollout_files import KeptRollout, read_rollouts
from pat_jax.run.logging.samples import Sample, read_samples
from pat_jax.run.roles.saved_policy import find_policy
from pat_jax.run.roles.weights import weights_of_run
from pat_jax.run.sft.inputs import padding_of, tokenizer_dir
from pat_jax.run.sft.setup import trained_shape
from pat_jax.run.start.setup import model_config
from pat_jax.training.build import DTYPES

# An option that the runs of one command alone have.
_OWN = {SftConfig: "completion_only_loss", RewardModelConfig: "center_rewards_coefficient"}
PAGE = Path(__file__).parents[1] / "logging" / "page"  # templates


class SavedRun:
    """The results that a run of `train`, `sft` or `reward_model` has left in a folder. Raises
    UserError if there is no run in `folder`."""

    def __init__(self, folder: str | Path):
        if not isinstance(folder, str | os.PathLike):
            raise UserError(
                f"run is {shown(folder)}: expected the folder of a run, as text or a path."
            )
        self.folder = Path(folder)
        if not os.path.isfile(self.folder / CONFIG_FILE):  # also False for impossible names
            raise UserError(f"{folder} has no {CONFIG_FILE}: expected the folder of a run.")

    @classmethod
    def of(cls, run: "SavedRun | str | Path") -> "SavedRun":
        """Returns a run that is given as itself or by its folder."""
        return run if isinstance(run, SavedRun) else cls(run)

    @property
    def config(self) -> Any:
        """The options of the run, of the class RunConfig, SftConfig or RewardModelConfig."""
        path = self.folder / CONFIG_FILE
        text = path.read_text(encoding="utf-8", errors="replace")
        kind = next((kind for kind, own in _OWN.items() if f"\n{own}:" in text), RunConfig)
        return parse(["--config", str(path)], kind)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A row of metrics for each step (docs/metrics.md). Step 0 is before the first update."""
        path = self.folder / METRICS_FILE
        return read_metrics(path) if path.is_file() else []

    @property
    def samples(self) -> "Samples":
        """Responses with their rewards, of the first step and of every 20th."""
        return Samples(sorted(read_samples(self.folder).items()))

    @property
    def rollout(self) -> RolloutTrace:
        """The trace of the last rollout. Raises UserError if the run has not ended yet."""
        path = self.folder / "rollout.json"
        if not path.is_file():
            raise UserError(f"{path} is not there: a run writes its last rollout when it ends.")
        return read_kept(path, "its last rollout", partial(of_json, RolloutTrace))

    def plot(self, *names: str) -> Figure:
        """Draws metrics over the steps: those named, or the most important ones. Raises UserError
        if the run has no such metric."""
        rows = self.metrics
        if missing := [name for name in names if not any(name in row for row in rows)]:
            raise UserError(
                f"{self.folder} has no metric {missing[0]!r}: expected names that are in `metrics`; "
                "docs/metrics.md explains them."
            )
        return draw_curves(rows, names)

    @property
    def rollouts(self) -> Mapping[str, KeptRollout]:
        """The traces of the `first`, `slowest` and `newest` rollout, as far as they are known."""
        return read_rollouts(self.folder)

    def plot_rollout(self, name: str | None = None) -> Figure:
        """Draws the running sequences of a rollout over time, its layouts and its switches.

        Args:
          name: a key of `rollouts`; None: the last rollout, once the run has ended.
        """
        if name is None:
            return draw_rollout(self.rollout)
        found = self.rollouts
        if name not in found:
            raise UserError(
                f"rollout is {shown(name)}: expected one of {', '.join(found) or 'none yet'} in {self.folder}."
            )
        return draw_rollout(found[name].trace)

    def export(self, directory: str | Path) -> Path:
        """Writes the policy of the newest checkpoint as a Hugging Face directory, adapters merged.
        Raises UserError if there is no undamaged checkpoint, or `directory` cannot be written."""
        if not isinstance(directory, str | os.PathLike) or "\0" in str(directory):
            raise UserError(f"directory is {shown(directory)}: expected a path to write to.")
        config = self.config
        saved = find_policy(str(self.folder), None)
        check_export(str(directory))
        devices = configure(config.devices)
        padding = None
        if isinstance(config, RunConfig):
            model = model_config(config.task, config.layout_choice, devices)
            source: Path | str = arithmetic.TOKENIZER_DIR
            if not config.data.is_arithmetic:
                source = local_checkpoint(config.model, weights=False)
        else:
            model = trained_shape(config, devices)
            source = tokenizer_dir(config.model, model)
            if model.head == "scalar":
                padding = padding_of(HuggingFaceTokenizer(source))
        saved.check(model)
        policy = Policy.from_config(model)
        chain, _ = layout_chain(factored_mesh(devices), model)
        *_, layout = chain.values()  # most TP: the least memory on each device
        dtype = DTYPES[config.compute_dtype]
        params = weights_of_run(config.model, saved, policy, layout, config.seed)(
            dtype, policy, layout
        )
        export(Path(directory), policy, params, dtype, tokenizer_dir=source, padding=padding)
        return Path(directory)

    def __repr__(self) -> str:
        return f"run in {self.folder}\n{summarize(self.metrics)}"


class Samples(dict[int, Sequence[Sample]]):
    """Samples by step; a notebook shows them as a table."""

    def __repr__(self) -> str:
        return "\n".join(
            f"step {step}: {x.prompt!r} -> {x.completion!r}, {x.facts}"
            for step, samples in self.items()
            for x in samples
        )

    def _repr_html_(self) -> str:
        return rendered(PAGE / "samples_table.html.jinja", by_step=self)
