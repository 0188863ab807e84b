"""The workload of engines under a trainer: lengths, and samples a step."""

from dataclasses import dataclass

from gateway.config.load import Setting
from tuning.doctor.files.verl import VerlFile
from tuning.doctor.known_keys import ROLLOUT
from tuning.doctor.values import Values, as_number

# Completions of a step that any KV cache holds at the same time.
FEW_COMPLETIONS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Tokens and counts; a field is None where no file has it. `samples` are completions of one step."""

    where: str = ""
    prompt: Setting | None = None
    response: Setting | None = None
    samples: int | None = None
    group_size: int | None = None

    @property
    def prompt_tokens(self) -> int | None:
        return _whole(self.prompt)

    @property
    def response_tokens(self) -> int | None:
        return _whole(self.response)

    @property
    def tokens(self) -> int | None:
        """Prompt and response together, at their longest."""
        if self.prompt_tokens is None or self.response_tokens is None:
            return None
        return self.prompt_tokens + self.response_tokens


def verl_workload(file: VerlFile) -> Workload:
    values = file.values
    section, batch = ("data.max_", "data.train_batch_size") if file.has_trainer else (ROLLOUT, "")
    # Where both are given, engines get the rollout section's own lengths.
    prompt, response = (values.at(f"{ROLLOUT}{name}_length") for name in ("prompt", "response"))
    if file.has_trainer and prompt.origin == response.origin == "default":
        prompt, response = values.at(f"{section}prompt_length"), values.at(f"{section}response_length")
    group_size = values.whole(ROLLOUT + "n")
    prompts = values.whole(batch) if batch else None
    return Workload(
        where="verl",
        prompt=prompt,
        response=response,
        samples=prompts * group_size if prompts and group_size else None,
        group_size=group_size,
    )


def trl_workload(values: Values, processes: int) -> Workload:
    """TRL has no limit of prompts: they are as long as the data set's."""
    return Workload(
        where="TRL",
        response=values.at("max_completion_length"),
        samples=generation_batch(values, processes),
        group_size=values.whole("num_generations"),
    )


def generation_batch(values: Values, processes: int) -> int | None:
    """Completions that one generation call asks for: TRL's GRPOConfig.__post_init__."""
    if given := values.whole("generation_batch_size"):
        return given
    steps = values.whole(key_of_steps(values))
    size = values.whole("per_device_train_batch_size")
    return size * processes * steps if size and steps else None


def key_of_steps(values: Values) -> str:
    """The field that says how many steps one generation call is for."""
    return "steps_per_generation" if values.whole("steps_per_generation") else "gradient_accumulation_steps"


def _whole(setting: Setting | None) -> int | None:
    number = as_number(setting.value) if setting else None
    return None if number is None else int(number)
