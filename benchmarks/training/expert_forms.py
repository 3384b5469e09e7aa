"""Where BigMac's form falls behind: held-out nats per byte of `demo-bigmac` with one thing changed.

    python -m benchmarks.training.expert_forms --data corpus --form latent-128 --seed 0 --folder forms
    python -m benchmarks.training.expert_forms --folder forms --out forms.json

The first command trains one form with one seed on the Python files of a folder, byte by byte. Runs
of one seed see the same bytes in the same order. One file in a hundred is held out. The second
command collects what is in the folder.
"""

import argparse
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.report import machine, options, write
from pat_jax.common.devices import configure
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Params, Policy
from pat_jax.models.presets import preset
from pat_jax.rl.algorithm.optimizer import make_optimizer
from pat_jax.rl.text.tokenizer import NUM_BYTE_TOKENS

SHARED = ("descend", "ascend")  # the matrices that all experts of a layer share
END = b"\0"  # of a file
ROWS, LENGTH = 8, 256  # of a step
HELDOUT = 12  # steps' worth of held-out rows

Tree = Any


@dataclass(frozen=True)
class Form:
    """A model's shape, how its matrices start, and how fast the shared ones learn.

    Attributes:
      start: factors of the matrices' standard deviations, by name. With 1, sums over a matrix's
        inputs start at unit scale, and the last matrix's in proportion to the number of layers.
      is_orthonormal: the shared matrices start with orthogonal rows or columns, at the same scale.
      shared_rate: the shared matrices' learning rate, in units of the others'.
    """

    model: str = "demo-bigmac"
    experts: Mapping[str, int] = field(default_factory=dict)  # fields of ExpertsConfig
    start: Mapping[str, float] = field(default_factory=dict)
    is_orthonormal: bool = False
    shared_rate: float = 1.0


def _start(descend: float, experts: float, down: float, ascend: float) -> dict[str, float]:
    return {"descend": descend, "gate": experts, "up": experts, "down": down, "ascend": ascend}


AS_WIDE = {"latent_dim": 128, "expert_dim": 181}
AS_FINE_GRAINED = _start(2, 0.5, 0.5, 2)  # of the experts' matrices
FORMS: Mapping[str, Form] = {
    "fine-grained": Form("demo-moe"),
    "normal": Form(),
    "latent-64": Form(experts={"latent_dim": 64, "expert_dim": 371}),
    "latent-128": Form(experts=AS_WIDE),
    "latent-128-slow": Form(experts=AS_WIDE, is_orthonormal=True, shared_rate=0.1),
    "slow": Form(is_orthonormal=True, shared_rate=0.1),
    "small-inside": Form(start=_start(2, 0.5, 2, 0.5)),
    "large-output": Form(start={"ascend": 2}),
    "orthonormal": Form(is_orthonormal=True),
    "as-fine-grained": Form(start=AS_FINE_GRAINED),
    "as-fine-grained-orthonormal": Form(
        start=AS_FINE_GRAINED, is_orthonormal=True
    ),  # `demo-bigmac`
}


def shape(form: Form) -> ModelConfig:
    small = preset(form.model, vocab_size=NUM_BYTE_TOKENS)
    assert small.experts is not None
    return replace(small, experts=replace(small.experts, **form.experts))


def deviations(config: ModelConfig) -> dict[str, float]:
    """The standard deviations of a layer's matrices that `Form.start` multiplies."""
    assert config.experts is not None
    latent, dim, layers = config.experts.latent_dim, config.experts.expert_dim, config.num_layers
    inside = latent**-0.5
    of_shared = {"descend": config.embed_dim**-0.5, "ascend": (latent * 2 * layers) ** -0.5}
    return of_shared | {"gate": inside, "up": inside, "down": dim**-0.5}


def name_of(path: tuple) -> str:
    """The name of a matrix of an experts' layer, or nothing."""
    words = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    return next((x for x in words if x in (*SHARED, "gate", "up", "down")), "")


def begun(form: Form, policy: Policy, seed: int) -> Params:
    """Random parameters as the form starts from them."""
    params = policy.init(seed)
    if form.model == "demo-moe":
        return params
    wide, leaves = deviations(policy.config), jax.tree_util.tree_leaves_with_path(params)

    def one(nth: int, path: tuple, x: jax.Array) -> jax.Array:
        if not (name := name_of(path)):
            return x
        normal = jax.nn.initializers.normal(wide[name])
        x = normal(jax.random.fold_in(jax.random.key(seed), nth), x.shape, x.dtype)
        x = x * form.start.get(name, 1.0)
        return orthonormal(x) if form.is_orthonormal and name in SHARED else x

    made = [one(nth, path, x) for nth, (path, x) in enumerate(leaves)]
    return jax.tree.unflatten(jax.tree.structure(params), made)


