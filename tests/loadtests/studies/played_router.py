"""A router with the flags of vLLM's and SGLang's: requests in turn to its workers."""

import argparse
import itertools

import aiohttp
from aiohttp import web


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--worker-urls", nargs="+", required=True)
    parser.add_argument("--prometheus-host", required=True)
    parser.add_argument("--prometheus-port", type=int, required=True)
    args = parser.parse_args()
    workers = itertools.cycle(args.worker_urls)

    async def passed_on(request: web.Request) -> web.Response:
        async with (
            aiohttp.ClientSession() as session,
            session.post(next(workers) + request.path, data=await request.read(), headers=request.headers) as response,
        ):
            return web.Response(status=response.status, body=await response.read())

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_post("/v1/completions", passed_on)
    web.run_app(app, host=args.host, port=args.port, print=None)


if __name__ == "__main__":
    main()
