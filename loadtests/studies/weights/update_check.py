"""Whether updates leave the weights that were sent: small random models in a real vLLM, judged by transformers.

    python -m loadtests.studies.weights.update_check dense experts "experts, LoRA on" --updates 10 --json out.json

Each update goes through the worker's extension as the gateway has it do: packed chunks through the tee, in place. After
each, log-probabilities of prompts and of tokens that the engine has made (by CUDA graphs) are compared with those of
transformers on the weights that were sent, and with those on the weights before, which are far away. One update is
aborted half-way and the version before is loaded from its folder. At the end vLLM's own layerwise reload loads the same
weights, which has to leave the same bytes. With `--device cpu` vLLM's CPU build is judged, which packs weights and so
loads by that reload alone.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadtests.studies.weights.checked_models import (
    KINDS,
    MADE_TOKENS,
    PROMPTS,
    Checked,
    Models,
    device_kind,
    prompts,
    verdict,
)

_CONTEXT = 128
_CHUNK_BYTES = 1 << 20


class Subject:
    """A vLLM engine with the first version of one kind of model."""

    def __init__(self, models: Models, device: str) -> None:
        self.models = models
        self.device = device
        self.has_lora = "LoRA" in models.kind
        self._engine = self._started()
        self._worker: Any = None
        self._engine.collective_rpc(self._hold)

    def sent(self, version: int, *, in_memory: bool) -> dict[str, Any]:
        """Tensors by the names of the checkpoint, or those that transformers has in memory, which joins experts."""
        if in_memory:
            return {name: one.detach() for name, one in self.models.version(version).named_parameters()}
        return self.models.sent(version)

    def obstacle(self) -> str:
        return str(self._worker.plan_updates()["obstacle"])

    def update(self, tensors: dict[str, Any], *, whole: bool = True) -> dict[str, str]:
        """One update, or the first half of one that is aborted; digests of what was received."""
        worker = self._worker
        worker.open_receipt()
        worker.start_weight_update()
        chunks = list(_packed(tensors))
        for chunk in chunks if whole else chunks[: len(chunks) // 2]:
            worker.weight_transfer_engine.model.load_weights(chunk)
        if not whole:
            worker.drop_receipt()
            worker.end_update()
            return {}
        digests: dict[str, str] = worker.close_receipt()
        worker.finish_weight_update()
        return digests

    def load_snapshot(self, version: int) -> None:
        self._worker.load_snapshot(str(self.models.path(version)))

    def reload(self, tensors: dict[str, Any]) -> None:
        """By vLLM's own layerwise reload."""
        from engines.inside_vllm.base_layers import base_layers

        with base_layers(self._worker.get_model()) if self.has_lora else nullcontext():
            self._worker.reload_weights(weights_iterator=iter(tensors.items()))

    def parameters(self) -> dict[str, Any]:
        return {name: one.detach().clone() for name, one in self._worker.get_model().named_parameters()}

    def judged(self, version: int, way: str, before: int) -> Checked:
        from vllm import SamplingParams

        asked = SamplingParams(max_tokens=MADE_TOKENS, temperature=0, logprobs=0, prompt_logprobs=0, ignore_eos=True)
        outputs = self._engine.generate([{"prompt_token_ids": ids} for ids in prompts()], asked, use_tqdm=False)
        made = [list(output.outputs[0].token_ids) for output in outputs]
        return self.models.judged(version, way, before, made, list(map(_told, outputs)))

    def _hold(self, worker: Any) -> None:
        self._worker = getattr(worker, "worker", worker)

    def _started(self) -> Any:
        from vllm import LLM

        more: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8} if self.has_lora else {}
        if "fp8" in self.models.kind:
            more["quantization"] = "fp8"
        if self.device == "cuda":
            graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
            more |= {"attention_backend": "FLASH_ATTN", "compilation_config": graphs}
        else:
            more |= {"enforce_eager": True}
        return LLM(
            model=str(self.models.path(0)),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=_CONTEXT,
            max_num_seqs=PROMPTS,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=1 << 28,
            disable_log_stats=True,
            worker_extension_cls="engines.inside_vllm.worker.WeightWorker",
            weight_transfer_config={"backend": "nccl" if self.device == "cuda" else "gloo"},
            **more,
        )