def orthonormal(x: jax.Array) -> jax.Array:
    """An orthogonal basis of a matrix's rows, or columns if these are fewer, as large as it."""
    random, is_tall = np.asarray(x, np.float64), x.shape[0] >= x.shape[1]
    basis = np.linalg.qr(random if is_tall else random.T)[0]
    basis *= np.linalg.norm(random) / np.linalg.norm(basis)
    return jnp.asarray(basis if is_tall else basis.T, x.dtype)


def optimizer(form: Form, learning_rate: float, steps: int) -> optax.GradientTransformation:
    """AdamW with a warm-up over a twentieth of the steps, then a cosine."""
    rates = {"total_steps": steps, "warmup_steps": steps // 20, "schedule": "cosine"}

    def slowed(updates: Tree, _: Tree) -> Tree:
        rate = lambda path: form.shared_rate if name_of(path) in SHARED else 1.0  # noqa: E731
        return jax.tree_util.tree_map_with_path(lambda path, x: rate(path) * x, updates)

    adamw = make_optimizer(learning_rate=learning_rate, **rates)
    return optax.chain(adamw, optax.stateless(slowed))


def loss(policy: Policy) -> Callable[[Params, jax.Array], jax.Array]:
    """The mean cross-entropy of each byte after the first of each row, in nats."""
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (ROWS, LENGTH))

    def of(params: Params, tokens: jax.Array) -> jax.Array:
        model = policy.bind(params)
        logits = model.logits(model(tokens, positions).hidden)[:, :-1, :NUM_BYTE_TOKENS]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return of


def corpus(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of the Python files of a folder: to learn from, and held out."""
    parts: tuple[list[bytes], list[bytes]] = [], []
    for path in sorted(folder.rglob("*.py")):
        digest = hashlib.sha256(str(path.relative_to(folder)).encode()).hexdigest()
        parts[int(digest, 16) % 100 == 0].append(path.read_bytes() + END)
    learned, heldout = (np.frombuffer(b"".join(each), np.uint8) for each in parts)
    return learned, heldout


def drawn(text: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    starts = rng.integers(0, len(text) - LENGTH, ROWS)
    return np.stack([text[i : i + LENGTH] for i in starts]).astype(np.int32)


def train(args: argparse.Namespace) -> None:
    """One form with one seed; writes its curve into the folder."""
    form, about = FORMS[args.form], machine(configure(1))
    learned, heldout = corpus(args.data)
    policy = Policy.from_config(shape(form))
    params = begun(form, policy, args.seed)
    in_a_step = ROWS * (LENGTH - 1)
    steps = math.ceil(args.bytes / in_a_step)
    rule, nll = optimizer(form, args.learning_rate, steps), loss(policy)

    @jax.jit
    def update(params: Params, state: Tree, tokens: np.ndarray) -> tuple[Any, Tree]:
        updates, state = rule.update(jax.grad(nll)(params, tokens), state, params)
        return optax.apply_updates(params, updates), state

    draws, evaluate, state = np.random.default_rng(7), jax.jit(nll), rule.init(params)
    rows = [drawn(heldout, draws) for _ in range(HELDOUT)]
    draws, curve = np.random.default_rng(1000 + args.seed), {}
    for step in range(1, steps + 1):
        params, state = update(params, state, drawn(learned, draws))
        if step % (steps // 3) == 0 or step == steps:
            curve[step * in_a_step] = float(np.mean([evaluate(params, x) for x in rows]))
    sizes = [math.prod(x.shape) for x in jax.tree.leaves(policy.abstract_params)]
    write(
        args.folder / f"{args.form}-{args.learning_rate}-{args.seed}.json",
        {
            "form": args.form,
            "seed": args.seed,
            "learning_rate": args.learning_rate,
            "parameters": sum(sizes),
            "nats_per_byte": curve,
            "machine": about,
        },
    )


def collect(args: argparse.Namespace) -> None:
    runs = [json.loads(path.read_text()) for path in sorted(args.folder.glob("*.json"))]
    last: dict[str, list[float]] = {}
    for one in runs:
        key = f"{one['form']}, learning rate {one['learning_rate']}"
        last.setdefault(key, []).append([*one["nats_per_byte"].values()][-1])
    found = {
        key: {"mean": float(np.mean(x)), "range": [min(x), max(x)], "seeds": len(x)}
        for key, x in last.items()
    }
    for key, one in found.items():
        print(f"{key}: {one['mean']:.3f} ({one['seeds']} seeds)")
    write(args.out, {"nats_per_byte": found, "runs": runs})


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of runs and their curves")
    parser.add_argument("--form", choices=FORMS, help="to train; without one runs are collected")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="folder of Python files to train on")
    parser.add_argument("--bytes", type=float, default=1e6, help="to learn from")
    parser.add_argument("--learning_rate", type=float, default=4e-3)
    args = parser.parse_args()
    if args.form is None:
        collect(args)
    elif args.data is None:
        parser.error("--form needs --data")
    else:
        train(args)


if __name__ == "__main__":
    main()
