"""Loading a Transformers model, and proving that edits reach its residual stream."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from brainpatch.backends import families
from brainpatch.errors import BackendNotAvailable, EngineError
from brainpatch.patch.compatibility import ModelDescriptor

SNAPSHOT = re.compile(r"models--(.+?)--(.+?)[/\\]snapshots[/\\]([0-9a-f]{40})$")


class Loaded(NamedTuple):
    """A model that is ready: `blocks` are its decoder blocks, `width` that of its residual stream."""

    model: Any
    tokenizer: Any
    blocks: Any
    descriptor: ModelDescriptor
    context: int | None
    end_ids: frozenset[int]
    pad_id: int
    can_be_padded: bool


def load(
    model: Any,
    *,
    revision: str | None,
    device: str,
    dtype: Any,
    trust_remote_code: bool,
    model_id: str | None,
    tokenizer: Any,
    arguments: Mapping[str, Any],
) -> Loaded:
    """A model by hub id, folder or object, checked and proven. See `TransformersBackend.load_model`."""
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        raise BackendNotAvailable("BP501", f"transformers cannot be imported: {error}") from None
    name = str(model) if isinstance(model, (str, PurePath)) else str(model.config._name_or_path)
    if isinstance(model, (str, PurePath)):
        shared = {"revision": revision, "trust_remote_code": trust_remote_code}
        files = {key: arguments[key] for key in ("gguf_file", "subfolder") if key in arguments}
        try:
            families.refuse_unfit(transformers.AutoConfig.from_pretrained(name, **shared, **files))
            tokenizer = tokenizer or transformers.AutoTokenizer.from_pretrained(name, **shared, **files)
            model = _weights(name, device, dtype, {**shared, **arguments})
        except EngineError:
            raise
        except Exception as error:  # the library raises whatever a damaged or unknown model makes it raise
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise EngineError("BP507", f"{name}: {reason[0]}") from error
    else:
        families.refuse_unfit(model.config)
        _refuse_object(model, arguments)
        if tokenizer is None:
            tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    refuse_compiled(model)
    _, blocks = families.find_blocks(model, model.config)
    width = prove(model, blocks)
    return Loaded(
        model,
        tokenizer,
        blocks,
        _descriptor(model, name, model_id, revision, width, len(blocks)),
        families.context_length(model.config),
        _end_ids(model, tokenizer),
        next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0),
        families.can_be_padded(model.config),
    )


def refuse_compiled(model: Any) -> None:
    """Refuse a model that was compiled: hooks that come later would not run, and nothing would say so."""
    if hasattr(model, "_orig_mod"):
        raise EngineError("BP505", "this is what torch.compile returned")
    for name, module in model.named_modules():
        if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
            raise EngineError("BP505", f"the module {name or 'at the top'} was compiled")


def _refuse_object(model: Any, arguments: Mapping[str, Any]) -> None:
    if arguments:
        raise EngineError(
            "BP507", f"a loaded model takes no {', '.join(arguments)}", "Pass these when you load the model."
        )
    if model.training:
        raise EngineError("BP507", "the model is in training mode", "Call model.eval() first.")


def _weights(name: str, device: str, dtype: Any, arguments: dict[str, Any]) -> Any:
    import torch
    import transformers

    if device == "auto":
        mps = torch.backends.mps.is_available()
        device = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    if dtype == "auto":
        dtype = {"cuda": torch.bfloat16, "mps": torch.float16}.get(device.split(":")[0], torch.float32)
    elif isinstance(dtype, str):
        dtype = getattr(torch, {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(dtype, dtype))
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **arguments)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        # Image models around a text model have no causal class of their own.
        model = transformers.AutoModelForImageTextToText.from_pretrained(name, dtype=dtype, **arguments)
    if "device_map" not in arguments and getattr(model, "quantization_method", None) is None:
        model.to(device)
    return model.eval()


def _descriptor(
    model: Any, name: str, model_id: str | None, revision: str | None, width: int, count: int
) -> ModelDescriptor:
    architectures = getattr(model.config, "architectures", None) or [type(model).__name__]
    commit = getattr(model.config, "_commit_hash", None) or revision
    if model_id is None and (snapshot := SNAPSHOT.search(name)):
        model_id, commit = f"{snapshot[1]}/{snapshot[2]}", snapshot[3]
    return ModelDescriptor(model_id or name, width, count, architectures[0], commit)


def _end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end an answer, as the model's author set them."""
    own = getattr(model.generation_config, "eos_token_id", None)
    listed = own if isinstance(own, list) else [own]
    return frozenset(int(i) for i in (*listed, tokenizer.eos_token_id) if i is not None)


