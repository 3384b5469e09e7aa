#!/bin/bash
# One run on two nodes of eight GPUs, one process per node. The processes find each other through
# SLURM. The folder of the run must be shared by the nodes. A job that is requeued continues.
#
#   sbatch examples/slurm.sh
#
#SBATCH --job-name=qwen3-8b
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@90

SHARED=${SHARED:-/shared}          # a folder that all nodes see
export HF_HOME=$SHARED/huggingface # one download for all nodes

srun python -m pat_jax.train --preset qwen3-8b --model Qwen/Qwen3-8B --data openai/gsm8k \
    --run_dir "$SHARED/runs/$SLURM_JOB_NAME" --resume auto
