"""A run that compiles its layouts as it goes: what is compiled when, on which thread, to what end."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import counted_compilations
from made_up_clock import DP2, TP2, MadeUpClock
from runs import TINY, presets_of_one_layer
from trainers import compile_named

from pat_jax.config.command_line import parse
from pat_jax.config.run import RunConfig
from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.layout.layout import Layout
from pat_jax.models.policy import Params
from pat_jax.planning.latency.profile import Profile
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner, Planner
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.programs.programs import THREAD_NAME
from pat_jax.run.generation import full_load
from pat_jax.run.setup import Setup, build
from pat_jax.run.start.lazy_layouts import LazyLayouts, first_layouts
from tests.near_ties import Judge, Tally, compare

pytestmark = pytest.mark.timeout(600)
OPTIONS = [*TINY, "--rollout.compile", "lazy", "--profile", "none", "--run_dir", "unused"]


@pytest.fixture(autouse=True, scope="module")
def one_layer() -> Iterator[None]:
    with presets_of_one_layer("tiny"):
        yield


def make_requests(config: RunConfig) -> list[Request]:
    """Eight responses of forced lengths, the longest three times the median."""
    rng = np.random.default_rng(0)
    longest = config.rollout.max_completion_length
    return [
        Request(
            tokens=tuple(rng.integers(3, 12, 5).tolist()),
            key=sequence_key(3, i),
            max_new_tokens=longest if i == 7 else 6 + 2 * i,
            ignore_eos=True,
        )
        for i in range(8)
    ]


@dataclass
class Story:
    """One layout at first; rollouts go on while the other is compiled; then it is there."""

    reports: list[RolloutReport] = field(default_factory=list)
    completions: list[list[Completion]] = field(default_factory=list)

    def __post_init__(self):
        self.config = parse(OPTIONS)
        self.setup = build(self.config, jax.devices()[:2])
        self.first = first_layouts(self.config, self.setup)
        self.setup.engine.compile(within=self.first)
        compile_named(self.setup.trainer, "transfer", "checksum")  # nothing is learned
        self.params = self.setup.trainer.init(0)
        self.requests = make_requests(self.config)
        warmup = MadeUpClock(self.setup.engine)
        latency = warmup.measure(self.weights_in, self.first)
        lengths = LengthModel.empty(56).updated(
            np.array([request.max_new_tokens for request in self.requests] * 20),
            np.array([request.max_new_tokens == 56 for request in self.requests] * 20),
        )
        self.planner = CostModelPlanner((DP2, TP2), latency, lengths, is_frozen=True)
        self.lazy = LazyLayouts(self.setup, self.planner, warmup, self.first)
        with self.lazy, counted_compilations() as self.threads:
            self.running_through()

    def running_through(self) -> None:
        self.run(self.planner)
        self.lazy.end_rollout(1)
        self.wanted_for_one_more = list(self.lazy.requested)
        self.lazy.end_rollout(9_999)
        self.wanted_for_many = list(self.lazy.requested)
        while not (due := self.lazy.due()):
            self.run(self.planner)
            self.lazy.end_rollout(9_999 - len(self.reports))
        self.lines = self.lazy.bring_in(due, self.weights_in)
        self.run(self.planner)

    def weights_in(self, layout: Layout) -> Params:
        return self.setup.trainer.transfer(self.params, layout)

    def run(self, planner: Planner) -> list[Completion]:
        engine = self.setup.engine
        start = planner.start(full_load(self.config.rollout, len(self.requests)))
        engine.set_weights(self.weights_in(engine.layouts[start]), engine.layouts[start])
        completions, report = engine.rollout(self.requests, planner)
        engine.release_weights()
        self.reports.append(report)
        self.completions.append(completions)
        return completions

    @cached_property
    def judge(self) -> Judge:
        return Judge(self.setup.policy, self.params, jnp.float32, 128)


@pytest.fixture(scope="module")
def story() -> Story:
    return Story()


def test_only_the_first_layout_is_compiled_at_first(story: Story):
    assert story.first == (DP2,)
    assert (story.wanted_for_one_more, story.wanted_for_many) == ([], [TP2])
    assert {layout for report in story.reports[:-1] for layout in report.trace.layout} == {"dp2tp1"}


def test_the_wanted_layout_is_switched_to_once_it_is_there(story: Story):
    (switch,) = story.reports[-1].switches
    assert (switch.source, switch.target) == ("dp2tp1", "dp1tp2") and 0 < switch.running <= 4
    assert len(story.lines) == 1 and story.lines[0].startswith("dp1tp2 compiled in the background")
    assert not story.lazy.requested and story.planner.splits == (DP2, TP2)
    assert story.lazy.ready == [DP2, TP2] and story.setup.engine.programs.missing() == []


def test_the_main_thread_compiles_nothing(story: Story):
    in_background = [name for name in story.threads if name.startswith(THREAD_NAME)]
    assert len(in_background) > 10 and in_background == story.threads


def test_times_are_those_of_a_run_that_compiles_all(story: Story):
    everything = MadeUpClock(story.setup.engine)
    everything.measure(story.weights_in)
    assert story.lazy.warmup.measured == everything.measured
    assert story.planner.latency == everything.measured


def test_tokens_are_those_of_a_static_run(story: Story):
    static = story.run(FixedLayout(DP2))
    decisions = story.judge.decisions(story.requests, static)
    for completions in (story.completions[0], story.completions[-2]):
        total = sum(map(compare, static, completions, decisions), Tally())
        assert total.unexplained == total.judge_disagrees == 0
        assert total.compared > 0.9 * total.tokens > 100 and total.max_logprob_difference < 1e-4


def test_the_first_command_compiles_little_of_its_rollout_before_the_first_iteration():
    config = parse(["--profile", "none", "--run_dir", "unused"])
    setup = build(config, jax.devices()[:2])
    programs = setup.engine.programs
    first = first_layouts(config, setup)
    assert first == (DP2,) and 5 < len(programs.missing(first)) <= 0.4 * len(programs.missing())


class TestTheFirstLayouts:
    """By a profile of this engine, with times made up."""

    @pytest.fixture
    def profiled(self, story: Story) -> Setup:
        compile_s = {
            f"{name} {split}": 2.0 for name in ("decode", "prefill") for split in (DP2, TP2)
        }
        latency = story.lazy.warmup.measured
        return replace(story.setup, profile=Profile(story.setup.subject, latency, {}, compile_s))

    @pytest.mark.parametrize("which", ["all", "needed"])
    def test_all_of_them_but_where_others_come_later(self, profiled, which):
        unknown = replace(profiled, profile=None)
        config = parse([*OPTIONS, "--rollout.compile", which])
        assert first_layouts(config, unknown) == (DP2, TP2)

    def test_all_of_them_where_a_path_is_asked_for(self, story, profiled):
        scripted = replace(profiled, scripted=FixedLayout(TP2))
        assert first_layouts(story.config, scripted) == (DP2, TP2)

    def test_what_pays_over_the_run_is_compiled_at_once(self, profiled):
        """Everything is compiled in this engine: made to look as if nothing were."""
        few, many = (parse([*OPTIONS, "--steps", str(steps)]) for steps in (1, 10_000))
        programs = profiled.engine.programs
        engine = build(few, jax.devices()[:2]).engine
        assert programs.missing() == [] and len(engine.programs.missing()) > 10
        fresh = replace(profiled, engine=engine)
        assert first_layouts(few, fresh) == (DP2,)
        assert first_layouts(many, fresh) == (DP2, TP2)
