#!/usr/bin/env bash
# verl's production PPO command with the rollouts behind a gateway: its first two keys are all that a gateway adds.
#
#     CUDA_VISIBLE_DEVICES=0,1,2,3 rollout-gateway up -c examples/verl-qwen2-7b.yaml
#     CUDA_VISIBLE_DEVICES=4,5,6,7 examples/verl_qwen2_7b.sh [KEY=VALUE ...]
#
# rollout.* keys that describe engines may stay; examples/verl-qwen2-7b.yaml has what they say.
set -euo pipefail
exec python3 -m verl.trainer.main_ppo \
  trainer.v1.trainer_mode=gateway \
  +trainer.v1.gateway.url=http://127.0.0.1:8100 \
  +ray_kwargs.ray_init.address=local \
  data.train_files="$HOME/data/gsm8k/train.parquet" \
  data.val_files="$HOME/data/gsm8k/test.parquet" \
  data.train_batch_size=4096 \
  data.max_prompt_length=4096 \
  data.max_response_length=4096 \
  actor_rollout_ref.rollout.name=sglang \
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
  actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
  actor_rollout_ref.actor.fsdp_config.param_offload=True \
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 \
  critic.optim.lr=1e-5 \
  critic.model.path=Qwen/Qwen2-7B-Instruct \
  critic.ppo_micro_batch_size_per_gpu=4 \
  critic.fsdp.param_offload=True \
  critic.fsdp.optimizer_offload=True \
  algorithm.kl_ctrl.kl_coef=0.001 \
  trainer.logger=console \
  trainer.val_before_train=False \
  trainer.n_gpus_per_node=4 \
  trainer.nnodes=1 \
  trainer.save_freq=-1 \
  trainer.test_freq=10 \
  trainer.total_epochs=15 \
  "$@"
