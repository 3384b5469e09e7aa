"""Whether a command that people are told to type is one that runs as it stands."""

import re
from collections.abc import Sequence
from pathlib import Path

from config_classes import CLASSES
from runs import ROOT

from pat_jax.config.command_line import PRESETS, parse
from pat_jax.models.presets import PRESETS as SHAPES

FILES = re.compile(r".+\.(jsonl?|parquet|csv|yaml)")
WRITTEN = ("--out", "--run_dir", "--checkpoint.export_dir", "--profile")  # by a command
OF_THE_HUB = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+(/[\w.-]+)?)?")


def check_stands(command: str, words: Sequence[str]) -> None:
    """It parses, what it reads ships with it or is on the Hub, and nothing is left to be filled in."""
    presets = PRESETS if command in ("train", "profile") else None
    config = parse(words, CLASSES[command], presets=presets)
    judge = getattr(config, "reward_model", None)
    model = getattr(config, "model", "") or getattr(judge, "model", "")
    assert model in SHAPES or OF_THE_HUB.fullmatch(model) or command in ("simulate", "compare")
    for before, word in zip(["", *words], words, strict=False):
        if before not in WRITTEN and FILES.fullmatch(word):
            assert (ROOT / word).is_file() and Path(word).parts[0] == "examples", word
        assert not re.fullmatch(r"[A-Z]{1,12}", word), f"{word} is a placeholder"
    if command in ("train", "sft", "reward_model", "evaluate"):
        for name in config.data.files:
            is_here = name == "arithmetic" or any(ROOT.glob(name))
            assert is_here or OF_THE_HUB.fullmatch(name), name
