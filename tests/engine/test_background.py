"""Programs compiled by layouts, and beside what runs."""

import threading

import jax
import jax.numpy as jnp
import pytest
from fakes import SPLITS

from pat_jax.programs.programs import BackgroundCompiler, Key, ProgramTable

DP8, DP4TP2, DP2TP4, TP8 = SPLITS
NUMBER = jax.ShapeDtypeStruct((), jnp.float32)


def declared() -> ProgramTable:
    """A program for each layout and one for each switch."""
    table = ProgramTable()
    for split in SPLITS:
        table.declare(Key("decode", split), lambda x, k=split.tp: x * k, NUMBER)
        for target in SPLITS:
            if target != split:
                table.declare(Key("migrate", split, target=target), lambda x: x + 1, NUMBER)
    return table


def test_what_is_compiled_in_the_background_runs():
    table = declared()
    table.compile_all(threads=1, within=[DP8])
    compiler = BackgroundCompiler(table)
    compiler.start(TP8, [DP8])
    compiler.start(DP2TP4, [DP8, TP8])
    while table.missing([DP8, TP8, DP2TP4]):
        assert table[Key("decode", DP8)](2.0) == 2.0
    compiler.close()
    assert compiler.finished == {TP8, DP2TP4}
    assert min(compiler.take(TP8), compiler.take(DP2TP4)) > 0
    assert compiler.finished == set()
    assert table[Key("decode", TP8)](2.0) == 16.0 and len(table.missing([DP4TP2])) == 1


def test_closing_leaves_the_rest_uncompiled():
    table, entered, go_on = ProgramTable(), threading.Event(), threading.Event()

    def slow(x):
        entered.set()
        assert go_on.wait(60)
        return x

    table.declare(Key("decode", TP8), slow, NUMBER)
    table.declare(Key("prefill", TP8), lambda x: x, NUMBER)
    compiler = BackgroundCompiler(table)
    compiler.start(TP8, [])
    assert entered.wait(60) and compiler.finished == set()
    threading.Timer(0.1, go_on.set).start()
    compiler.close()
    assert table.missing() == [Key("prefill", TP8)]


def test_a_program_that_cannot_be_compiled_is_heard_of():
    table = ProgramTable()

    def broken(x):
        raise ValueError("this one")

    table.declare(Key("decode", TP8), broken, NUMBER)
    compiler = BackgroundCompiler(table)
    compiler.start(TP8, [])
    compiler.close()
    with pytest.raises(ValueError, match="this one"):
        compiler.take(TP8)
    assert table.missing() == [Key("decode", TP8)]
