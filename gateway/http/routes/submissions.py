"""/v1/rollouts: groups under one id, whose samples are read as they end, read again after a break, and acked."""

from dataclasses import dataclass
from typing import Annotated

from aiohttp import web
from msgspec import Meta, Struct

from engines.engine import Json
from engines.errors import InvalidRequest
from gateway.dialects.fields import read_fields
from gateway.dialects.submissions.registry import Submissions
from gateway.dialects.submissions.submission import Submission
from gateway.dialects.submissions.words import Request
from gateway.http.access import CLIENT, Access
from gateway.http.json_body import read_object, read_packed, reply
from gateway.http.records import is_packed, send_records, wire_of


class _Ack(Struct):
    cursor: Annotated[int, Meta(ge=0)]


class _Named(Struct):
    groups: list[int] | None = None


@dataclass(eq=False)
class SubmissionRoutes:
    """Submissions: groups of rollouts under one id, kept until they are acked."""

    submissions: Submissions

    def add_routes(self, router: web.UrlDispatcher, access: Access) -> None:
        router.add_post("/v1/rollouts", access.for_inference(self._submit))
        router.add_get("/v1/rollouts/{id}", access.for_inference(self._read), allow_head=False)
        router.add_delete("/v1/rollouts/{id}", access.for_inference(self._cancel))
        router.add_post("/v1/rollouts/{id}/ack", access.for_inference(self._ack))
        router.add_post("/v1/rollouts/{id}/deadline", access.for_inference(self._let_deadline_pass))

    async def _submit(self, request: web.Request) -> web.StreamResponse:
        """Begin groups under an id, or join those of this id, and stream their samples as they end."""
        body = await _body(request)
        wire_of(request)
        asked = read_fields(Request, body)
        submission = await self.submissions.submit(request[CLIENT], asked.id, await asked.read_groups())
        if not asked.stream:
            return reply(self._head(submission), 202)
        return await self._stream(request, submission, submission.acked)

    async def _read(self, request: web.Request) -> web.StreamResponse:
        """Stream the samples after `cursor`, as they end."""
        submission = self._found(request)
        given = request.query.get("cursor")
        if given is not None and not (given.isascii() and given.isdecimal() and len(given) < 20):
            raise InvalidRequest(f"cursor = {given!r:.80} must be a whole number", param="cursor")
        return await self._stream(request, submission, submission.acked if given is None else int(given))

    async def _cancel(self, request: web.Request) -> web.Response:
        """End groups that run; samples that ended before stay readable."""
        submission = self._found(request)
        groups = await _groups(request, submission)
        await self.submissions.stop(submission, groups, "its client cancelled it")
        return reply(self._head(submission))

    async def _let_deadline_pass(self, request: web.Request) -> web.Response:
        """End groups that run as their deadline would, by their `on_deadline`."""
        submission = self._found(request)
        await self.submissions.stop(submission, await _groups(request, submission), "")
        return reply(self._head(submission))

    async def _ack(self, request: web.Request) -> web.Response:
        """Free the events up to `cursor`, which the client has."""
        ack = read_fields(_Ack, await _body(request))
        submission = self._found(request)
        await self.submissions.ack(submission, ack.cursor)
        return reply(self._head(submission))

    def _found(self, request: web.Request) -> Submission:
        return self.submissions.find(request[CLIENT], request.match_info["id"])

    def _head(self, submission: Submission) -> Json:
        return submission.report() | {"durable": self.submissions.is_durable}

    async def _stream(self, request: web.Request, submission: Submission, cursor: int) -> web.StreamResponse:
        wire_of(request)
        submission.check_cursor(cursor)
        return await send_records(request, self._head(submission), submission.read(cursor))


async def _groups(request: web.Request, submission: Submission) -> list[int] | None:
    """Return the groups that a body names; None where it names none."""
    groups = read_fields(_Named, await _body(request, required=False)).groups
    for group in groups or ():
        if not 0 <= group < len(submission.runs):
            raise InvalidRequest(f"groups: {submission.id!r} has no group {group}", param="groups")
    return groups


async def _body(request: web.Request, *, required: bool = True) -> Json:
    return await (read_packed(request) if is_packed(request) else read_object(request, required=required))
