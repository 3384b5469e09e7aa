"""What a plan says of a run with several models: seconds, bytes, and where they wait."""

import json
from dataclasses import replace

import pytest
from planned_updates import alone, config_of, made, seen_on_page, updating

from pat_jax.commands import plan
from pat_jax.models.config import ModelConfig
from pat_jax.models.presets import PRESETS, preset
from pat_jax.profiling.capacity.page import plan_text
from pat_jax.profiling.capacity.report import PlanReport
from pat_jax.profiling.capacity.resting import settled, with_rest
from pat_jax.profiling.capacity.role_passes import RolePasses, role_memory
from pat_jax.profiling.cross_compile.target_build import TargetBuild
from pat_jax.training.trainer import REINFORCED

FOUR = "--algorithm.name ppo --beta 0.05 --critic.model tiny --reward model:tiny "
STAGES = (
    "scores of the reward model",
    "values of the critic",
    "critic, forward and backward",
    "critic, optimizer",
)


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of this name: four layers, a quarter of its weights are its head's, as those of qwen3-0.6b."""
    shape = replace(preset("qwen3-0.6b"), num_layers=4, vocab_size=20_480)
    monkeypatch.setitem(PRESETS, "shallow", shape)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def report() -> PlanReport:
    return made(FOUR)


def test_every_stage_of_four_models_is_told(report: PlanReport):
    update = report.update
    assert update is not None and tuple(name for name, _ in update.others) == STAGES
    assert update.scored == ("the policy before its first step", "the reference")
    assert all(seconds.total > 0 for _, seconds in update.others)
    own = update.scoring.total + update.gradients.total + update.apply.total
    assert update.update_s == pytest.approx(own + sum(x.total for _, x in update.others))
    for text in (plan_text(report), seen_on_page(report)):
        assert all(words in text for words in (*STAGES, "reward model", "critic"))
        assert "Models between their stages" in text and "times as fast" in text
        assert "models that wait on the devices (--roles.rest device)" in text
    content = json.loads(report.to_json())["resting"]
    assert [each["rest"] for each in content["iterations"]] == ["device", "host"]


def test_a_rollout_has_the_memory_of_the_models_that_wait_elsewhere(report: PlanReport):
    """In bytes of a device, by hand: the reward model and the reference in bfloat16, moments twice
    the parameters."""
    found = report.resting
    assert found is not None
    here, away = found.iterations
    roles = {role.name: role for role in found.roles}
    assert list(roles) == ["critic", "policy", "reference", "reward model"]
    policy, critic = roles["policy"], roles["critic"]
    assert policy.optimizer == pytest.approx(2 * policy.parameters, abs=64)
    assert critic.optimizer == pytest.approx(2 * critic.parameters, abs=64)
    assert critic.parameters == pytest.approx(2 * roles["reward model"].parameters, abs=64)
    assert roles["reference"].parameters == policy.parameters / 2
    saved = here.resident - away.resident
    frozen = roles["reference"].parameters + roles["reward model"].parameters
    assert saved == 2 * policy.parameters + 3 * critic.parameters + frozen
    # Moments and the critic go both ways, what does not change goes one way; the critic's parameters
    # also come for the values.
    assert policy.moved == 4 * policy.parameters and critic.moved == 7 * critic.parameters
    assert roles["reference"].moved == roles["reference"].parameters
    moved = sum(role.moved for role in found.roles)
    assert away.update_s - here.update_s == pytest.approx(moved / 64e9, rel=0.05)


@pytest.mark.usefixtures("shallow")
def test_a_model_with_a_scalar_head_computes_no_logits():
    """A pass of the policy's shape without its head: less of everything, and more than nothing."""
    update = alone(FOUR + "--mini_batch_size 8", model="shallow")
    larger = alone(f"{FOUR} --critic.model shallow --reward model:shallow", model="shallow")
    seconds = dict(larger.others)
    one = larger.scoring.total / len(larger.scored)
    for name in ("scores of the reward model", "values of the critic"):
        assert 0.3 * one < seconds[name].total < 0.9 * one
    assert dict(update.others)["values of the critic"].total < seconds["values of the critic"].total
    assert larger.gradients.total > seconds["critic, forward and backward"].total


def adapter_bytes(model: ModelConfig, rank: int, devices: int) -> float:
    """Of a device, in float32: adapters of all linear layers, and the scalar head. Gate and up have
    one factor a. What is as wide as the embedding is split, and nothing else."""
    of_heads, of_kv = (n * model.head_dim for n in (model.num_heads, model.num_kv_heads))
    of_layer = 6 * model.embed_dim / devices + 2 * of_heads + 2 * of_kv + 3 * model.mlp_dim
    return 4 * (model.num_layers * rank * of_layer + model.embed_dim)


@pytest.mark.parametrize(("more", "own"), [("", 1), (" --lora.rank 8", 0)])
def test_a_critic_of_adapters_has_a_base_of_its_own_or_the_policy_s(more: str, own: int):
    """In bytes of a device, by hand: the base in bfloat16, adapters, moments and gradients in
    float32."""
    asked = "--algorithm.name ppo --roles.rest device --critic.lora.rank 4" + more
    whole = updating(config_of("--algorithm.name ppo --roles.rest device"))
    updates = updating(config_of(asked))
    base = {x.name: x for x in role_memory(whole.built)}["critic"].parameters / 2
    roles = {x.name: x for x in role_memory(updates.built)}
    adapters = adapter_bytes(preset("tiny"), rank=4, devices=8)
    critic = roles["critic"]
    assert critic.parameters == pytest.approx(own * base + adapters, rel=0.02)
    assert critic.optimizer == pytest.approx(2 * adapters, rel=0.02)
    held = sum(x.parameters + x.optimizer for x in roles.values())
    assert updates.built.memory.resident == held
    # The same as the parts of the update's largest program have it.
    memory = alone(asked).memory
    parts = memory.parameters + memory.optimizer + memory.base + memory.others
    assert parts == held


