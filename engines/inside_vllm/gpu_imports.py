"""For the warm process alone: what vLLM's processes on GPUs import as they start, and may once the GPU is known."""

from contextlib import suppress

from engines.inside_vllm.quick_start import tell_flashinfer

if tell_flashinfer():
    with suppress(ImportError):
        import flashinfer  # noqa: F401
