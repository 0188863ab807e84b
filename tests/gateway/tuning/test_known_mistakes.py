"""Mistakes that the tools once made, each with the test that keeps it from coming back."""

import ast
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli.main import app
from gateway.tuning.doctor.files.hydra_override import parsed_override
from gateway.tuning.doctor.finding import Severity
from gateway.tuning.doctor.known_keys import Composition, verl_keys
from gateway.tuning.doctor.rules.all import examine
from gateway.tuning.doctor.subject import subject_of

HERE = Path(__file__).parent
# The mistake, and the file and function of its test. Rows of a table in test_rules.py are named by the rule's id too.
MISTAKES = {
    "a nested default ends at the first brace": (
        "doctor/test_shell_script.py",
        "test_words_are_those_that_bash_gives_a_program",
    ),
    "the last arm of a case or an if counts": (
        "doctor/test_bash_readings.py",
        "test_a_drawn_script_is_read_as_bash_runs_it",
    ),
    "nested arithmetic stays unresolved": (
        "doctor/test_shell_script.py",
        "test_words_are_those_that_bash_gives_a_program",
    ),
    "a free dictionary's key is unknown": ("doctor/test_rules.py", "test_keys_of_free_dictionaries_are_known"),
    "a suggested key does not exist": ("test_known_mistakes.py", "test_every_suggested_key_exists"),
    "Megatron is judged as FSDP": ("doctor/test_rules.py", "test_megatron_is_not_judged_as_fsdp"),
    "out of memory beside an offloaded trainer of any size": ("doctor/test_rules.py", "test_verl_rules", "gpu-memory"),
    "SFT is judged as PPO": ("doctor/test_rules.py", "test_sft_is_not_judged_as_rl"),
    "256 tokens are the default": ("test_known_mistakes.py", "test_a_given_length_is_not_called_the_default"),
    "quantized models are sized as bfloat16": (
        "doctor/test_model_size.py",
        "test_a_quantized_model_is_smaller_by_its_name",
    ),
    "expert parallelism is ignored": ("doctor/test_rules.py", "test_expert_parallelism_spreads_the_weights"),
    "an accelerate file passes as TRL's": (
        "doctor/test_trl_file.py",
        "test_what_is_no_configuration_is_refused_with_its_file",
    ),
    "top_p=args.top_p cuts the distribution": (
        "doctor/test_rules.py",
        "test_what_trl_gives_by_name_or_dictionary_is_read_and_the_rest_is_listed",
    ),
    "another trainer of TRL is judged as GRPO": (
        "doctor/test_trl_file.py",
        "test_another_trainer_is_refused_with_its_program",
    ),
    "an option that TRL drops is advised": ("doctor/test_rules.py", "test_trl_is_not_told_to_use_what_it_drops"),
    "fields that the program sets after its parser are not seen": (
        "doctor/test_trl_file.py",
        "test_fields_that_the_program_sets_later_count",
    ),
    "use_vllm 'true' is off": ("doctor/test_rules.py", "test_trl_rules", "trl-vllm"),
    "0.15 beside a trainer is fine": ("doctor/test_rules.py", "test_verl_rules", "gpu-memory"),
    "text for numbers or booleans": ("doctor/test_planted_defects.py", "test_nine_of_ten_planted_defects_are_found"),
    "an unknown engine, estimator, mode or loss": ("doctor/test_rules.py", "test_verl_rules", "verl-choices"),
    "GRPO with one completion": ("doctor/test_rules.py", "test_verl_rules", "verl-group"),
    "TRL's greedy and single completions, its penalty": ("doctor/test_rules.py", "test_trl_rules", "trl-sampling"),
    "a plus on a key that exists": ("doctor/test_planted_defects.py", "test_nine_of_ten_planted_defects_are_found"),
    "Megatron keys without Megatron": ("test_known_mistakes.py", "test_megatrons_keys_without_megatron_hurt"),
    "KL counted twice": ("doctor/test_rules.py", "test_verl_rules", "verl-kl-twice"),
    "quantized rollouts": ("doctor/test_rules.py", "test_verl_rules", "verl-quantized-rollout"),
    "rollout fields without a name": ("doctor/test_rules.py", "test_rollout_fields_without_a_name_are_judged"),
    "commands of trl vllm-serve and accelerate": (
        "doctor/test_rules.py",
        "test_a_script_that_launches_trl_is_read_with_its_server",
    ),
    "findings are unranked": ("doctor/test_rules.py", "test_findings_are_ranked_by_gain_and_general_advice_is_marked"),
    "no colocation, no offload, no LoRA": ("plan/test_published.py", "test_training_that_is_published_as_possible_is"),
    "40k completions fit no split": (
        "plan/test_trainer.py",
        "test_long_sequences_have_chunked_logits_first_and_then_several_gpus",
    ),
    "MXFP4 counts 8 bits": (
        "plan/test_published.py",
        "test_weights_of_every_choice_are_within_three_percent_of_the_published_checkpoint",
    ),
    "sliding windows hold everything": ("plan/test_shape.py", "test_layers_with_a_window_hold_no_more_than_it"),
    "linear attention is full attention": (
        "plan/test_shape.py",
        "test_linear_attention_without_layer_types_cannot_be_sized",
    ),
    "no expert parallelism": ("plan/test_choices.py", "test_ranks_with_their_own_attention_share_the_experts"),
    "16 GPUs are silently one node": (
        "plan/test_command.py",
        "test_more_gpus_than_a_node_usually_has_are_said_to_be_one_node",
    ),
    "doctor finds fault with plan's file": (
        "plan/test_published.py",
        "test_the_doctor_finds_nothing_in_a_configuration_that_plan_writes",
    ),
    "the plot cuts its labels": ("tune/test_report.py", "test_labels_of_the_plot_begin_at_its_edge_and_none_is_cut"),
    "no word of progress or time left": ("tune/test_search.py", "test_each_measurement_says_how_far_the_search_is"),
    "no word of the lever that brought it": ("tune/test_report.py", "test_each_lever_has_its_own_part_of_the_gain"),
    "settings at a tenth of the best go on": (
        "tune/test_search.py",
        "test_settings_at_a_tenth_of_the_best_are_cut_off_early",
    ),
    "a dead replica has no name": (
        "doctor/test_live.py",
        "test_replicas_that_are_missing_or_were_lost_are_named_with_their_reasons",
    ),
    "counters are since the start": ("doctor/test_live.py", "test_counters_of_two_looks_are_of_the_time_between_them"),
    "a KV cache of one sequence is fine": (
        "doctor/test_live.py",
        "test_a_kv_cache_of_few_sequences_is_told_without_a_limit_of_them",
    ),
    "passed without a threshold": (
        "../../loadtests/report/test_page.py",
        "test_a_run_without_a_threshold_has_not_passed_one",
    ),
    "a slow run shows no cause": ("../../loadtests/report/test_cause.py", "test_a_run_names_what_it_waited_for"),
    "no comparison with an earlier run": (
        "../../loadtests/report/test_comparison.py",
        "test_figures_of_both_runs_are_set_beside_each_other",
    ),
    "the spike loads nothing": (
        "../../loadtests/test_scenarios.py",
        "test_a_spike_without_a_rate_is_more_than_the_server_can_do",
    ),
    "a dead URL gives a thousand errors": (
        "../../loadtests/test_scenarios.py",
        "test_a_url_without_a_server_ends_the_run_at_once",
    ),
    "empty sessions": ("../../loadtests/test_scenarios.py", "test_sessions_without_room_for_a_turn_are_refused"),
    "replay without a trace": ("../../loadtests/test_scenarios.py", "test_a_replay_without_a_trace_is_refused"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_has_its_test(mistake: str) -> None:
    name, function, *row = MISTAKES[mistake]
    text = (HERE / name).read_text(encoding="utf-8")
    functions = {
        node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert function in functions
    assert all(f'"{rule}"' in text for rule in row)


def test_every_suggested_key_exists() -> None:
    verdicts = json.loads((HERE / "doctor" / "verl_trial" / "hydra_verdicts.json").read_text(encoding="utf-8"))
    suggested = 0
    for release, trainers in verdicts.items():
        for trainer, words in trainers.items():
            keys = verl_keys(trainer, release)
            for override in map(parsed_override, words.get("refused", [])):
                if override and Composition(keys).refusal(override) and (near := keys.nearest(override.key)):
                    suggested += 1
                    assert keys.has(near), (release, trainer, override.key, near)
    assert suggested > 20


@pytest.mark.parametrize(
    ("length", "says"), [("", "512 tokens, the default"), ("=400", "400 tokens, given"), ("=-1", "-1")]
)
def test_a_given_length_is_not_called_the_default(tmp_path: Path, length: str, says: str) -> None:
    path = tmp_path / "train.sh"
    given = f"data.max_response_length{length}" if length else "data.train_batch_size=1024"
    path.write_text(f"python -m verl.trainer.main_ppo {given} actor_rollout_ref.rollout.name=vllm\n", encoding="utf-8")
    (found,) = [one for one in examine(subject_of(verl=path)) if one.rule == "response-length"]
    assert says in found.message


def test_megatrons_keys_without_megatron_hurt(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    key = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"
    path.write_text(f"python -m verl.trainer.main_ppo {key}=2 actor_rollout_ref.rollout.name=vllm\n", encoding="utf-8")
    found = [one for one in examine(subject_of(verl=path)) if one.key == key]
    assert [one.severity for one in found] == [Severity.HURTS]


def test_watching_needs_a_url_and_a_time(tmp_path: Path) -> None:
    for arguments, says in (
        (["-c", "no.yaml", "--watch", "30s"], "--watch 30s: nothing to watch: give --url URL"),
        (["--url", "http://127.0.0.1:1", "--watch", "soon"], "--watch 'soon': expected a number of seconds"),
    ):
        done = CliRunner().invoke(app, ["doctor", *arguments])
        assert done.exit_code == 2
        assert says in done.stderr
