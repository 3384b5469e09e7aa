"""A loss of the user's own: made from a file or sent by a program, tried out, refused by one sentence."""

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from runs import ROOT

from pat_jax.common.errors import UserError
from pat_jax.config.learning import AlgorithmConfig
from pat_jax.rl.algorithm.losses import Loss, Reduction
from pat_jax.rl.algorithm.policy_loss import PolicyLoss
from pat_jax.run.start import sent_code
from pat_jax.training import own_loss as of_options
from pat_jax.training.own_loss import own_loss

COLUMNS = ("advantages", "behavior_logprobs", "sampled_logprobs", "old_logprobs")
LOSSES = """
from dataclasses import dataclass, field
import jax.numpy as jnp
import numpy as np
from pat_jax.rl.algorithm.losses import Loss, Reduction, PREDICTED

@dataclass(frozen=True)
class Plain(Loss):
    scale: float = 2.0
    needs = ("advantages",)
    metrics = {"loss": Reduction.SUM}

    def values(self, predicted, columns, responses):
        return {"loss": -self.scale * columns["advantages"] * predicted["logprobs"]}

class Of(Plain):
    @classmethod
    def of(cls, algorithm):
        return cls(algorithm.epsilon)

@dataclass(frozen=True)
class Needy(Plain):
    needs = ("returns", "reference_logprobs", "wishes")

@dataclass(frozen=True)
class Critic(Plain):
    predicted = PREDICTED["scalar"]

@dataclass(frozen=True)
class TopTokens(Plain):
    teacher_top_k = 4

@dataclass(frozen=True)
class Entropy(Plain):
    coef: float = 0.01

    def values(self, predicted, columns, responses):
        return {"loss": predicted["logprobs"] - self.coef * predicted["entropy"]}

@dataclass(frozen=True)
class Unnamed(Plain):
    metrics = {"loss": Reduction.SUM, "more": Reduction.MEAN}

@dataclass(frozen=True)
class Shapeless(Plain):
    def values(self, predicted, columns, responses):
        return {"loss": predicted["logprobs"][:, :3]}

@dataclass(frozen=True)
class Holding(Plain):
    array: np.ndarray = field(default_factory=lambda: np.ones(3))

@dataclass(frozen=True)
class Asking(Loss):
    scale: float

class Abstract(Loss):
    pass

class Failing(Plain):
    @classmethod
    def of(cls, algorithm):
        return cls(algorithm.no_such_option)

instance = Plain(0.5)
nothing = None

def function(logprobs):
    return -logprobs
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("losses") / "jax.py"  # takes no library's place
    path.write_text(LOSSES)
    return path


def found(spec: str, top_k: int = 0, **options: Any) -> Loss:
    return own_loss(AlgorithmConfig(loss=spec, **options), COLUMNS, top_k)


def test_a_class_is_made_by_itself_or_from_the_options(file: Path):
    plain, instance = found(f"{file}:Plain"), found(f"{file}:instance")
    assert (vars(plain), vars(instance)) == ({"scale": 2.0}, {"scale": 0.5})
    assert vars(found(f"{file}:Of", epsilon=0.3)) == {"scale": 0.3}
    library = "pat_jax.rl.algorithm.policy_loss:PolicyLoss"
    assert found(library) == PolicyLoss()
    assert sys.modules["jax"].__file__ != str(file)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "path/to/file.py:Class or module:Class"),
        ("Missing", "there is no Missing"),
        ("nothing", "there is no nothing"),
        ("function", "function there is a function"),
        ("LOSSES", "there is no LOSSES"),
        (
            "Needy",
            "needs returns (with --algorithm.baseline critic), reference_logprobs (with --algorithm.beta",
        ),
        ("Critic", "what the policy predicts (logprobs, entropy), but Critic reads values"),
        ("TopTokens", "option --teacher.top_k is 0: expected 4"),
        ("Entropy", "`has_entropy_gradient` of Entropy to be True"),
        ("Unnamed", "Unnamed raised KeyError ('more') for two rows"),
        ("Shapeless", "Shapeless raised Type"),
        ("Holding", "Holding raised TypeError (unhashable type"),
        ("Asking", "Asking() raised TypeError"),
        ("Abstract", "Abstract() raised TypeError"),
        ("Failing", "Failing.of(algorithm) raised AttributeError"),
    ],
)
def test_what_is_no_loss_of_this_run_is_one_sentence(file: Path, name: str, words: str):
    with pytest.raises(UserError) as caught:
        found(f"{file}:{name}")
    sentence = str(caught.value)
    assert words in sentence and "\n" not in sentence and sentence.endswith(".")


def test_a_file_that_is_not_there_or_does_not_import(tmp_path: Path):
    (tmp_path / "broken.py").write_text("class (")
    for name, words in (("gone", "does not exist"), ("broken", "raised SyntaxError")):
        with pytest.raises(UserError, match=f"option --algorithm.loss is .*{words}"):
            found(f"{tmp_path}/{name}.py:Loss")


def test_an_option_that_only_the_replaced_loss_would_read_is_refused(file: Path):
    with pytest.raises(UserError, match=r"epsilon is 0\.3: expected 0\.2 .*Plain reads it"):
        found(f"{file}:Plain", epsilon=0.3)
    with pytest.raises(UserError, match="rollout_correction is 'token_mask': expected none"):
        found(f"{file}:instance", rollout_correction="token_mask")
    # What a name stands for is not asked for.
    found(f"{file}:Plain", name="dapo", epsilon_high=0.28)


@dataclass(frozen=True)
class Mine(Loss):
    power: int = 2

    @property
    def needs(self):
        return ("advantages",)

    @property
    def metrics(self):
        return {"loss": Reduction.SUM}

    def values(self, predicted, columns, responses):
        return {"loss": -columns["advantages"] * predicted["logprobs"] ** self.power}


def test_a_loss_that_a_program_sends_is_found_again(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(of_options, "LOSSES", tmp_path)
    spec = sent_code.send_loss(Mine(3), tmp_path)
    assert found(spec) == Mine(3)
    assert sent_code.send_loss(replace(Mine(), power=3), tmp_path) == spec
    assert found(sent_code.send_loss(Mine, tmp_path)) == Mine()
    monkeypatch.setattr(of_options, "LOSSES", tmp_path / "other")
    with pytest.raises(UserError, match=r"loss path/to/file\.py:NAME, or pat_jax\.train\(loss"):
        found(spec)


SENDS = """
import sys
from dataclasses import dataclass
from pathlib import Path
from pat_jax.rl.algorithm.policy_loss import PolicyLoss
from pat_jax.run.start.sent_code import send_loss

@dataclass(frozen=True)
class Mine(PolicyLoss):
    weights: tuple = (1.0, 0.5)

    def values(self, predicted, columns, responses):
        return super().values(predicted, columns, responses)

print(send_loss(Mine(epsilon=0.3), Path(sys.argv[1])))
"""


def test_processes_of_one_program_name_its_loss_alike(tmp_path: Path):
    """Though a class that is pickled by value has a random number in each."""
    names = set()
    for _ in range(2):
        command = [sys.executable, "-c", SENDS, str(tmp_path)]
        names.add(subprocess.run(command, cwd=ROOT, check=True, stdout=-1, text=True).stdout)
    assert len(names) == 1 and len(list(tmp_path.iterdir())) == 1
