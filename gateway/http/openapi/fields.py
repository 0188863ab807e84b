"""Fields of request bodies and queries, for the OpenAPI document.

The dialects' handlers own the rules; this table names the fields that a reader looks for first. Handlers accept other
fields of their dialect too.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Field:
    """A field's JSON type (several with ` | `), its meaning, and True where a request without it is refused."""

    type: str
    meaning: str
    required: bool = False


_FRESHNESS = {
    "min_version": Field("integer", "The least weight version that may generate."),
    "max_staleness": Field("integer", "The greatest distance from the newest weight version."),
    "session_id": Field("string", "The session: its turns go to the replica that holds their prefix."),
    "expected_tokens": Field(
        "integer | array",
        "Estimate of a sample's length, for all prompts or one each: of a turn the longest goes first.",
    ),
}
_SAMPLING = {
    "model": Field("string", "A model or LoRA adapter of /v1/models; the first if left out."),
    "n": Field("integer", "Samples of each prompt."),
    "temperature": Field("number", "Temperature of the draw."),
    "top_p": Field("number", "Share of the probability that is drawn from."),
    "seed": Field("integer", "Seed of the draw."),
    "stream": Field("boolean", "True for server-sent events."),
}
_IN_FLIGHT = {"in_flight": Field("string", "keep, recompute, abort or drain: treatment of rollouts in flight.")}
_CANARY = {"canary_logprobs": Field("array", "The trainer's own log-probs of GET /v1/weight_canary.")}

BODIES: dict[str, dict[str, Field]] = {
    "post /v1/completions": {
        "prompt": Field("string | array", "Text, token ids, or a list of either.", required=True),
        "max_tokens": Field("integer", "Longest completion in tokens."),
        "logprobs": Field("integer", "Log-probs of the best tokens at each place."),
        "return_token_ids": Field("boolean", "True for the token ids of prompt and completion."),
        **_SAMPLING,
        **_FRESHNESS,
    },
    "post /v1/chat/completions": {
        "messages": Field("array", "The conversation.", required=True),
        "max_completion_tokens": Field("integer", "Longest completion in tokens."),
        "logprobs": Field("boolean", "True for log-probs."),
        "tools": Field("array", "Functions that the model may call."),
        **_SAMPLING,
        **_FRESHNESS,
    },
    "post /inference/v1/generate": {
        "token_ids": Field("array", "Token ids of the prompt.", required=True),
        "sampling_params": Field("object", "vLLM's sampling parameters.", required=True),
        "request_id": Field("string", "Id for /inference/v1/abort_requests."),
        "stream": _SAMPLING["stream"],
        **_FRESHNESS,
    },
    "post /inference/v1/abort_requests": {"request_ids": Field("array", "Ids of the requests to end.", required=True)},
    "post /generate": {
        "text": Field("string | array", "Text of the prompt, or a batch."),
        "input_ids": Field("array", "Token ids of the prompt, or a batch; in place of `text`."),
        "sampling_params": Field("object | array", "SGLang's sampling parameters."),
        "return_logprob": Field("boolean", "True for log-probs."),
        "rid": Field("string | array", "Id for /abort_request."),
        "stream": _SAMPLING["stream"],
        **_FRESHNESS,
    },
    "post /v1/rollouts": {
        "groups": Field(
            "array",
            "Groups: prompt, messages or resume, session_id, parent, and any of the fields below.",
            required=True,
        ),
        "id": Field("string", "Name of the submission; a second request with it joins the first."),
        "model": _SAMPLING["model"],
        "n": _SAMPLING["n"],
        "need": Field("integer", "Samples of a group that are enough; n if left out."),
        "deadline_s": Field("number", "Time from the arrival in which a group has to end."),
        "on_deadline": Field("string", "cancel, return_partial or resume: treatment of samples that are open then."),
        "sampling": Field("object", "Fields of /v1/completions."),
        "min_version": _FRESHNESS["min_version"],
        "max_staleness": _FRESHNESS["max_staleness"],
        "priority": Field("integer", "Place among rollouts that wait; lower is earlier."),
        "expected_tokens": Field("integer", "Estimate of a sample's length: the longest group begins first."),
        "stream": Field("boolean", "False for an answer at once, without events."),
    },
    "delete /v1/rollouts/{id}": {"groups": Field("array", "Numbers of the groups to end; all if left out.")},
    "post /v1/rollouts/{id}/deadline": {"groups": Field("array", "Numbers of the groups to end; all if left out.")},
    "post /v1/rollouts/{id}/ack": {"cursor": Field("integer", "The last event that the client has.", required=True)},
    "post /abort_request": {
        "rid": Field("string", "Id of the request to end."),
        "abort_all": Field("boolean", "True to end all rollouts of the policy; needs an admin key."),
    },
    "post /pause_generation": {"mode": Field("string", "abort, in_place or retract.")},
    "post /v1/load_lora_adapter": {
        "lora_name": Field("string", "Name of the adapter.", required=True),
        "lora_path": Field("string", "Folder that every engine can read.", required=True),
        "load_inplace": Field("boolean", "True to replace an adapter of this name."),
    },
    "post /v1/unload_lora_adapter": {"lora_name": Field("string", "Name of the adapter.", required=True)},
    "post /init_weight_transfer_engine": {
        "init_info": Field("object", "vLLM's description of the group.", required=True)
    },
    "post /start_weight_update": _IN_FLIGHT,
    "post /update_weights": {"update_info": Field("object", "Names, dtypes and shapes of tensors.", required=True)},
    "post /finish_weight_update": _CANARY,
    "post /v1/weight_updates": {
        "transport": Field("string", "store.", required=True),
        "snapshot": Field("string", "Name of a draft in the store's folder."),
        "version": Field("integer", "Version of the weights; the next if left out."),
        "rolling": Field("boolean", "True to load one replica after the other."),
        **_IN_FLIGHT,
        **_CANARY,
    },
    "post /profile": {
        "replicas": Field("array", "Ids or labels of /status; all that serve if left out."),
        "seconds": Field("number", "Length of the record; 5 if left out."),
    },
    "delete /v1/weight_updates": {"reason": Field("string", "The trainer's reason.")},
}
"""By method and path."""

QUERIES: dict[str, dict[str, Field]] = {
    "/pause": {
        "mode": Field("string", "abort, wait or keep: treatment of rollouts in flight."),
        "clear_cache": Field("boolean", "True to empty the prefix caches too."),
    },
    "/v1/rollouts/{id}": {
        "cursor": Field("integer", "Event to read on after; the last that was acked if left out."),
        "explain": Field("boolean", "True for the reasons of placements and waits, in place of samples."),
    },
}
"""By path."""