def prove(model: Any, blocks: Any) -> int:
    """The width of the residual stream, after a proof on three tokens.

    A first pass shows that each block runs once and returns one stream [rows, columns, width], and that this is
    what the next block gets: else BP504. A second one shows that an edit as large as the stream enters the next
    block as it is, and moves the logits: else BP506.
    """
    import torch

    ids = torch.tensor([[1, 2, 3]], device=model.device)
    entering, leaving, plain = _pass(model, blocks, ids, {})
    for layer, outputs in enumerate(leaving):
        if len(outputs) != 1:
            raise EngineError("BP504", f"block {layer} ran {len(outputs)} times in one forward pass")
        stream = outputs[0]
        if not isinstance(stream, torch.Tensor) or stream.ndim != 3 or stream.shape[:2] != ids.shape:
            found = list(stream.shape) if isinstance(stream, torch.Tensor) else type(stream).__name__
            raise EngineError(
                "BP504", f"block {layer} returns {found}, not one stream [rows, columns, width]"
            )
        if layer and not _among(leaving[layer - 1][0], entering[layer]):
            raise EngineError("BP504", f"what block {layer - 1} returns is not what block {layer} gets")
    layer = (len(blocks) - 1) // 2  # one that has a next, where there are two
    stream = leaving[layer][0]
    generator = torch.Generator().manual_seed(0)
    edit = torch.randn(stream.shape[-1], generator=generator).to(stream.device, stream.dtype)
    edit *= stream[0, -1].norm() / edit.norm()
    entering, _, edited = _pass(model, blocks, ids, {layer: edit})
    if len(blocks) > 1 and not _among(stream + edit, entering[layer + 1]):
        raise EngineError("BP506", f"an edit at block {layer} does not reach block {layer + 1} as it is")
    if torch.equal(plain, edited):
        raise EngineError("BP506", f"an edit at block {layer} as large as the stream changes no logit")
    return int(stream.shape[-1])


def _pass(
    model: Any, blocks: Any, ids: Any, edits: Mapping[int, Any]
) -> tuple[list[list[Any]], list[list[Any]], Any]:
    """One forward pass: the tensors given to each block, each block's streams before `edits`, and the logits."""
    import torch

    thread = threading.get_ident()
    entering: list[list[Any]] = [[] for _ in blocks]
    leaving: list[list[Any]] = [[] for _ in blocks]

    def before(layer: int) -> Callable[..., None]:
        def hook(module: Any, arguments: Any, keywords: Any) -> None:
            if threading.get_ident() == thread:
                given = (*arguments, *keywords.values())
                entering[layer] += [value for value in given if isinstance(value, torch.Tensor)]

        return hook

    def after(layer: int) -> Callable[..., Any]:
        def hook(module: Any, arguments: Any, output: Any) -> Any:
            if threading.get_ident() != thread:
                return None
            stream = output[0] if isinstance(output, tuple) else output
            leaving[layer].append(stream)
            if layer not in edits:
                return None
            edited = stream + edits[layer]
            return (edited, *output[1:]) if isinstance(output, tuple) else edited

        return hook

    handles = []
    try:
        for layer, block in enumerate(blocks):
            handles.append(block.register_forward_pre_hook(before(layer), with_kwargs=True))
            handles.append(block.register_forward_hook(after(layer)))
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    return entering, leaving, logits


def _among(stream: Any, tensors: Sequence[Any]) -> bool:
    """Whether `stream` is one of the tensors, number for number; they may be on another device."""
    import torch

    return any(
        torch.allclose(tensor.to(stream.device), stream, rtol=0, atol=0, equal_nan=True)
        for tensor in tensors
        if tensor.shape == stream.shape and tensor.dtype == stream.dtype
    )
