"""The replies of both gateways are equal."""

import asyncio, contextlib, dataclasses, os, sys
import aiohttp, orjson
from gateway.config.load import load
from loadtests import fleet as fleet_module
from loadtests.fleet import LocalFleet
from loadtests.studies.gateway_cost import canned_engine, gateway_cpu
from loadtests.studies.gateway_cost.beside import measure, reader
from loadtests.studies.gateway_cost.own_process import own_process


def norm(content):
    if content.startswith(b"data"):
        got = [orjson.loads(l[6:]) for l in content.split(b"\n\n") if l.startswith(b"data: {")]
    else:
        got = [orjson.loads(content)]
    for one in got:
        for key in ("id", "created"):
            one.pop(key, None)
    return got


async def run():
    config = load(None, gateway_cpu._SETTINGS)
    fleet_module._serve_gateway = measure.serve_patched
    fleet = LocalFleet(config)
    try:
        (info,) = await fleet.start_engines()
        async with contextlib.AsyncExitStack() as stack:
            canned = stack.enter_context(own_process(canned_engine.run, info.url))
            r = stack.enter_context(own_process(reader.run, canned.url))
            ours = dataclasses.replace(info, url=canned.url)
            today = await stack.enter_async_context(fleet.gateway(config, [ours]))
            os.environ["READER_URL"] = r.url
            beside = await stack.enter_async_context(fleet.gateway(config, [ours]))
            async with aiohttp.ClientSession() as s:
                for row in gateway_cpu.ROWS[:6]:
                    got = []
                    for url in (today.url, beside.url):
                        async with s.post(url + row.path, json={"model": "sim", **row.body}) as response:
                            got.append(norm(await response.read()))
                    a, b = got
                    print(row.name, len(a), len(b), a == b)
                    if a != b:
                        for x, y in zip(a, b):
                            if x != y:
                                print(
                                    {
                                        k: (str(x.get(k))[:150], str(y.get(k))[:150])
                                        for k in {*x, *y} - {"choices"}
                                        if x.get(k) != y.get(k)
                                    }
                                )
                                c, d = x["choices"][0], y["choices"][0]
                                print(
                                    {
                                        k: (str(c.get(k))[:150], str(d.get(k))[:150])
                                        for k in {*c, *d}
                                        if c.get(k) != d.get(k) or (k in c) != (k in d)
                                    }
                                )
                                break
    finally:
        await fleet.stop()


if __name__ == "__main__":
    asyncio.run(run())
