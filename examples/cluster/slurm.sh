#!/bin/bash
# Extend a model on two Slurm nodes with eight GPUs each. Submit it with: sbatch slurm.sh
# A job that was ended early (time limit, a lost node) resumes when it is submitted again.
#SBATCH --job-name=branchout
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00

export MAIN=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export BRANCHOUT_CACHE=/shared/$USER/branchout-cache

# One launcher for each node; SLURM_NODEID is known only inside srun.
srun bash -c 'accelerate launch --multi_gpu --mixed_precision bf16 --dynamo_backend no \
  --num_machines $SLURM_NNODES --num_processes $((8 * SLURM_NNODES)) --machine_rank $SLURM_NODEID \
  --main_process_ip $MAIN --main_process_port 29500 \
  -m branchout extend /shared/new --base /shared/base --memory /shared/old --out /shared/v2'
