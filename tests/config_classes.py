"""The configuration class of every command."""

from pat_jax.batch_generation.config import GenerateConfig
from pat_jax.config.run import RunConfig
from pat_jax.config.sft import RewardModelConfig, SftConfig
from pat_jax.evaluation.config import EvaluateConfig
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.capacity.simulate_config import SimulateConfig
from pat_jax.profiling.doctor.config import DoctorConfig
from pat_jax.profiling.measure.config import ProfileConfig
from pat_jax.run.results.compare_config import CompareConfig

CLASSES = {
    "train": RunConfig,
    "sft": SftConfig,
    "reward_model": RewardModelConfig,
    "generate": GenerateConfig,
    "evaluate": EvaluateConfig,
    "profile": ProfileConfig,
    "plan": PlanConfig,
    "simulate": SimulateConfig,
    "doctor": DoctorConfig,
    "compare": CompareConfig,
}
