"""The trace of a rollout that switches once."""

from pat_jax.engine.record.trace import Move, MovedBytes, RolloutTrace

SWITCH = Move(
    step=64,
    running=40,
    source="dp2tp1",
    target="dp1tp2",
    seconds=0.0625,
    predicted_saving_s=1.5,
    predicted_cost_s=0.125,
    kv="migrate",
    reason="the saving exceeds the cost",
    sequences=40,
    fullest=(20, 40),
    sent=MovedBytes(3 * 2**20),
    at_s=1.25,
    predicted_remaining_s=2.25,
)
TRACE = RolloutTrace(
    times_s=(0.25, 1.5, 2.5),
    steps=(0, 64, 128),
    running=(100, 40, 9),
    layout=("dp2tp1", "dp1tp2", "dp1tp2"),
    total_s=4.0,
    total_steps=160,
    moves=(SWITCH,),
)
