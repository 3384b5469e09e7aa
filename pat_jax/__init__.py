"""pat_jax: reinforcement learning of language models, with rollouts that change their layout.

    import pat_jax
    run = pat_jax.train("demo", steps=20)

Each command is a function:

    train         reinforcement learning: GRPO and its variants, PPO, distillation
    sft           supervised fine-tuning, DPO, training on text
    reward_model  trains a reward model on preference pairs
    generate      completes prompts; `session` keeps the engine for further ones
    evaluate      pass@k of a model, or the accuracy of a reward model
    plan          predicts a run on machines that you do not have
    profile       measures this machine for one model
    simulate      replays rollouts on a measured machine
    doctor        examines this machine
    compare       curves of several runs on one page, and the options that differ

`SavedRun` reads the folder of a run. Mistakes raise `UserError` with one sentence.

Each name is imported when it is first used: `import pat_jax` alone loads nothing and starts no
device.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pat_jax.version import __version__ as __version__

if TYPE_CHECKING:
    from pat_jax.common.errors import UserError
    from pat_jax.compare import compare
    from pat_jax.doctor import doctor
    from pat_jax.evaluate import evaluate
    from pat_jax.generate import generate, session
    from pat_jax.plan import plan
    from pat_jax.profile import profile
    from pat_jax.reward_model import reward_model
    from pat_jax.run.results.saved_run import SavedRun
    from pat_jax.sft import sft
    from pat_jax.simulate import simulate
    from pat_jax.train import train

__all__ = [
    "SavedRun",
    "UserError",
    "compare",
    "doctor",
    "evaluate",
    "generate",
    "plan",
    "profile",
    "reward_model",
    "session",
    "sft",
    "simulate",
    "train",
]

# The other names are modules that can be called.
_FROM = {"SavedRun": "run.results.saved_run", "UserError": "common.errors", "session": "generate"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pat_jax' has no attribute {name!r}")
    module = import_module(f"pat_jax.{_FROM.get(name, name)}")
    return getattr(module, name) if name in _FROM else module


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
