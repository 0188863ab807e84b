"""Random bad requests for the rollout URL: bodies, heads and whole exchanges that no client should send."""

import gzip
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

Json = dict[str, Any]

INFERENCE_KEY, ADMIN_KEY = "fuzz", "fuzz-admin"

_MESSAGES = [{"role": "user", "content": "hello"}]
_SAMPLING = {"max_tokens": 4, "n": 2, "temperature": 1.0, "seed": 3, "top_p": 0.9, "logprobs": 1, "stop": ["x"]}
# A right body for each route, from which bad ones are made.
INFERENCE: dict[tuple[str, str], Json] = {
    ("POST", "/v1/completions"): {"model": "sim", "prompt": [[5, 6, 7], [8, 9]], "return_token_ids": True, **_SAMPLING},
    ("POST", "/v1/chat/completions"): {"model": "sim", "messages": _MESSAGES, **_SAMPLING, "logprobs": True},
    ("POST", "/inference/v1/generate"): {"token_ids": [5, 6, 7], "sampling_params": _SAMPLING, "model": "sim"},
    ("POST", "/tokenize"): {"model": "sim", "prompt": "hello", "add_special_tokens": True},
    ("POST", "/detokenize"): {"model": "sim", "tokens": [70, 71]},
    ("POST", "/v1/completions/render"): {"model": "sim", "prompt": "hello"},
    ("POST", "/v1/chat/completions/render"): {"model": "sim", "messages": _MESSAGES},
    ("POST", "/generate/"): {"prompts": ["a", "b"], "n": 2, "max_tokens": 4, "temperature": 1.0, "top_k": -1},
    ("POST", "/chat/"): {"messages": [_MESSAGES], "n": 1, "max_tokens": 4},
    ("POST", "/get_sequence_logprobs/"): {"sequences": [[5, 6, 7]], "prompt_lengths": [1]},
    **{
        ("GET", path): {}
        for path in (
            "/v1/models", "/v1/models/sim", "/v1/models/%ff%00", "/version", "/tokenizer_info", "/server_info",
            "/status", "/metrics", "/health", "/ping", "/weight_info", "/v1/weight_updates",
            "/v1/weights", "/v1/weight_canary", "/dashboard", "/dashboard.json", "/", "/nowhere",
        )
    },
}  # fmt: skip
# Routes for admin keys, without those of which a right call would stop the fleet.
ADMIN: dict[tuple[str, str], Json] = {
    ("POST", "/update_weights"): {"update_info": {"names": ["w"], "dtype_names": ["float32"], "shapes": [[4, 4]]}},
    ("POST", "/finish_weight_update"): {"canary_logprobs": [0.0]},
    ("POST", "/v1/weight_updates"): {"transport": "store", "snapshot": "draft-1", "version": 3},
    ("POST", "/v1/load_lora_adapter"): {"lora_name": "a", "lora_path": "/nowhere"},
    ("POST", "/v1/unload_lora_adapter"): {"lora_name": "a"},
    ("GET", "/v1/weight_store"): {},
    ("GET", "/get_world_size"): {},
}
_METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "get", "BREW", "PRI")
_FIELDS = (
    "n", "max_tokens", "prompt", "messages", "stream", "stream_options", "model", "seed", "temperature", "logprobs",
    "stop", "echo", "min_version", "max_staleness", "session_id", "cache_salt", "priority", "structured_outputs",
    "response_format", "tools", "logit_bias", "best_of", "prompt_logprobs",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BadRequest:
    """The bytes of one request, and what it is. `is_complete` is False where a server may wait for more."""

    what: str
    content: bytes
    is_complete: bool = True


def bad_requests(seed: int, count: int) -> list[BadRequest]:
    """Return the same requests for the same seed."""
    draw = random.Random(seed)
    return [_one(draw) for _ in range(count)]


def _one(draw: random.Random) -> BadRequest:
    is_admin = draw.random() < 0.1
    (method, path), right = draw.choice(list((ADMIN if is_admin else INFERENCE).items()))
    body = _body(draw, right)
    headers = {"Host": "127.0.0.1", "Content-Type": "application/json", "Connection": "close"}
    headers["Authorization"] = f"Bearer {ADMIN_KEY if is_admin else INFERENCE_KEY}"
    if draw.random() < 0.07:
        method = draw.choice(_METHODS)
    if draw.random() < 0.05:
        path += draw.choice(("?", "?n=1&n=2", "/../..", "%2e%2e/", "?" + "a" * 5000, "//", ";x", "?\xff"))
    if draw.random() < 0.1:
        body = _encoded(draw, body, headers)
    return draw.choices((_plain, _odd_head, _half, _odd_length, _chunked), (70, 12, 6, 6, 6))[0](
        draw, method, path, headers, body
    )


def _body(draw: random.Random, right: Json) -> bytes:
    kind = draw.random()
    if kind < 0.7:
        return orjson.dumps(_mutated(draw, right), option=orjson.OPT_NON_STR_KEYS)
    if kind < 0.8:
        whole = orjson.dumps(right)
        return whole[: draw.randrange(len(whole) + 1)]
    return draw.choice(_RAW)(draw)


_RAW: tuple[Callable[[random.Random], bytes], ...] = (
    lambda draw: b"",
    lambda draw: b"null",
    lambda draw: b"[" * draw.choice((10, 1000, 100_000)),
    lambda draw: b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}",
    lambda draw: b'{"a":' * 2000 + b"1" + b"}" * 2000,
    lambda draw: b'{"prompt": "a", "prompt": [1], "n": 1, "n": 2}',
    lambda draw: b'{"prompt": "a", "temperature": NaN, "max_tokens": 1e999}',
    lambda draw: b'{"prompt": "\\ud800", "max_tokens": 2}',
    lambda draw: b'{"prompt": "\xff\xfe", "max_tokens": 2}',
    lambda draw: "{'prompt': 'a'}".encode("utf-16"),
    lambda draw: b'{"prompt": [' + b"1," * 50_000 + b"1]}",
    lambda draw: b'{"prompt": "a", "max_tokens": ' + b"9" * 400 + b"}",
    lambda draw: draw.randbytes(draw.randrange(300)),
)


