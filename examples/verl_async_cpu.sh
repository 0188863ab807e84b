#!/usr/bin/env bash
# verl's own asynchronous trainers on CPU, as examples/verl_cpu.sh otherwise:
#
#     [TRAINER=one_step_off|fully_async] examples/verl_async_cpu.sh http://127.0.0.1:8100 [KEY=VALUE ...]
#
# separate_async, of main_ppo, is what runs unless TRAINER says otherwise.
set -euo pipefail
url="${1:?give the rollout URL, such as http://127.0.0.1:8100}"
export ROLLOUT_URL="$url"
# What a gateway needs. As many actors ask it as verl would have replicas: nodes x GPUs / TP; they take no GPU.
keys=(
  actor_rollout_ref.hybrid_engine=False
  actor_rollout_ref.rollout.name=gateway
  actor_rollout_ref.rollout.checkpoint_engine.backend=gateway
  actor_rollout_ref.rollout.tensor_model_parallel_size=1
)
# Two have programs of their own. The configuration of the first is found in a checkout of verl alone, but for the last key.
program=(rollout.nnodes=1 rollout.n_gpus_per_node=1 ray_kwargs.ray_init.num_cpus=40 "hydra.searchpath=[pkg://verl.trainer.config]")
trainer="${TRAINER:-separate_async}"
case "$trainer" in
  separate_async)
    # At INFO, which is its default, verl 0.9.1 ends this mode with a TypeError: Logger._log() knows no "flush".
    export VERL_LOGGING_LEVEL="${VERL_LOGGING_LEVEL:-WARN}"
    keys+=(trainer.v1.trainer_mode=separate_async actor_rollout_ref.rollout.nnodes=1)
    keys+=(actor_rollout_ref.rollout.n_gpus_per_node=1)
    keys+=(trainer.v1.separate_async.parameter_sync_step=2 actor_rollout_ref.actor.ppo_mini_batch_size=16)
    ;;
  one_step_off)
    export VERL_MAIN=verl.experimental.one_step_off_policy.main_ppo
    keys+=("${program[@]}")
    ;;
  fully_async)
    export VERL_MAIN=verl.experimental.fully_async_policy.fully_async_main
    keys+=("${program[@]}" data.train_batch_size=0 rollout.n=4 rollout.total_rollout_steps=128)
    keys+=(async_training.trigger_parameter_sync_step=2 async_training.staleness_threshold=0.5)
    keys+=(actor_rollout_ref.actor.ppo_mini_batch_size=16 trainer.total_training_steps=null)
    ;;
  *)
    echo "TRAINER=$trainer is none of separate_async, one_step_off, fully_async" >&2
    exit 2
    ;;
esac
exec "$(dirname "$0")/verl_cpu.sh" "$url" "${keys[@]}" "${@:2}"
