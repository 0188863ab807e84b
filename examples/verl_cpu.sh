#!/usr/bin/env bash
# verl's own GRPO trainer on CPU, rollouts and weights through a gateway over the tiny model:
#
#     make setup-verl && .venv/bin/rollout-gateway up -c examples/tiny-cpu.yaml
#     examples/verl_cpu.sh http://127.0.0.1:8100 [KEY=VALUE ...]
#
# The first two keys are what a gateway needs of a verl configuration; those about Ray and the platform are for CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
url="${1:?give the rollout URL, such as http://127.0.0.1:8100}"
out="${OUT:-out/verl}"
python=.venv-verl/bin/python

$python -m examples.verl_sort "$out/data"
export VERL_USE_EXTERNAL_MODULES=examples.verl_platform VERL_PLATFORM=cpu
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo HYDRA_FULL_ERROR=1
export VERL_FILE_LOGGER_PATH="$out/steps.jsonl"
exec $python -m verl.trainer.main_ppo \
  trainer.v1.trainer_mode=gateway \
  "+trainer.v1.gateway.url=$url" \
  algorithm.adv_estimator=grpo \
  data.train_files="$out/data/train.parquet" \
  data.val_files="$out/data/test.parquet" \
  data.train_batch_size=32 \
  data.max_prompt_length=32 \
  data.max_response_length=16 \
  data.dataloader_num_workers=0 \
  actor_rollout_ref.model.path=examples/tiny_model/digit-sort \
  actor_rollout_ref.model.use_remove_padding=False \
  +actor_rollout_ref.model.override_config.attn_implementation=sdpa \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=4 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64 \
  actor_rollout_ref.rollout.agent.num_workers=1 \
  actor_rollout_ref.actor.strategy=fsdp2 \
  +actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32 \
  actor_rollout_ref.actor.use_torch_compile=False \
  actor_rollout_ref.actor.optim.lr=1e-4 \
  actor_rollout_ref.actor.ppo_mini_batch_size=32 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64 \
  reward.num_workers=1 \
  reward.custom_reward_function.path=examples/verl_sort.py \
  transfer_queue.backend.SimpleStorage.num_data_storage_units=1 \
  trainer.device=cpu \
  trainer.nnodes=1 \
  trainer.n_gpus_per_node=1 \
  trainer.logger=[console,file] \
  trainer.total_training_steps=3 \
  trainer.val_before_train=False \
  trainer.save_freq=-1 \
  trainer.test_freq=-1 \
  trainer.resume_mode=disable \
  ray_kwargs.ray_init.num_cpus=16 \
  +ray_kwargs.ray_init.address=local \
  +ray_kwargs.ray_init.num_gpus=1 \
  +ray_kwargs.ray_init.include_dashboard=False \
  hydra.run.dir="$out/hydra" \
  "${@:2}"
