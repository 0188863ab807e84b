#!/bin/bash
# Nodes of eight GPUs, three unless --nodes says otherwise: gateway and trainer on the first, engines on the others.
#   sbatch examples/deploy/slurm.sh python train.py --vllm_server_base_url http://127.0.0.1:8100
# Submit it from the checkout, on a file system that all nodes share, with rollout-gateway's environment active.
#SBATCH --job-name=rollouts
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
set -euo pipefail

config=examples/deploy/several-nodes.yaml
head=$(hostname)
address=$(hostname --ip-address | awk '{print $1}')
workers=$((SLURM_JOB_NUM_NODES - 1))

# Ray's token lies in the home folder, which the nodes share; the keys reach them with srun's environment.
export RAY_AUTH_MODE=token
ray get-auth-token --generate >/dev/null
ROLLOUT_INFERENCE_KEY=$(openssl rand -hex 32)
ROLLOUT_ADMIN_KEY=$(openssl rand -hex 32)
export ROLLOUT_INFERENCE_KEY ROLLOUT_ADMIN_KEY

end() {
  rollout-gateway down --name rollouts || true
  ray stop
}
trap end EXIT

ray start --head --node-ip-address="$address" --port=6379 --num-gpus=0 --disable-usage-stats
srun --nodes="$workers" --ntasks="$workers" --exclude="$head" \
  ray start --address="$address:6379" --disable-usage-stats --block &

rollout-gateway up -c "$config" "engine.num_replicas=$((8 * workers))" --timeout-s 1800
"$@"
