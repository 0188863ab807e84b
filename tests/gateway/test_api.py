"""One table says which status an error has, and which error a status is."""

import pytest

from engines import errors
from gateway.api import body_of, error_body, error_of, status_of

THROUGH_THE_WIRE: list[errors.RolloutGatewayError] = [
    errors.InvalidRequest("n = 0 is wrong", param="n"),
    errors.InvalidRequest("no field is at fault"),
    errors.UnknownModel("model 'x' is not served here", param="model"),
    errors.UnknownRoute("/inference/v1/generate: replica engine-1 knows no token ids"),
    errors.BodyTooLarge("the body is over gateway.max_body_bytes"),
    errors.NotAllowed("missing or wrong key", known=False),
    errors.NotAllowed("this key may generate only", known=True),
    errors.DeadlineExceeded("no replica took the rollout within 600 s"),
    errors.EngineError("it misbehaved", replica_id="engine-1"),
    errors.EngineUnreachable("connection reset", replica_id="engine-1"),
    errors.EngineFailed("it answered 500", replica_id="engine-1"),
    errors.EngineStartFailed("out of memory", replica_id="engine-1"),
    errors.WeightUpdateConflict("an update is open"),
    errors.WeightUpdateFailed("it did not take the update", replica_id="engine-1"),
    errors.RolloutGatewayError("something else"),
]


@pytest.mark.parametrize("raised", THROUGH_THE_WIRE, ids=lambda error: type(error).__name__)
def test_an_error_comes_out_of_the_wire_as_it_went_in(raised: errors.RolloutGatewayError) -> None:
    caught = error_of(status_of(raised), body_of(raised))
    assert type(caught) is type(raised)
    assert str(caught) == str(raised)
    assert vars(caught) == vars(raised)


def test_a_message_with_a_large_value_keeps_its_begin_and_its_remedy() -> None:
    message = error_body(f"field = {'x' * 1_000_000}: leave it out", 400)["error"]["message"]
    assert (message[:9], message[-14:]) == ("field = x", ": leave it out")
    assert len(message) < 5000


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (404, {"detail": "Not Found"}, errors.UnknownRoute),
        (404, error_body("no such model", 404, param="model"), errors.UnknownModel),
        (422, {"detail": [{"loc": ["n"]}]}, errors.InvalidRequest),
        (502, "<html>Bad Gateway</html>", errors.EngineError),
        (503, "<html>Service Unavailable</html>", errors.GatewayUnreachable),
        (504, {}, errors.DeadlineExceeded),
        (500, None, errors.RolloutGatewayError),
    ],
)
def test_what_no_gateway_wrote_is_judged_by_its_status(
    status: int, body: object, expected: type[errors.RolloutGatewayError]
) -> None:
    caught = error_of(status, body)
    assert type(caught) is expected
    assert str(caught)
