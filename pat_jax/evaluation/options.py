"""The options of an evaluation, new or resumed, and a check that its folder can be used."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

from pat_jax.common.errors import UserError, shown
from pat_jax.evaluation.config import EvaluateConfig
from pat_jax.run.checkpoints.files import JOURNAL
from pat_jax.run.files.asked_again import ASKED, check_asked
from pat_jax.run.files.folder import (
    COMPLETE,
    CONFIG_FILE,
    differences,
    is_used,
    relative_rows,
)

RESULTS_FILE = "results.json"
# Options that may change when an evaluation is resumed: responses do not depend on them.
_FREE = (
    *("out", "resume", "batch", "layout", "profile", "devices", "num_completions_to_print"),
    *("pass_at", "reward", "reward_weights", "reward_timeout", "reward_workers"),
    *("reward_memory", "reward_model.max_length", "reward_model.tokens_per_micro_batch"),
    *("distributed.coordinator", "distributed.num_processes", "distributed.process_id"),
)


def options_of_evaluation(
    argv: Sequence[str], parse: Callable[..., EvaluateConfig]
) -> EvaluateConfig:
    """Returns the options that `argv` asks for, by `command_line.parse`. With --resume, options
    that are not given again are those of the evaluation in the folder. Raises UserError if options
    are wrong, or if the folder cannot be used."""
    resumed = parse(argv, only=("resume", "out"))
    if not resumed.resume:
        config = parse(argv)
        config.check_given()
        name = config.out or f"evaluations/{datetime.now():%Y%m%d-%H%M%S}"
        _check_new(name)
        return replace(config, out=name)
    begun = ["--config", str(_check_begun(Path(resumed.out)))]
    config = parse([*begun, *argv])
    before, now = (relative_rows(asdict(one)) for one in (parse(begun), config))
    for name, (old, new) in differences(before, now).items():
        if name not in _FREE:
            raise UserError(
                f"option --{name} is {shown(new)}: expected {shown(old)} with --resume, by which the "
                f"responses in {config.out!r} were drawn; leave it out, or choose another --out."
            )
    check_asked(config, parse(argv, only=ASKED), Path(config.out))
    return config


def _check_new(name: str) -> None:
    """Raises UserError if the folder has files already, which the results would overwrite."""
    folder = Path(name)
    if folder.exists() and (not folder.is_dir() or is_used(folder)):
        advice = "choose another"
        if (folder / JOURNAL).exists():
            advice = "go on with the evaluation in it with --resume, or choose another"
        raise UserError(f"option --out is {name!r}: expected a new or empty folder; {advice}.")


def _check_begun(folder: Path) -> Path:
    """Returns the file of an unfinished evaluation's options. Raises UserError if there is none."""
    option = f"option --out is {str(folder)!r}"
    path = folder / CONFIG_FILE
    if (folder / RESULTS_FILE).exists():
        raise UserError(
            f"{option}: expected an evaluation to go on with, but that one has its {RESULTS_FILE}; leave "
            "out --resume and choose another."
        )
    if not path.is_file() or not path.read_text("utf-8", "replace").endswith(COMPLETE):
        raise UserError(
            f"{option}: expected the folder of an evaluation to go on with, with {CONFIG_FILE}; check the "
            "path, or begin one without --resume."
        )
    return path
