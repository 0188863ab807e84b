"""A trainer's announcement is checked against the served model."""

from dataclasses import dataclass

import pytest

from engines.announcement import check_fused, check_tensors
from engines.errors import InvalidRequest
from engines.types import TensorMeta


@dataclass(frozen=True)
class Model:
    tensors: tuple[TensorMeta, ...] | None
    model: str = "tiny"


SERVED = Model((TensorMeta(name="w", dtype="bfloat16", shape=(4, 2)), TensorMeta(name="q", dtype="int8", shape=(4,))))
QUANTISED = Model((TensorMeta(name="w", dtype="float8_e4m3fn", shape=(4, 2)),))


def announced(name: str = "w", dtype: str = "bfloat16", shape: tuple[int, ...] = (4, 2)) -> dict[str, object]:
    return {"names": [name], "dtype_names": [dtype], "shapes": [list(shape)]}


@pytest.mark.parametrize(
    ("told", "served"),
    [(announced(dtype="float32"), SERVED), (announced(dtype="float16"), SERVED), (announced("anything"), Model(None))],
)
def test_other_floats_and_any_tensor_of_an_unknown_checkpoint_are_taken(told: dict[str, object], served: Model) -> None:
    check_tensors(told, served, "update_info")


@pytest.mark.parametrize(
    ("told", "served", "param", "message"),
    [
        (announced("other"), SERVED, "names", "has 'other', which model 'tiny' does not have"),
        (announced(shape=(2, 4)), SERVED, "shapes", r"gives \[2, 4\] for 'w', model 'tiny' has \[4, 2\]"),
        (announced(dtype="int8"), SERVED, "dtype_names", "gives 'int8' for 'w', model 'tiny' has 'bfloat16'"),
        (announced("q", "float32", (4,)), SERVED, "dtype_names", "gives 'float32' for 'q', model 'tiny' has 'int8'"),
        (announced(), QUANTISED, "dtype_names", "gives 'bfloat16' for 'w', model 'tiny' has 'float8_e4m3fn'"),
        (announced(dtype="float8_e4m3fn"), SERVED, "dtype_names", "gives 'float8_e4m3fn' for 'w'"),
    ],
)
def test_what_does_not_fit_is_named(told: dict[str, object], served: Model, param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        check_tensors(told, served, "update_info")
    assert refused.value.param == f"update_info.{param}"


@pytest.mark.parametrize("dtypes", [5, [1], ["bfloat16", "bfloat16"], [], "b"], ids=str)
@pytest.mark.parametrize("served", [SERVED, Model(None)], ids=["known", "unknown"])
def test_dtypes_that_are_no_list_of_a_string_for_each_name_are_named(dtypes: object, served: Model) -> None:
    with pytest.raises(InvalidRequest, match="not a list of a string for each name") as refused:
        check_tensors(announced() | {"dtype_names": dtypes}, served, "update_info")
    assert refused.value.param == "update_info.dtype_names"


LAYER = "model.layers.0"
FUSED = Model(
    tuple(
        TensorMeta(name=f"{LAYER}.{part}", dtype="bfloat16", shape=(4,))
        for part in (
            "self_attn.q_proj.weight",
            "self_attn.q_proj.bias",
            "self_attn.k_proj.weight",
            "self_attn.o_proj.weight",
            "mlp.experts.0.up_proj.weight",
            "mlp.experts.1.up_proj.weight",
            "input_layernorm.weight",
        )
    )
)


@pytest.mark.parametrize(
    ("sent", "missing"),
    [
        (["self_attn.q_proj.weight", "self_attn.q_proj.bias"], "self_attn.k_proj.weight"),
        (["self_attn.q_proj.weight", "self_attn.k_proj.weight"], "self_attn.q_proj.bias"),
        (["mlp.experts.0.up_proj.weight"], "mlp.experts.1.up_proj.weight"),
    ],
)
def test_tensors_that_vllm_holds_as_one_come_together(sent: list[str], missing: str) -> None:
    with pytest.raises(InvalidRequest, match=f"without '{LAYER}.{missing}', and vLLM fuses the two"):
        check_fused({f"{LAYER}.{name}" for name in sent}, FUSED)


def test_a_bias_of_the_router_that_vllm_leaves_as_it_is_may_be_absent() -> None:
    """TRL's sync of DeepSeek-V3 and GLM-4.5: a buffer, and TRL sends parameters."""
    router = [f"{LAYER}.mlp.gate.{name}" for name in ("weight", "e_score_correction_bias")]
    served = Model(tuple(TensorMeta(name=name, dtype="bfloat16", shape=(4,)) for name in router))
    check_fused(router[:1], served)


@pytest.mark.parametrize("sent", [["self_attn.o_proj.weight"], ["input_layernorm.weight"], []])
def test_tensors_of_their_own_may_come_alone(sent: list[str]) -> None:
    check_fused({f"{LAYER}.{name}" for name in sent}, FUSED)