@pytest.mark.usefixtures("shallow")
def test_a_critic_of_adapters_has_no_gradients_of_its_base():
    asked = "--algorithm.name ppo --critic.model shallow --mini_batch_size 8"
    whole, adapted = (
        dict(alone(asked + more, model="shallow").others) for more in ("", " --critic.lora.rank 8")
    )
    passes, step = "critic, forward and backward", "critic, optimizer"
    assert 0.6 < adapted[passes].total / whole[passes].total < 0.9
    assert adapted[step].total < 0.1 * whole[step].total
    assert adapted["values of the critic"].total >= whole["values of the critic"].total


@pytest.mark.parametrize("experts", ["gathered", "exchanged"])
def test_the_form_of_updates_with_experts_is_for_the_policy_and_not_for_models_without(experts):
    critic = "--algorithm.name ppo --beta 0.1 --critic.model tiny --reward model:tiny"
    names = [name for name, _ in alone(f"{critic} --experts {experts}", model="tiny-moe").others]
    assert names == list(STAGES)
    teacher = f"--algorithm.name distill --teacher.model tiny --experts {experts}"
    (one,) = alone(teacher, model="tiny-moe").others
    assert one[0] == "log-probabilities of the teacher"


def passes_of(role: str, built: TargetBuild) -> RolePasses:
    return RolePasses(built, built.whole.models[role].role, built.whole.readers[role].held)


def sent_by(role: str, options: str, model: str) -> list[str]:
    """What a role's forward pass sends, by arithmetic."""
    updates = updating(replace(config_of(options), model=model))
    passes = passes_of(role, updates.built)
    return [one.kind for one in passes.work.scores(passes.rows(passes.shapes[-1])).sent]


def test_a_frozen_model_with_experts_has_a_form_of_its_own():
    """--experts says how updates are computed; what is only read sends the least."""
    teacher = "--algorithm.name distill --teacher.model tiny-moe"
    wanted = sent_by("teacher", teacher, "tiny-moe")
    assert "ragged-all-to-all" not in wanted
    assert sent_by("teacher", f"{teacher} --experts exchanged", "tiny-moe") == wanted


def test_reward_models_are_in_their_own_data_type():
    """bfloat16 on accelerators, whatever the policy computes in."""
    sizes = []
    for dtype in ("bfloat16", "float32"):
        options = f"--reward model:tiny --compute_dtype {dtype}"
        updates = updating(config_of(options))
        passes = passes_of("reward model", updates.built)
        weights = {x.name: x for x in role_memory(updates.built)}["reward model"].parameters
        sizes.append((weights, passes.itemsize))
    assert sizes[0] == sizes[1] and sizes[0][1] == 2


def test_which_roles_there_are():
    assert alone("").others == () == alone("--beta 0.1").others
    names = [name for name, _ in alone("--reward model:tiny model:tiny").others]
    assert names == ["scores of the reward model 1", "scores of the reward model 2"]
    names = [name for name, _ in alone("--algorithm.name distill --teacher.model tiny").others]
    assert names == ["log-probabilities of the teacher"]
    names = [name for name, _ in alone("--algorithm.name ppo").others]
    assert names == list(STAGES[1:])  # the critic has the policy's shape


@pytest.mark.parametrize("top_k", [0, 8])
def test_a_teacher_s_likeliest_tokens_are_in_the_planned_programs(top_k: int):
    options = f"--algorithm.name distill --teacher.model tiny --teacher.top_k {top_k}"
    roles = plan.question_of(config_of(options), "").build.whole
    learned = roles.policy.updates[REINFORCED].loss.teacher_top_k
    assert (roles.readers["teacher"].top_k, learned) == (top_k, top_k)


def test_models_rest_where_the_kv_cache_lacks_room():
    """Room for all responses, for more with models away, and for no more."""
    question = plan.question_of(config_of(FOUR), "")
    order = question.build.order
    assert order.run.rest == "device"
    here, away = (
        question.build
        if rest == "device"
        else replace(question.build, order=with_rest(order, rest))
        for rest in ("device", "host")
    )
    held = here.memory.resident, away.memory.resident
    assert held[0] > held[1] and here.whole_sequences < away.whole_sequences
    asked = with_rest(order, "auto")  # pyright: ignore[reportArgumentType]
    for gib, expected in ((80.0, "device"), (0.006, "host")):
        rollout = replace(order.run.rollout, device_memory_gib=gib)
        tight = replace(asked, run=replace(asked.run, rollout=rollout))
        assert settled(tight).run.rest == expected


@pytest.mark.slow
def test_four_h100_gain_from_models_in_the_host_s_memory():
    """PPO of four 8B models, 2,048 responses of up to 16K tokens."""
    asked = "--model qwen3-8b --target h100:4 --responses 2048 --max_completion_length 16384 "
    asked += "--critic.model qwen3-8b --reward model:qwen3-8b"
    report = made(FOUR + asked)
    assert report.resting is not None and report.resting.chosen == "host"
    assert (report.resting.gain or 0) >= 1.3
