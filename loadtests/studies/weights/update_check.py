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
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

_HIDDEN = 256
_SIZES = {
    "hidden_size": _HIDDEN, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 1024,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.08,
}  # fmt: skip
_EXPERTS = {"head_dim": 64, "moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4}
_CONTEXT = 128
_PROMPTS, _PROMPT_TOKENS, _MADE_TOKENS = 32, 24, 8
_CHUNK_BYTES = 1 << 20
KINDS = (
    "dense", "tied head", "square transposed", "experts", "dense, LoRA on", "experts, LoRA on", "dense, fp8",
    "experts, fp8",
)  # fmt: skip
NEAR, NEAR_FP8 = 0.02, 0.25
"""Mean distances that an engine's own arithmetic may cause, in nats; a single token's may be 25 times as large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One version. Distances are means of absolute differences of log-probabilities, in nats."""

    version: int
    way: str
    distance: float
    farthest: float
    distance_before: float
    """From the weights of the version before: what an update that came to nothing would leave."""
    near: float = NEAR
    """The mean distance that is the engine's own arithmetic."""

    @property
    def is_right(self) -> bool:
        is_near = self.distance < self.near and self.farthest < 25 * self.near
        return is_near and self.distance_before > 10 * self.distance


def verdict(report: dict[str, Any]) -> str:
    """Return the words for the versions of one kind of model."""
    far = [max(one[key] for one in report["versions"]) for key in ("distance", "farthest")]
    nearest = min((one["distance_before"] for one in report["versions"]), default=math.nan)
    return (
        f"{'right' if report['is_right'] else 'WRONG'}; mean distance at most {far[0]:.4f}, of one token "
        f"{far[1]:.3f}, from the version before {nearest:.2f}"
    )


def device_kind(device: str) -> str:
    """Return GPU or CPU, as tables name devices."""
    return "GPU" if device.startswith("cuda") else "CPU"


class Subject:
    """One kind of model: its versions as transformers makes them, and the engine."""

    def __init__(self, kind: str, folder: Path, device: str) -> None:
        self._kind = kind
        self.device = device
        self._folder = folder
        self.has_lora = "LoRA" in kind
        self._is_fp8 = "fp8" in kind
        self.path(0)
        self._engine = self._started()
        self._worker: Any = None
        self._engine.collective_rpc(self._hold)

    def path(self, version: int) -> Path:
        """The version as a checkpoint; made at the first call."""
        folder = self._folder / f"v{version}"
        if not folder.exists():
            self.model(version).save_pretrained(folder)
        return folder

    def model(self, version: int) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        torch.manual_seed(version)
        return AutoModelForCausalLM.from_config(self._config(), dtype=torch.bfloat16).to(self.device).eval()

    def sent(self, version: int, *, in_memory: bool) -> dict[str, Any]:
        """Tensors by the names of the checkpoint, or those that transformers has in memory, which joins experts."""
        from safetensors.torch import load_file

        if in_memory:
            return {name: one.detach() for name, one in self.model(version).named_parameters()}
        files = sorted(self.path(version).glob("*.safetensors"))
        return {name: one.to(self.device) for file in files for name, one in load_file(file).items()}

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
        self._worker.load_snapshot(str(self.path(version)))

    def reload(self, tensors: dict[str, Any]) -> None:
        """By vLLM's own layerwise reload."""
        from engines.inside_vllm.base_layers import base_layers

        with base_layers(self._worker.get_model()) if self.has_lora else nullcontext():
            self._worker.reload_weights(weights_iterator=iter(tensors.items()))

    def parameters(self) -> dict[str, Any]:
        return {name: one.detach().clone() for name, one in self._worker.get_model().named_parameters()}

    def judged(self, version: int, way: str, before: int) -> Checked:
        prompts = _prompts()
        from vllm import SamplingParams

        asked = SamplingParams(max_tokens=_MADE_TOKENS, temperature=0, logprobs=0, prompt_logprobs=0, ignore_eos=True)
        outputs = self._engine.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
        told = [_told(output) for output in outputs]
        whole = [[*ids, *output.outputs[0].token_ids] for ids, output in zip(prompts, outputs, strict=True)]
        right, wrong = (differences(self.model(one), whole, told) for one in (version, before))
        mean = [sum(found) / len(found) for found in (right, wrong)]
        near = NEAR_FP8 if self._is_fp8 else NEAR
        return Checked(
            version=version, way=way, distance=mean[0], farthest=max(right), distance_before=mean[1], near=near
        )

    def _hold(self, worker: Any) -> None:
        self._worker = getattr(worker, "worker", worker)

    def _config(self) -> Any:
        from transformers import GPT2Config, Qwen2Config, Qwen3MoeConfig

        if self._kind == "square transposed":
            return GPT2Config(
                n_embd=_HIDDEN, n_layer=3, n_head=4, vocab_size=1024, n_positions=512, initializer_range=0.08
            )
        if self._kind.startswith("experts"):
            return Qwen3MoeConfig(**_SIZES, **_EXPERTS, decoder_sparse_step=1, tie_word_embeddings=False)
        return Qwen2Config(**_SIZES, tie_word_embeddings=self._kind == "tied head")

    def _started(self) -> Any:
        from vllm import LLM

        more: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8} if self.has_lora else {}
        if self._is_fp8:
            more["quantization"] = "fp8"
        if self.device == "cuda":
            graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
            more |= {"attention_backend": "FLASH_ATTN", "compilation_config": graphs}
        else:
            more |= {"enforce_eager": True}
        return LLM(
            model=str(self.path(0)),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=_CONTEXT,
            max_num_seqs=_PROMPTS,
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
        return _checked(Subject(kind, Path(folder), device), kind, updates)


def _checked(subject: Subject, kind: str, updates: int) -> dict[str, Any]:
    report: dict[str, Any] = {
        "engine": f"vllm {version_of('vllm')}", "device": device_kind(subject.device), "transport": "the worker alone",
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


def _prompts() -> list[list[int]]:
    return [[(7 * row + 13 * place * (row + 1)) % 1000 for place in range(_PROMPT_TOKENS)] for row in range(_PROMPTS)]


def _told(output: Any) -> list[float]:
    """Log-probabilities of all tokens but the first."""
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    found = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return [one[token].logprob for one, token in zip(found, ids[1:], strict=True)]


def differences(model: Any, whole: Sequence[Sequence[int]], told: Sequence[Sequence[float]]) -> list[float]:
    """Return the distances of log-probabilities from those of `model`, in nats, token by token."""
    import torch

    ids = torch.tensor(whole, device=model.device)
    with torch.no_grad():
        said = model.float()(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0].tolist()
    return [abs(x - y) for row, other in zip(said, told, strict=True) for x, y in zip(row, other, strict=True)]


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
