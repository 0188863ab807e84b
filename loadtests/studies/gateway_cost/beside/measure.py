"""As gateway_cpu, with a gateway whose token work is beside its engine, and the CPU of the reader."""

import argparse, asyncio, contextlib, dataclasses, os, statistics
import orjson

from gateway.config.load import load
from loadtests import fleet as fleet_module
from loadtests.fleet import LocalFleet
from loadtests.studies.gateway_cost import canned_engine, gateway_cpu, pass_through
from loadtests.studies.gateway_cost.beside import reader
from loadtests.studies.gateway_cost.own_process import Served, own_process

_serve_gateway = fleet_module._serve_gateway


def serve_patched(config, infos, pipe):
    from loadtests.studies.gateway_cost.beside import patched

    if os.environ.get("READER_URL"):
        patched.apply()
    _serve_gateway(config, infos, pipe)


async def run(args):
    config = load(
        None,
        (*gateway_cpu._SETTINGS, "engine.sim.decode_step_s=0.02", "engine.max_num_seqs=512")
        if args.paced
        else gateway_cpu._SETTINGS,
    )
    fleet_module._serve_gateway = serve_patched
    fleet = LocalFleet(config)
    readers = {}

    class Both(gateway_cpu.Load):
        async def seconds_a_request(self, server, row):
            before = readers["reader"].cpu_s
            seconds = await super().seconds_a_request(server, row)
            if server is servers["beside"]:
                seen.setdefault(row.name, []).append((readers["reader"].cpu_s - before) / row.requests)
            return seconds

    seen = {}
    gateway_cpu.Load = Both
    try:
        (info,) = await fleet.start_engines()
        async with contextlib.AsyncExitStack() as stack:
            canned = (
                Served(info.url, info.pid)
                if args.paced
                else stack.enter_context(own_process(canned_engine.run, info.url))
            )
            readers["reader"] = stack.enter_context(own_process(reader.run, canned.url))
            ours = dataclasses.replace(info, url=canned.url)
            today = await stack.enter_async_context(fleet.gateway(config, [ours]))
            os.environ["READER_URL"] = readers["reader"].url
            gateway = await stack.enter_async_context(fleet.gateway(config, [ours]))
            servers = {
                "beside": Served(gateway.url, gateway.pid),
                "today": Served(today.url, today.pid),
                "pass": stack.enter_context(own_process(pass_through.run, canned.url)),
            }
            if args.paced:
                gateway_cpu.ROWS = (
                    gateway_cpu.Row("paced 256/512", "/v1/completions", gateway_cpu._completion(256, 512), 256, 256),
                    gateway_cpu.Row(
                        "paced stream 256/512",
                        "/v1/completions",
                        gateway_cpu._completion(256, 512, stream=True),
                        256,
                        256,
                    ),
                )
            rows = [row for row in gateway_cpu.ROWS if not args.rows or row.name in args.rows]
            costs = await gateway_cpu.measured(servers, rows, args.rounds)
    finally:
        await fleet.stop()
    ratio = gateway_cpu.pair_ratios
    print("| case | today | beside | reader | pass | today/pass | beside/pass | (beside+reader)/today |")
    for name, by in costs.items():
        own = seen[name][1:]
        both = [a + b for a, b in zip(by["beside"], own)]
        med = statistics.median
        us = lambda v: f"{med(v) * 1e6:,.0f}"
        print(
            "|",
            name,
            "|",
            us(by["today"]),
            "|",
            us(by["beside"]),
            "|",
            us(own),
            "|",
            us(by["pass"]),
            "|",
            f"{med(ratio(by['today'], by['pass'])):.2f} | {med(ratio(by['beside'], by['pass'])):.2f} | {med(ratio(both, by['today'])):.2f} |",
        )
    if args.json:
        open(args.json, "wb").write(orjson.dumps({"costs": costs, "reader": seen}))


parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--rows", nargs="*")
parser.add_argument("--json")
parser.add_argument("--paced", action="store_true")
if __name__ == "__main__":
    asyncio.run(run(parser.parse_args()))
