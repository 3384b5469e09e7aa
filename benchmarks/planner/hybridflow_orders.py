"""Which placement of PPO wins on A100s, in the setting of HybridFlow (Sheng et al., EuroSys 2025).

    python -m benchmarks.planner.hybridflow_orders --out benchmarks/results/hybridflow_orders.json

Their setting: hosts of eight A100-80G with 200 Gb/s, four models of one size, 1,024 prompts of 1,024
tokens, responses of 1,024 tokens each, one epoch of eight updates. Their result (figures 12 and 13):
colocating wins on 16 to 64 devices; splitting actor and reference from critic and reward wins on 96 for
13B and on 96 and 128 for 34B; standalone models win on 128 for 13B. The same is priced with the 1,600
Gb/s of the maker's hosts.

All seconds here are computed: nothing ran. Their trainer uses Megatron's tensor and pipeline parallelism.
This one divides parameters over all devices (FSDP), or over one, two or four hosts of which others have
copies (HSDP, `--fsdp_size`).
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import cast

from benchmarks.report import options, write
from pat_jax.commands.plan import question_of
from pat_jax.common.errors import UserError
from pat_jax.config.command_line import parse
from pat_jax.models.config import ModelConfig
from pat_jax.models.presets import PRESETS, preset
from pat_jax.planning.placement import PlacedRole, Placement, Positions
from pat_jax.profiling.capacity.placing import Placing
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.placement.candidates import Candidate
from pat_jax.profiling.placement.schedule import scheduled
from pat_jax.profiling.predict.targets import Target

HOST, TOKENS = 8, 1024
OURS = "split, rollouts on all"
THEIR_NETWORK = 200  # Gb/s of a host
NETWORKS = (THEIR_NETWORK, 1600)
SIZES = (0, HOST, 2 * HOST, 4 * HOST)  # `--fsdp_size`
MICRO_BATCH = 8192  # tokens of a device
DEVICES = (16, 32, 64, 128)
SHAPES = {  # Llama's: width, MLP, layers, heads, KV heads
    "13B": (5120, 13_824, 40, 40, 40),
    "34B": (8192, 22_016, 48, 64, 8),
}
THEIRS = {
    "13B": {16: "colocate", 32: "colocate", 64: "colocate", 128: "standalone"},
    "34B": {16: "colocate", 32: "colocate", 64: "colocate", 128: "split"},
}


def shape(name: str) -> ModelConfig:
    embed, mlp, layers, heads, kv_heads = SHAPES[name]
    return replace(
        preset("llama-3.1-8b"),
        vocab_size=32_000,
        embed_dim=embed,
        mlp_dim=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        rope_scaling=None,
        max_position=4096,
    )


def placing(model: str, target: str, files: tuple[Path, Path], fsdp_size: int) -> Placing:
    data, lengths = files
    asked = f"""
        --model {model} --target {target} --responses 1024 --num_generations 1
        --max_prompt_length {TOKENS} --prompt_tokens {TOKENS} --max_completion_length {TOKENS}
        --lengths {lengths} --mini_batch_size 128 --algorithm.name ppo --beta 0.05
        --critic.model {model} --reward model:{model} --speculation.source none --compile false
        --rollouts 1 --placement auto --data {data} --fsdp_size {fsdp_size}
        --sums one-shot --tokens_per_micro_batch {MICRO_BATCH * Target.parse(target).num_devices}
    """
    found = question_of(parse(asked.split(), PlanConfig, prog="plan", presets=None), "")
    # All devices are one group: HybridFlow gives models whole hosts.
    return Placing(found, cuts=1)


def candidates(count: int) -> Iterator[tuple[str, Candidate]]:
    """Yields HybridFlow's three placements by their names there, and `--placement split`, whose rollouts
    have all devices. Reference and reward model share a quarter of the devices in `standalone`, where they
    have an eighth each there."""
    every = tuple(range(count))
    half = count // 2
    first, second = every[:half], every[half:]
    third, fourth = every[half : half + half // 2], every[half + half // 2 :]

    def placed(reference: Positions, critic: Positions, reward: Positions) -> Candidate:
        places: dict[PlacedRole, Positions] = {"rollout": first, "policy": first, "teacher": first}
        places |= {"reference": reference, "critic": critic, "reward": reward}
        return Candidate(Placement(places))

    yield "colocate", Candidate(Placement.named("flatten", count))
    yield "split", placed(reference=first, critic=second, reward=second)
    yield OURS, Candidate(Placement.named("split", count))
    if count >= 4 * HOST:
        yield "standalone", placed(critic=third, reference=fourth, reward=fourth)


def seconds(asked: Placing, count: int) -> dict[str, float | str]:
    """Seconds of an iteration, or why a placement has no room, by placement."""
    found: dict[str, float | str] = {}
    for name, one in candidates(count):
        iterations = asked.iterations(one)
        has_room = not isinstance(iterations, str)
        found[name] = fmean(scheduled(x).seconds for x in iterations) if has_room else iterations
    return found


def setting(name: str, count: int, network: int, files: tuple[Path, Path]) -> dict[str, object]:
    """Seconds of each placement with each `--fsdp_size`, and the fastest one.

    Args:
      files: the folder of kernel tables, and the response lengths.
    """
    by_size: dict[str, dict[str, float | str]] = {}
    for size in SIZES[: (count // HOST).bit_length()]:
        try:
            asked = placing(name, f"a100:{HOST}x{count // HOST}@{network}", files, size)
            by_size[str(size)] = seconds(asked, count)
        except UserError as error:  # the whole target has no room
            by_size[str(size)] = {"colocate": str(error)}
    every = [each for found in by_size.values() for each in found.items()]
    known = [(s, one) for one, s in every if not isinstance(s, str)]
    theirs = [(s, one) for s, one in known if one != OURS]
    return {
        "model": name,
        "devices": count,
        "network_gb_s": network,
        "seconds_by_fsdp_size": by_size,
        "wins": min(theirs)[1] if theirs else "",
        "fastest": min(known)[1] if known else "",
        "theirs": THEIRS[name][count] if network == THEIR_NETWORK else "",
    }


def main() -> None:
    parser = options(__doc__, has_data=True)
    parser.add_argument("--models", nargs="+", choices=[*SHAPES], default=[*SHAPES])
    args = parser.parse_args()
    rows = []
    with TemporaryDirectory() as folder:
        (lengths := Path(folder) / "lengths.json").write_text(json.dumps([TOKENS] * 64))
        for name in args.models:
            cast("dict[str, ModelConfig]", PRESETS)[name] = shape(name)
            for network, count in product(NETWORKS, DEVICES):
                rows.append(setting(name, count, network, (args.data, lengths)))
                print(rows[-1], flush=True)
    compared = [row for row in rows if row["theirs"]]
    agree = sum(row["wins"] == row["theirs"] for row in compared)
    write(args.out, {"what": __doc__, "agree": f"{agree} of {len(compared)}", "settings": rows})


if __name__ == "__main__":
    main()
