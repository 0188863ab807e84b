"""The server's own figures during a run: its engines' load from /metrics, a gateway's from /status, and the memory and
CPU of a process."""

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import gevent
import psutil
from gevent import Greenlet

from gateway.fleet.watch.engine_page import read_load, read_total
from loadtests.run import Run

_EVERY_S = 1.0
# An engine that is busy answers late, and a late figure is worth more than none.
_TIMEOUT_S = 30.0
_PREEMPTIONS = ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total")


class ServerWatch:
    """Records each page a second after its last answer, until its end. A server without one leaves it out."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._url = str(run.settings.host).rstrip("/")
        self._preemptions: float | None = None
        self._watchers: dict[Greenlet, tuple[str, Callable[[str], None]]] = {}
        self._process_watcher: Greenlet | None = None

    def start(self, **_: Any) -> None:
        readers = (("/metrics", self._read_metrics), ("/status", self._read_status))
        self._watchers = {gevent.spawn(self._watch, *reader): reader for reader in readers}
        if self._run.settings.watch_pid:
            self._process_watcher = gevent.spawn(self._watch_process, self._run.settings.watch_pid)

    def stop(self, **_: Any) -> None:
        """Stop to watch the process; replies that are read to their end belong to the run."""
        gevent.killall(list(filter(None, [self._process_watcher])))

    def end(self, **_: Any) -> None:
        """Read once more what was read until now: a short run on a busy machine has no other figures of its end."""
        last = [reader for watcher, reader in self._watchers.items() if not watcher.dead]
        gevent.killall(list(self._watchers))
        for reader in last:
            self._look(*reader)

    def _watch(self, path: str, read: Callable[[str], None]) -> None:
        while self._look(path, read):
            gevent.sleep(_EVERY_S)

    def _look(self, path: str, read: Callable[[str], None]) -> bool:
        """Read a page. Return False where the server has none."""
        try:
            read(self._get(path))
        except urllib.error.HTTPError as error:
            error.close()
            print(f"{self._url}{path} answered {error.code}: the report lacks its figures", file=sys.stderr)
            return False
        except (OSError, ValueError):
            pass  # no answer in time, or half of one
        return True

    def _watch_process(self, pid: int) -> None:
        """Record memory in MiB and CPU in cores each second."""
        try:
            process = psutil.Process(pid)
            process.cpu_percent()
            while True:
                gevent.sleep(_EVERY_S)
                self._record("watched_mib", process.memory_info().rss / 2**20)
                self._record("watched_cores", process.cpu_percent() / 100)
        except psutil.NoSuchProcess:
            print(f"--watch-pid {pid}: the process does not exist or has ended", file=sys.stderr)

    def _get(self, path: str) -> str:
        key = self._run.settings.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(self._url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as page:
            body: bytes = page.read()
        return body.decode("utf-8", errors="replace")

    def _read_metrics(self, page: str) -> None:
        self._record("machine_cpu", psutil.cpu_percent() / 100)  # since the call before
        load, preemptions = read_load(page), read_total(page, _PREEMPTIONS)
        if read_total(page, ("vllm:num_requests_running", "sglang:num_running_reqs")) is None:
            return
        self._record("engine_running", load.running)
        self._record("engine_waiting", load.waiting)
        self._record("engine_kv", load.kv_usage)
        if preemptions is not None:
            before = preemptions if self._preemptions is None else self._preemptions
            self._record("engine_preempted", max(0.0, preemptions - before))
            self._preemptions = preemptions

    def _record(self, name: str, value: float) -> None:
        self._run.record(name, value, is_beside=True)

    def _read_status(self, page: str) -> None:
        status = json.loads(page)
        replicas = status.get("replicas") if isinstance(status, dict) else None
        if not isinstance(replicas, list):
            return
        serving = [replica for replica in replicas if replica.get("state") == "SERVING"]
        self._record("gateway_queue", status.get("queue_length", 0))
        self._record("replicas_serving", len(serving))
        if versions := [replica.get("weight_version") or 0 for replica in serving]:
            self._record("weight_version", max(versions))
