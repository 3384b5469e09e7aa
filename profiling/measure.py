"""Measures this machine while it warms up: every program of a rollout, run twice, timed once.

The first run of a program creates communicators and pages memory in; the second is timed. What
comes out is the latency model that the planner reads, so warming up and profiling are one thing.
"""

import time
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np

from pat_jax.engine.layout import Layout
from pat_jax.engine.programs import Key
from pat_jax.engine.rollout import RolloutEngine
from pat_jax.engine.state import DecodeState, RowState, Until
from pat_jax.models.kv_cache import KVCache
from pat_jax.models.policy import Params
from pat_jax.planning.latency import LatencyModel


class Warmup:
    """Runs every compiled program of an engine on dummy sequences, layout by layout."""

    def __init__(self, engine: RolloutEngine):
        self.engine, self.programs, self.catalogue = engine, engine.programs, engine.catalogue
        self.decode: dict = {}
        self.prefill: dict = {}
        self.migrate: dict = {}
        self.reslice: dict = {}

    def measure(self, load_weights: Callable[[Layout], Params]) -> LatencyModel:
        """The latency model of this engine on this machine.

        Args:
          load_weights: gives the weights on the shards of a layout; the engine deletes them.
        """
        for layout in self.engine.layouts.values():
            self.engine.set_weights(load_weights(layout), layout)
            self._decode_and_prefill(layout)
            self._resize(layout)
            for target in self.engine.layouts.values():
                if target is not layout:
                    self._migrate(layout, target)
            self.engine.release_weights()
        for source in self.engine.layouts.values():
            for target in self.engine.layouts.values():
                if target is not source:
                    self._reslice(source, target, load_weights)
        return LatencyModel(
            self.decode,
            self.reslice,
            self.migrate,
            self.prefill,
            self.catalogue.prefill_rows,
            self.catalogue.prefill_chunk,
        )

    def _decode_and_prefill(self, layout: Layout) -> None:
        split, params = layout.split, self.engine.params
        few_rows = self.catalogue.prefill_rows
        for length in self.catalogue.buckets.lengths:
            few = self.programs[Key("allocate", split, few_rows, length)]()
            tokens = np.zeros((few_rows * split.dp, self.catalogue.chunk(length)), np.int32)
            program = self.programs[Key("prefill", split, 0, length)]
            start = np.int32(length - tokens.shape[1])
            few, seconds = _timed(lambda few: program(params, few, tokens, start), few)  # noqa: B023
            self.prefill[(split, length)] = seconds
            for rows in self.catalogue.buckets.rows[split]:
                cache = self.programs[Key("allocate", split, rows, length)]()
                insert = self.programs[Key("insert", split, rows, length)]
                picks = np.full(split.dp * few_rows, rows, np.int32)
                cache, _ = _timed(lambda cache: insert(cache, few, picks), cache)  # noqa: B023
                cache, self.decode[(split, rows, length)] = self._decode_step(
                    layout, rows, length, cache
                )
                _delete(cache)
            _delete(few)

    def _decode_step(
        self, layout: Layout, rows: int, length: int, cache: KVCache
    ) -> tuple[KVCache, float]:
        """Seconds of one step with every row live and near the end of the cache."""
        program = self.programs[Key("decode", layout.split, rows, length)]
        steps = self.catalogue.functions.check_every
        state = RowState.empty(rows * layout.split.dp)
        state.live[:], state.ignore_eos[:] = True, True
        state.position[:], state.end[:] = length - steps, length + steps
        until = Until(np.int32(steps), np.int32(0))
        on_device = jax.device_put(state, layout.sharding("batch"))

        def burst(carried: DecodeState) -> DecodeState:
            # Positions go back to where they were: each run writes the same columns.
            rows = jax.device_put(state, layout.sharding("batch"))
            return program(self.engine.params, DecodeState(rows, carried.cache), until)[0]

        carried, seconds = _timed(burst, DecodeState(on_device, cache), runs=3)
        return carried.cache, seconds / steps

    def _resize(self, layout: Layout) -> None:
        for key in self.programs.keys("resize"):
            if key.split == layout.split:
                cache = self.programs[Key("allocate", layout.split, key.rows, key.length)]()
                picks = np.zeros(key.to_rows * layout.split.dp, np.int32)
                for _ in range(2):
                    _delete(jax.block_until_ready(self.programs[key](cache, picks)))
                _delete(cache)

    def _migrate(self, source: Layout, target: Layout) -> None:
        for key in self.programs.keys("migrate"):
            if (key.split, key.target) != (source.split, target.split):
                continue
            for _ in range(2):
                cache = jax.block_until_ready(
                    self.programs[Key("allocate", source.split, key.rows, key.length)]()
                )
                start = time.perf_counter()
                moved = jax.block_until_ready(self.programs[key](cache))
                seconds = time.perf_counter() - start
                _delete(moved)
            self.migrate[(source.split, target.split, key.rows, key.length)] = seconds

    def _reslice(
        self, source: Layout, target: Layout, load_weights: Callable[[Layout], Params]
    ) -> None:
        for _ in range(2):
            self.engine.set_weights(jax.block_until_ready(load_weights(source)), source)
            start = time.perf_counter()
            self.engine.reslice(target)
            self.reslice[(source.split, target.split)] = time.perf_counter() - start
            self.engine.release_weights()


Carry = TypeVar("Carry")


def _timed(run: Callable[[Carry], Carry], carry: Carry, runs: int = 2) -> tuple[Carry, float]:
    """The fastest of the runs after the first: noise only ever adds time."""
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        carry = jax.block_until_ready(run(carry))
        seconds.append(time.perf_counter() - start)
    return carry, min(seconds[1:])


def _delete(cache: KVCache) -> None:
    for leaf in jax.tree.leaves(cache):
        leaf.delete()