def _mutated(draw: random.Random, right: Json) -> Any:
    """Return a right body with a few wrong things in it, at any depth."""
    body = orjson.loads(orjson.dumps(right))
    for _ in range(draw.randint(1, 3)):
        place = body
        while isinstance(place, dict) and place and draw.random() < 0.3:
            inner = place[draw.choice(sorted(place))]
            if not isinstance(inner, dict):
                break
            place = inner
        key = draw.choice([*place, *_FIELDS]) if draw.random() < 0.95 else _text(draw)
        if draw.random() < 0.15:
            place.pop(key, None)
        else:
            place[key] = _junk(draw)
    return body


def _junk(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(12 if depth < 3 else 8)
    match kind:
        case 0:
            return None
        case 1:
            return draw.choice((True, False))
        case 2:
            return draw.choice((0, -1, 1, 2**31, 2**63 - 1, -(2**63), 10**9, 65_537))
        case 3:
            return draw.choice((0.0, -0.5, 1.5, 1e300, -1e-300, 2.0))
        case 4:
            return draw.choice(("1", "4", "-1", "", "null", "true", "NaN", "0x10", "1e3"))
        case 5 | 6:
            return _text(draw)
        case 7:
            return draw.choice(([], {}, [[]], [{}], [None], {"": None}))
        case 8 | 9:
            return [_junk(draw, depth + 1) for _ in range(draw.randrange(5))]
        case _:
            return {draw.choice(_FIELDS): _junk(draw, depth + 1) for _ in range(draw.randrange(4))}


def _text(draw: random.Random) -> str:
    """Return text of any planes, without surrogates, which JSON's encoder refuses."""
    points = (draw.randrange(0x80), draw.randrange(0xD800), draw.randrange(0xE000, 0x110000))
    random_text = chr(draw.choice(points)) * draw.randrange(20)
    return draw.choice(("", "a", "\x00", "\u202e", "\ufeff", "a" * 3000, random_text))


def _encoded(draw: random.Random, body: bytes, headers: dict[str, str]) -> bytes:
    """Return the body compressed: right, broken, mislabelled, or much larger inside."""
    kind = draw.randrange(6)
    headers["Content-Encoding"] = draw.choice(("gzip", "deflate", "br", "zstd", "x", "gzip, gzip"))
    match kind:
        case 0:
            return _gzipped(body)
        case 1:
            return zlib.compress(body)
        case 2:
            headers["Content-Encoding"] = "gzip"
            return _BOMB
        case 3:
            return _gzipped(body)[:-5]
        case 4:
            return _gzipped(_gzipped(body))
        case _:
            return body


def _gzipped(body: bytes) -> bytes:
    """Return the body as gzip without the time, so that a seed gives the same bytes."""
    return gzip.compress(body, mtime=0)


_BOMB = gzip.compress(b'{"model": "sim", "prompt": "' + b" " * (400 << 20) + b'"}', compresslevel=1)


def _plain(draw: random.Random, method: str, path: str, headers: dict[str, str], body: bytes) -> BadRequest:
    return BadRequest(f"{method} {path[:60]}", _head(method, path, headers, len(body)) + body)


def _odd_head(draw: random.Random, method: str, path: str, headers: dict[str, str], body: bytes) -> BadRequest:
    types = ("", "text/plain", "application/json; charset=utf-16", "multipart/form-data", "x/x; q")
    odd = {
        "Content-Type": draw.choice(types),
        "X-Request-Id": draw.choice(("", "a" * 9000, "é\x7f", "../..", '"', "a b")),
        "X-Session-ID": draw.choice(("", "a" * 5000, "\u00ff", "\t")),
        "Authorization": draw.choice(("", "Bearer", "Basic eA==", "Bearer " + "x" * 5000, "bearer fuzz")),
        "Origin": draw.choice(("null", "http://[", "http://evil.example", "\x01")),
        "Host": draw.choice(("", "[::1", "evil.example", "a" * 3000, "127.0.0.1:99999")),
        "Expect": "100-continue",
        "X-Forwarded-For": draw.choice(("1.2.3.4", "::1", "garbage", ",,")),
        "Accept": draw.choice(("text/event-stream", "image/png", "")),
        "Range": "bytes=0-1",
        "Upgrade": "websocket",
        "Traceparent": "00-zz",
        "X-Large": "a" * draw.choice((8000, 70_000)),
    }
    for name in draw.sample(sorted(odd), draw.randint(1, 3)):
        headers[name] = odd[name]
    version = draw.choice(("1.1", "1.1", "1.0", "2.0", "0.9", "x"))
    extra = "".join(f"X-{place}: {place}\r\n" for place in range(draw.choice((0, 0, 300))))
    return BadRequest(
        f"{method} {path[:60]} with an odd head", _head(method, path, headers, len(body), version, extra) + body
    )


def _half(draw: random.Random, method: str, path: str, headers: dict[str, str], body: bytes) -> BadRequest:
    whole = _head(method, path, headers, len(body) + 1) + body
    return BadRequest(f"{method} {path[:60]} cut off", whole[: draw.randrange(len(whole))], is_complete=False)


def _odd_length(draw: random.Random, method: str, path: str, headers: dict[str, str], body: bytes) -> BadRequest:
    length = draw.choice(("-1", "x", "1e3", "99999999999999999999", "", str(len(body) + 5), str(max(0, len(body) - 3))))
    head = _head(method, path, headers | {"Content-Length": length}, None)
    return BadRequest(f"{method} {path[:60]} of length {length!r}", head + body, is_complete=False)


def _chunked(draw: random.Random, method: str, path: str, headers: dict[str, str], body: bytes) -> BadRequest:
    chunks = draw.choice(
        (
            b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body),
            b"%x;a=b\r\n%b\r\n0\r\n\r\n" % (len(body), body),
            b"zz\r\n" + body,
            b"-5\r\n" + body,
            b"ffffffffffffffff\r\n" + body,
            b"%x\r\n%b" % (len(body) + 9, body),
        )
    )
    head = _head(method, path, headers | {"Transfer-Encoding": "chunked"}, None)
    return BadRequest(f"{method} {path[:60]} in odd chunks", head + chunks, is_complete=False)


def _head(
    method: str, path: str, headers: dict[str, str], length: int | None, version: str = "1.1", extra: str = ""
) -> bytes:
    lines = [f"{method} {path} HTTP/{version}", *(f"{name}: {value}" for name, value in headers.items())]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return ("\r\n".join(lines) + "\r\n" + extra + "\r\n").encode("utf-8", errors="replace")