def check(kind: str, updates: int, device: str) -> dict[str, Any]:
    """All versions of one kind. Once in a process: what vLLM sets up for one model does not serve another kind."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    with tempfile.TemporaryDirectory() as folder:
        return _checked(Subject(Models(kind, Path(folder), device), device), kind, updates)


def _checked(subject: Subject, kind: str, updates: int) -> dict[str, Any]:
    import vllm

    report: dict[str, Any] = {
        "engine": f"vllm {vllm.__version__}", "device": device_kind(subject.device), "transport": "the worker alone",
        "kind": kind, "obstacle": subject.obstacle(), "versions": [],
    }  # fmt: skip
    seconds = []
    for version in range(1, updates + 1):
        in_memory = version % 2 == 0
        tensors = subject.sent(version, in_memory=in_memory)
        began = time.perf_counter()
        digests = subject.update(tensors)
        seconds.append(time.perf_counter() - began)
        if digests != {name: _digest(tensor) for name, tensor in tensors.items()}:
            raise SystemExit(f"{kind}: the digests of version {version} are not those of the bytes that were sent")
        way = "names in memory" if in_memory else "names of the checkpoint"
        report["versions"].append(subject.judged(version, way, version - 1))
    subject.update(subject.sent(updates + 1, in_memory=True), whole=False)
    subject.load_snapshot(updates)
    report["versions"].append(subject.judged(updates, "after an aborted update", updates + 1))
    ours = subject.parameters()
    subject.update(subject.sent(updates + 1, in_memory=True))
    subject.reload(subject.sent(updates, in_memory=False))
    theirs = subject.parameters()
    report["differ_from_vllms_reload"] = [name for name, one in ours.items() if not one.equal(theirs[name])]
    report["update_s"] = seconds
    report["is_right"] = all(one.is_right for one in report["versions"]) and not report["differ_from_vllms_reload"]
    report["versions"] = [asdict(one) for one in report["versions"]]
    return report


def _packed(tensors: dict[str, Any]) -> Iterator[list[tuple[str, Any]]]:
    """In chunks as a receiver unpacks them: each tensor is a view of the chunk's bytes."""
    import torch
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors, unpack_tensor

    waiting = iter(tensors.items())
    while (chunk := pack_tensors(waiting, lambda named: named[1], _CHUNK_BYTES)) is not None:
        yield unpack_tensor(chunk.packed_tensor, chunk.names, chunk.shapes, chunk.dtypes, chunk.tensor_sizes)
        if chunk.packed_tensor.is_cuda:
            torch.cuda.synchronize()


def _digest(tensor: Any) -> str:
    """The number that engines/transfer/device_sum.py describes, by numpy; on the host, the digest there."""
    import numpy
    import torch

    from engines.transfer.tensor_bytes import digest_on_host

    if not tensor.is_cuda:
        return digest_on_host(tensor)
    content = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy()
    words = numpy.pad(content, (0, -len(content) % 4)).view(numpy.int32).astype(numpy.int64).view(numpy.uint64)
    factor = numpy.arange(1, len(words) + 1, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
    factor = factor ^ (factor.view(numpy.int64) >> 29).view(numpy.uint64)
    total = (words * (factor * numpy.uint64(0xBF58476D1CE4E5B9) | numpy.uint64(1))).sum(dtype=numpy.uint64)
    return f"sum64:{(int(total) + tensor.nbytes) % (1 << 64):016x}"


def _told(output: Any) -> list[float]:
    """Log-probabilities of all tokens but the first."""
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    found = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return [one[token].logprob for one, token in zip(found, ids[1:], strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 where a version is not what was sent."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.studies.weights.update_check", description=__doc__.splitlines()[0]
    )
    parser.add_argument("kinds", nargs="+", choices=KINDS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    reports = []
    for kind in args.kinds:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
            reports.append(report := alone.submit(check, kind, args.updates, args.device).result())
        print(
            f"{kind}: {verdict(report)}; obstacle {report['obstacle'] or 'none'}; "
            f"{len(report['differ_from_vllms_reload'])} parameters differ from vLLM's own reload",
            flush=True,
        )
        if args.json:
            args.json.write_text(json.dumps(reports, indent=2))
    return 0 if all(report["is_right"] for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
